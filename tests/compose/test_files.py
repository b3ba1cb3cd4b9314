"""deploy/'s files by themselves: what they may not hold, and the credentials that are made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

from .project import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE = (DEPLOY / "compose.yaml").read_text()


def credentials(folder: Path, *settings: str) -> dict[str, str]:
    """The `.env` that deploy/credentials.py writes."""
    argv = [sys.executable, str(DEPLOY / "credentials.py"), "--folder", str(folder), *settings]
    subprocess.run(argv, check=True, capture_output=True, timeout=30)
    pairs = (line.partition("=") for line in (folder / ".env").read_text().splitlines())
    return {name: value.strip("'") for name, _, value in pairs}


def read(folder: Path) -> dict[str, str]:
    """Every secret under its path."""
    root = folder / "secrets"
    return {str(path.relative_to(root)): path.read_text() for path in root.rglob("*") if path.is_file()}


def test_images_have_official_names_and_pinned_tags() -> None:
    images = re.findall(r"^\s*image: (\S+)", COMPOSE, re.MULTILINE)
    foreign = [image for image in images if not image.startswith("rollgrid/")]
    assert {image.partition(":")[0] for image in foreign} >= {"nats", "valkey/valkey", "chrislusf/seaweedfs"}
    for image in foreign:
        name, _, tag = image.partition(":")
        assert "." not in name.partition("/")[0], f"{image} names a registry"
        assert re.search(r"\d+\.\d+", tag), f"{image} is not pinned"


def test_ports_are_published_on_loopback_only() -> None:
    published = re.findall(r"^\s*ports: \[(.*)\]$", COMPOSE, re.MULTILINE)
    assert published
    assert all(entry.startswith('"127.0.0.1:') for entry in published)


def test_every_secret_is_private_random_and_kept(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    settings, other = credentials(tmp_path / "one"), credentials(tmp_path / "two")
    first = read(tmp_path / "one")
    assert set(re.findall(r"}/(\w+)\"}", COMPOSE)) == {name for name in first if "/" not in name}
    for path in [*(tmp_path / "one/secrets").rglob("*"), tmp_path / "one/.env"]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    for name, text in read(tmp_path / "two").items():
        assert text != first[name], name
    credentials(tmp_path / "one")
    assert read(tmp_path / "one") == first
    assert settings["ROLLGRID_UID"] == other["ROLLGRID_UID"] != "0"
    if os.getuid() == 0:
        assert (tmp_path / "one/secrets/nats_password").stat().st_uid == int(settings["ROLLGRID_UID"])


def test_ingest_gets_the_digest_of_the_key_alone(tmp_path: Path) -> None:
    credentials(tmp_path)
    key = (tmp_path / "secrets/tenants/local/api_key").read_text()
    entries = (tmp_path / "secrets/api_keys").read_text()
    assert key not in entries
    assert hashlib.sha256(key.encode()).hexdigest() in {entry["key_sha256"] for entry in json.loads(entries)}


def test_another_model_changes_the_policies_unless_they_were_set(tmp_path: Path) -> None:
    assert json.loads(credentials(tmp_path)["ROLLGRID_POLICIES"])[0]["path"] == "/models/smollm2-135m-r1"
    changed = credentials(tmp_path, "ROLLGRID_MODEL=tiny-r1", "ROLLGRID_POLICY=tiny")
    assert json.loads(changed["ROLLGRID_POLICIES"]) == [{"name": "tiny", "path": "/models/tiny-r1", "dtype": "float32"}]
    assert credentials(tmp_path)["ROLLGRID_MODEL"] == "tiny-r1"
    assert credentials(tmp_path, "ROLLGRID_MODEL=x", "ROLLGRID_POLICIES=[]")["ROLLGRID_POLICIES"] == "[]"


def test_a_further_tenant_gets_a_key_and_an_account_and_the_others_keep_theirs(tmp_path: Path) -> None:
    credentials(tmp_path)
    before = read(tmp_path)
    credentials(tmp_path, "--tenant", "acme")
    after = read(tmp_path)
    assert {name for name in after if after[name] != before.get(name)} == {
        "tenants/acme/api_key", "tenants/acme/nats_password", "nats_auth", "api_keys",
    }  # fmt: skip
    scopes = {(entry["tenant"], *entry["scopes"]) for entry in json.loads(after["api_keys"])}
    assert scopes == {("acme", "submit", "read"), ("local", "submit", "read", "admin"), ("local", "admin")}
