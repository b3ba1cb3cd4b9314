"""The servers a stack stands on: NATS and Valkey here, S3 in `seaweed`, as parts that a supervisor runs.

Each is external when its address is in the environment (NATS_URL, REDIS_URL, S3_ENDPOINT or the
ROLLGRID_… form), else a program on loopback with random credentials, its data below the state folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollgrid_contracts.accounts import OPERATOR, TenantAccount, accounts_block

from rollgrid.errors import ConfigurationError

from . import binaries, probes
from .home import Credentials, Home, read_tenants, write_private
from .parts import Part
from .processes import port_is_free

LOOPBACK = "127.0.0.1"
NATS_MEMORY = "512MiB"
"""Soft bound (GOMEMLIMIT): beyond it the server collects harder."""

REDIS_MAX_BYTES = 512 * 1024 * 1024
NATS_CONF = """\
server_name: rollgrid
listen: {host}:{port}
max_payload: 2MB
{accounts}
jetstream {{
  store_dir: "{store}"
  sync_interval: always
  max_mem: 64MB
  max_file: 64GB
}}
"""

VALKEY_CONF = """\
bind {host}
port {port}
protected-mode yes
requirepass {password}
dir {folder}
appendonly yes
appendfsync everysec
save ""
maxmemory {limit}
maxmemory-policy volatile-lru
daemonize no
set-proc-title no
"""


def nats_part(home: Home, secrets: Credentials, port: Callable[[str], int], env: Mapping[str, str]) -> Part:
    """JetStream.  Its part's `exports` tell the services how to reach it."""
    url = env.get("ROLLGRID_NATS_URL") or env.get("NATS_URL")
    if url:
        access = probes.NatsAccess(
            url=url, user=env.get("ROLLGRID_NATS_USER"), password=env.get("ROLLGRID_NATS_PASSWORD")
        )
        return Part(
            name="nats", kind="server", stage=0, url=public_address(url), exports=_nats_exports(access),
            probe=lambda: probes.nats(access),
        )  # fmt: skip
    number = port("nats")
    access = probes.NatsAccess(
        url=f"nats://{LOOPBACK}:{number}", user=secrets.nats_user, password=secrets.nats_password
    )
    folder = home.data / "nats"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    conf = write_nats_conf(home, secrets, number, read_tenants(home))
    return Part(
        name="nats", kind="server", stage=0, url=access.url, exports=_nats_exports(access),
        argv=(str(binaries.nats_server()), "-c", str(conf)),
        env=clean_environment(env, GOMEMLIMIT=NATS_MEMORY), cwd=folder, probe=lambda: probes.nats(access), stop_s=20.0,
        prepare=lambda: adopt_streams(folder),
    )  # fmt: skip


def write_nats_conf(home: Home, secrets: Credentials, port: int, tenants: Iterable[TenantAccount]) -> Path:
    """The server's configuration, also what a running one reads again at a SIGHUP."""
    accounts = accounts_block(secrets.nats_user, secrets.nats_password, tenants)
    conf = home.conf / "nats.conf"
    text = NATS_CONF.format(host=LOOPBACK, port=port, accounts=accounts, store=home.data / "nats")
    write_private(conf, text.encode())
    return conf


def adopt_streams(folder: Path) -> None:
    """Streams of a stack that knew no accounts lie under the server's own: they become the operator's."""
    earlier, own = folder / "jetstream" / "$G", folder / "jetstream" / OPERATOR
    if earlier.is_dir() and not own.exists():
        earlier.rename(own)


def _nats_exports(access: probes.NatsAccess) -> dict[str, str]:
    exports = {"ROLLGRID_NATS_URL": access.url}
    if access.user:
        exports |= {"ROLLGRID_NATS_USER": access.user, "ROLLGRID_NATS_PASSWORD": access.password or ""}
    return exports


def redis_part(home: Home, secrets: Credentials, port: Callable[[str], int], env: Mapping[str, str]) -> Part:
    """Valkey, or Redis where only that is installed."""
    url = env.get("ROLLGRID_REDIS_URL") or env.get("REDIS_URL")
    if url:
        return Part(
            name="valkey", kind="server", stage=0, url=public_address(url), exports={"ROLLGRID_REDIS_URL": url},
            probe=lambda: probes.redis(url),
        )  # fmt: skip
    number = port("valkey")
    own = f"redis://:{secrets.redis_password}@{LOOPBACK}:{number}/0"
    folder, conf = home.data / "valkey", home.conf / "valkey.conf"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = VALKEY_CONF.format(
        host=LOOPBACK, port=number, password=secrets.redis_password, folder=folder, limit=REDIS_MAX_BYTES
    )
    write_private(conf, text.encode())
    return Part(
        name="valkey", kind="server", stage=0, url=public_address(own), exports={"ROLLGRID_REDIS_URL": own},
        argv=(str(binaries.valkey_server()), str(conf)),
        env=clean_environment(env), cwd=folder, probe=lambda: probes.redis(own), stop_s=10.0,
    )  # fmt: skip


def clean_environment(env: Mapping[str, str], **own: str) -> dict[str, str]:
    """What a server needs of the environment: nothing of ours, no credentials of the user's."""
    kept = {name: env[name] for name in ("PATH", "HOME", "LANG", "TMPDIR", "TZ") if name in env}
    return {**kept, **own}


def public_address(url: str) -> str:
    """The address without a password."""
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ConfigurationError(f"{url!r} is not an address")
    host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    return f"{parts.scheme}://{host}"


def free_port(taken: set[int]) -> int:
    """A free port below the kernel's range for outgoing connections, so that none of those takes it."""
    for _ in range(500):
        number = 15000 + int.from_bytes(os.urandom(2), "big") % 16000
        if number not in taken and port_is_free(number):
            taken.add(number)
            return number
    raise ConfigurationError("no free port between 15000 and 31000")
