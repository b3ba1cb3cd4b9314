"""Keys: tenants and scopes come from the key alone; no keys, no open network (A56)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_ingest.auth import Keys, Scope, StartRefused
from rollgrid_ingest.settings import IngestSettings
from rollgrid_runtime.errors import RollgridError


def entry(key: str, tenant: str, *scopes: str) -> dict[str, Any]:
    return {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "scopes": list(scopes)}


def keys_file(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps(entries))
    return path


def test_without_keys_only_loopback_is_served() -> None:
    for host in ("127.0.0.1", "::1", "localhost"):
        principal = Keys.from_settings(IngestSettings(host=host)).authenticate(None)
        assert principal.tenant == "local"
        assert principal.scopes == set(Scope)
    for host in ("0.0.0.0", "::", "10.1.2.3", "example.org"):
        with pytest.raises(StartRefused):
            Keys.from_settings(IngestSettings(host=host))


def test_the_tenant_and_scopes_come_from_the_key(tmp_path: Path) -> None:
    path = keys_file(tmp_path, entry("one", "alice", "read"), entry("two", "bob", "submit", "admin"))
    keys = Keys.from_settings(IngestSettings(host="0.0.0.0", keys_file=path))
    alice = keys.authenticate("Bearer one")
    assert alice.tenant == "alice"
    alice.require(Scope.READ)
    with pytest.raises(RollgridError) as refused:
        alice.require(Scope.SUBMIT)
    assert refused.value.code is ErrorCode.FORBIDDEN
    assert keys.authenticate("bearer two").tenant == "bob"


@pytest.mark.parametrize(
    "header", [None, "", "one", "Basic one", "Bearer", "Bearer ", "Bearer three", "Bearer ö\ud800"]
)
def test_anything_else_is_anonymous(tmp_path: Path, header: str | None) -> None:
    keys = Keys.from_settings(IngestSettings(keys_file=keys_file(tmp_path, entry("one", "alice"))))
    with pytest.raises(RollgridError) as refused:
        keys.authenticate(header)
    assert refused.value.http_status == 401


@pytest.mark.parametrize(
    "entries",
    [
        [{"key_sha256": "00", "tenant": "alice", "scopes": []}],
        [{"key_sha256": "0" * 64, "tenant": "Al.ice", "scopes": []}],
        [{"key_sha256": "0" * 64, "tenant": "shared", "scopes": []}],
        [{"key_sha256": "0" * 64, "tenant": "alice", "scopes": ["root"]}],
        [{"key": "plain", "tenant": "alice"}],
    ],
)
def test_a_wrong_keys_file_refuses_the_start(tmp_path: Path, entries: list[dict[str, Any]]) -> None:
    with pytest.raises(StartRefused):
        Keys.from_settings(IngestSettings(keys_file=keys_file(tmp_path, *entries)))
    with pytest.raises(StartRefused):
        Keys.from_settings(IngestSettings(keys_file=tmp_path / "missing.json"))


def test_a_changed_file_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = keys_file(tmp_path, entry("one", "alice"))
    keys = Keys.from_settings(IngestSettings(keys_file=path))
    keys_file(tmp_path, entry("two", "bob"))
    os.utime(path, ns=(1, 1))
    keys.reload()
    assert keys.authenticate("Bearer two").tenant == "bob"
    with pytest.raises(RollgridError):
        keys.authenticate("Bearer one")
    path.write_text("{")
    os.utime(path, ns=(2, 2))
    keys.reload()
    assert keys.authenticate("Bearer two").tenant == "bob"
