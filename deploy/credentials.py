"""Credentials and settings of the compose stack: made once, random, for the containers' user alone.

    python deploy/credentials.py [--folder FOLDER] [--tenant NAME ...] [NAME=VALUE ...]

Writes deploy/secrets/* (a file per secret, 0600) where they are missing, and deploy/.env, which
`docker compose -f deploy/compose.yaml` reads by itself.  NAME=VALUE sets a variable of .env for good
(docs/deploy/compose.md lists them); what is not set keeps its value.  Prints paths, never a secret.
FOLDER is another place than deploy/, for a second stack: `docker compose --env-file FOLDER/.env`.

A tenant has secrets/tenants/NAME/api_key, whose sha256 alone goes into a container, and an account of
its own on NATS with the password in …/nats_password and its name as user.  "local" is always there.
Needs the environment of `make setup` (ROLLGRID_ENGINE=none will do).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import secrets
import sys
from pathlib import Path

from rollgrid_contracts.accounts import TenantAccount, accounts_block

HERE = Path(__file__).resolve().parent
OPERATOR, OWN_TENANT = "rollgrid", "local"
CONTAINER_USER = 10001
"""Runs the containers when root starts them."""

DEFAULTS = {"ROLLGRID_POLICY": "smollm2-135m", "ROLLGRID_MODEL": "smollm2-135m-r1", "ROLLGRID_DTYPE": "float32"}
CONTEXTS = {"smollm2-135m-r1": 2048}
"""Bounds of the context, for a model whose own asks for more KV cache than a small machine has."""


def main() -> int:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("--tenant", action="append", default=[], dest="tenants", metavar="NAME")
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", type=_pair)
    arguments = parser.parse_args()
    folder, changes = arguments.folder.absolute(), dict(arguments.settings)
    file = folder / ".env"
    settings = {**_owner(), **DEFAULTS, "ROLLGRID_SECRETS": str(folder / "secrets"), **_read(file), **changes}
    if "ROLLGRID_POLICIES" not in changes and _names_model(changes, settings):
        settings["ROLLGRID_POLICIES"] = json.dumps([_policy(settings)])
    owner = int(settings["ROLLGRID_UID"]), int(settings["ROLLGRID_GID"])
    places = Path(settings["ROLLGRID_SECRETS"])
    made = make_secrets(places, owner, [OWN_TENANT, *arguments.tenants])
    _write(file, "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(settings.items())))
    sys.stdout.write(f"settings: {file}\nsecrets:  {places} ({made} made)\ntenants:  {places / 'tenants'}\n")
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def make_secrets(folder: Path, owner: tuple[int, int], tenants: list[str]) -> int:
    """How many files were made anew or changed; a secret that is there stays."""
    for place in (folder, folder / "tenants", *(folder / "tenants" / name for name in tenants)):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = 0
    for name in ("nats_password", "valkey_password", "s3_access_key", "s3_secret_key"):
        made += _keep(folder / name, secrets.token_hex(24), owner)
    made += _keep(folder / "metrics_key", _new_key(), owner)
    for place in (folder / "tenants").iterdir():
        made += _keep(place / "api_key", _new_key())
        made += _keep(place / "nats_password", secrets.token_hex(24))
    for name, text in _derived(folder).items():
        path = folder / name
        if not path.exists() or path.read_text() != text:
            _write(path, text, owner)
            made += 1
    return made


def _keep(path: Path, text: str, owner: tuple[int, int] | None = None) -> bool:
    if path.exists():
        return False
    _write(path, text, owner)
    return True


def _derived(folder: Path) -> dict[str, str]:
    """What the servers and ingest read, made of the secrets."""
    given = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    tenants = sorted((folder / "tenants").iterdir())
    accounts = [TenantAccount(tenant=one.name, password=(one / "nats_password").read_text()) for one in tenants]
    identity = {
        "name": "rollgrid",
        "credentials": [{"accessKey": given["s3_access_key"], "secretKey": given["s3_secret_key"]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    keys = [
        _entry(
            (one / "api_key").read_text(), one.name, "submit", "read", *(["admin"] if one.name == OWN_TENANT else [])
        )
        for one in tenants
    ]
    keys.append(_entry(given["metrics_key"], OWN_TENANT, "admin"))
    valkey = given["valkey_password"]
    return {
        "nats_auth": accounts_block(OPERATOR, given["nats_password"], accounts),
        "valkey_auth": f"requirepass {valkey}\n",
        "redis_url": f"redis://:{valkey}@valkey:6379/0",
        "s3_identities": json.dumps({"identities": [identity]}),
        "api_keys": json.dumps(keys, indent=2) + "\n",
    }


def _new_key() -> str:
    return f"rg-{secrets.token_urlsafe(32)}"


def _entry(key: str, tenant: str, *scopes: str) -> dict[str, object]:
    """One key in ingest's file."""
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"key_sha256": digest, "tenant": tenant, "scopes": scopes, "name": "made by deploy/credentials.py"}


def _owner() -> dict[str, str]:
    uid, gid = os.getuid(), os.getgid()
    if uid == 0:
        uid = gid = CONTAINER_USER
    return {"ROLLGRID_UID": str(uid), "ROLLGRID_GID": str(gid)}


def _names_model(changes: dict[str, str], settings: dict[str, str]) -> bool:
    return "ROLLGRID_POLICIES" not in settings or bool(changes.keys() & DEFAULTS.keys())


def _policy(settings: dict[str, str]) -> dict[str, object]:
    model = settings["ROLLGRID_MODEL"]
    policy: dict[str, object] = {
        "name": settings["ROLLGRID_POLICY"],
        "path": f"/models/{model}",
        "dtype": settings["ROLLGRID_DTYPE"],
    }
    if model in CONTEXTS:
        policy["max_model_len"] = CONTEXTS[model]
    return policy


def _read(path: Path) -> dict[str, str]:
    """An earlier .env of this program."""
    if not path.exists():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines() if "=" in line and line[0] != "#")
    return {name: value.removeprefix("'").removesuffix("'") for name, _, value in pairs}


def _quoted(value: str) -> str:
    if "'" in value or "\n" in value:
        raise SystemExit(f"{value!r} can not stand in .env: it has a quote or a new line")
    return f"'{value}'"


def _write(path: Path, text: str, owner: tuple[int, int] | None = None) -> None:
    """0600 from the first byte on, and there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as handle:
        handle.write(text)
    if owner is not None and os.getuid() == 0:
        os.chown(unfinished, *owner)
    unfinished.rename(path)


if __name__ == "__main__":
    sys.exit(main())
