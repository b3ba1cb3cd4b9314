"""Credentials and settings of the compose stack: made once, random, for the containers' user alone.

    python3 deploy/credentials.py [--folder FOLDER] [NAME=VALUE ...]

Writes deploy/secrets/* (a file per secret, 0600) where they are missing, and deploy/.env, which
`docker compose -f deploy/compose.yaml` reads by itself.  NAME=VALUE sets a variable of .env for good
(docs/deploy/compose.md lists them); what is not set keeps its value.  Prints paths, never a secret.
FOLDER is another place than deploy/, for a second stack: `docker compose --env-file FOLDER/.env`.
The key for clients is in deploy/secrets/api_key; its sha256 alone goes into the ingest container.
Needs nothing but Python.
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

HERE = Path(__file__).resolve().parent
CONTAINER_USER = 10001
"""Runs the containers when root starts them."""

DEFAULTS = {"ROLLGRID_POLICY": "smollm2-135m", "ROLLGRID_MODEL": "smollm2-135m-r1", "ROLLGRID_DTYPE": "float32"}
CONTEXTS = {"smollm2-135m-r1": 2048}
"""Bounds of the context, for a model whose own asks for more KV cache than a small machine has."""


def main() -> int:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=HERE)
    parser.add_argument("settings", nargs="*", metavar="NAME=VALUE", type=_pair)
    arguments = parser.parse_args()
    folder, changes = arguments.folder.absolute(), dict(arguments.settings)
    file = folder / ".env"
    settings = {**_owner(), **DEFAULTS, "ROLLGRID_SECRETS": str(folder / "secrets"), **_read(file), **changes}
    if "ROLLGRID_POLICIES" not in changes and _names_model(changes, settings):
        settings["ROLLGRID_POLICIES"] = json.dumps([_policy(settings)])
    owner = int(settings["ROLLGRID_UID"]), int(settings["ROLLGRID_GID"])
    places = Path(settings["ROLLGRID_SECRETS"])
    made = make_secrets(places, owner)
    _write(file, "".join(f"{name}={_quoted(value)}\n" for name, value in sorted(settings.items())))
    sys.stdout.write(f"settings: {file}\nsecrets:  {places} ({len(made)} made)\napi key:  {places / 'api_key'}\n")
    return 0


def _pair(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def make_secrets(folder: Path, owner: tuple[int, int]) -> list[str]:
    """The names of the files made; a file that is there stays."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = []
    # A password and its derived files are made together: one alone would be of no use.
    for names, texts in _secrets():
        if all((folder / name).exists() for name in names):
            continue
        for name, text in zip(names, texts, strict=True):
            _write(folder / name, text, owner)
            made.append(name)
    for name in made:
        if name == "api_key":  # the caller's own, not the containers'
            os.chown(folder / name, os.getuid(), os.getgid())
    return made


def _secrets() -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    nats, valkey, access, secret = (secrets.token_hex(24) for _ in range(4))
    key = f"rg-{secrets.token_urlsafe(32)}"
    users = f'authorization {{\n  user: "rollgrid"\n  password: "{nats}"\n}}\n'
    identity = {
        "name": "rollgrid",
        "credentials": [{"accessKey": access, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    entry = {
        "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
        "tenant": "local",
        "scopes": ["submit", "read", "admin"],
        "name": "made by deploy/credentials.py",
    }
    return [
        (("nats_password", "nats_auth"), (nats, users)),
        (
            ("valkey_password", "valkey_auth", "redis_url"),
            (valkey, f"requirepass {valkey}\n", f"redis://:{valkey}@valkey:6379/0"),
        ),
        (("s3_access_key", "s3_secret_key", "s3_identities"), (access, secret, json.dumps({"identities": [identity]}))),
        (("api_key", "api_keys"), (key, json.dumps([entry], indent=2) + "\n")),
    ]


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
