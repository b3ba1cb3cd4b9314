"""The three servers a stack stands on: NATS, Valkey and S3, as parts that a supervisor runs.

Each is external when its address is in the environment (NATS_URL, REDIS_URL, S3_ENDPOINT or the
ROLLGRID_… form), else a program on loopback with random credentials, its data below the state folder.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollgrid.errors import ConfigurationError

from . import binaries, probes
from .home import Credentials, Home, write_private
from .parts import Part

LOOPBACK = "127.0.0.1"
NATS_MEMORY = "512MiB"
WEED_MEMORY = "1GiB"
"""Soft bounds (GOMEMLIMIT): beyond them the Go servers collect harder."""

REDIS_MAX_BYTES = 512 * 1024 * 1024
BUCKET = "rollgrid"
UNCLEAN = ".running"
"""There while weed runs: found at a start, it was killed or the power failed."""

FILER_RULES = b'{"version":1,"locations":[{"locationPrefix":"/buckets/","fsync":true}]}'
"""Every object's bytes are flushed before its PUT is answered (without it they are not)."""

FILER_TOML = """\
# SQLite flushes at every commit; the default store (LevelDB) does not, and loses acknowledged objects.
[leveldb2]
enabled = false
[sqlite]
enabled = true
dbFile = "./filer.db"
"""

NATS_CONF = """\
server_name: rollgrid
listen: {host}:{port}
max_payload: 2MB
authorization {{
  user: "{user}"
  password: "{password}"
}}
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
            name="nats", kind="server", stage=0, url=_public(url), exports=_nats_exports(access),
            probe=lambda: probes.nats(access),
        )  # fmt: skip
    number = port("nats")
    access = probes.NatsAccess(
        url=f"nats://{LOOPBACK}:{number}", user=secrets.nats_user, password=secrets.nats_password
    )
    folder, conf = home.data / "nats", home.conf / "nats.conf"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    text = NATS_CONF.format(
        host=LOOPBACK, port=number, user=secrets.nats_user, password=secrets.nats_password, store=folder
    )
    write_private(conf, text.encode())
    return Part(
        name="nats", kind="server", stage=0, url=access.url, exports=_nats_exports(access),
        argv=(str(binaries.nats_server()), "-c", str(conf)),
        env=_clean(env, GOMEMLIMIT=NATS_MEMORY), cwd=folder, probe=lambda: probes.nats(access), stop_s=20.0,
    )  # fmt: skip


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
            name="valkey", kind="server", stage=0, url=_public(url), exports={"ROLLGRID_REDIS_URL": url},
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
        name="valkey", kind="server", stage=0, url=_public(own), exports={"ROLLGRID_REDIS_URL": own},
        argv=(str(binaries.valkey_server()), str(conf)),
        env=_clean(env), cwd=folder, probe=lambda: probes.redis(own), stop_s=10.0,
    )  # fmt: skip


def s3_part(
    home: Home, secrets: Credentials, port: Callable[[str], int], env: Mapping[str, str], *, fsync: bool = True
) -> Part:
    """SeaweedFS in one process.  With `fsync` an acknowledged object survives a power cut."""
    endpoint = env.get("ROLLGRID_S3_ENDPOINT") or env.get("S3_ENDPOINT")
    if endpoint:
        return _external_s3(endpoint, env)
    ports = {
        f"{part}.port{kind}": port(f"s3_{part}{kind}".replace(".", "_"))
        for part in ("s3", "master", "volume", "filer", "admin")
        for kind in ("", ".grpc")
    }
    access = probes.S3Access(
        endpoint=f"http://{LOOPBACK}:{ports['s3.port']}",
        access_key=secrets.s3_access_key,
        secret_key=secrets.s3_secret_key,
        bucket=BUCKET,
    )
    folder = home.data / "s3"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "filer.toml").write_text(FILER_TOML)
    program = binaries.weed()

    async def probe() -> str:
        if fsync:
            await asyncio.to_thread(_set_filer_rules, ports["filer.port"])
        await probes.s3(access)
        return await asyncio.to_thread(binaries.version, program)

    def prepare() -> None:
        if fsync and (folder / UNCLEAN).exists():
            rebuild_indexes(program, folder)
        (folder / UNCLEAN).touch()

    return Part(
        name="s3", kind="server", stage=0, url=access.endpoint or "", exports=_s3_exports(access),
        argv=(str(program), *_weed_arguments(folder, ports)),
        env=_clean(
            env, HOME=str(folder), GOMEMLIMIT=WEED_MEMORY,
            AWS_ACCESS_KEY_ID=secrets.s3_access_key, AWS_SECRET_ACCESS_KEY=secrets.s3_secret_key,
        ),
        cwd=folder, probe=probe, prepare=prepare, after_clean_stop=lambda: _mark_clean(folder),
        stop_s=20.0,
    )  # fmt: skip


def _weed_arguments(folder: Path, ports: Mapping[str, int]) -> list[str]:
    options: dict[str, object] = {
        "dir": folder, "ip": LOOPBACK, "ip.bind": LOOPBACK, **ports,
        "s3.port.iceberg": 0, "s3.port.lance": 0, "admin.ui": "false", "webdav": "false",
        "master.telemetry": "false", "s3.allowedOrigins": "http://" + LOOPBACK, "s3.autoCreateBucket": "false",
        "filer.exposeDirectoryData": "false", "filer.ui.deleteDir": "false",
        "filer.localSocket": folder / "filer.sock", "s3.localSocket": folder / "s3.sock",
        "master.volumeSizeLimitMB": 1024,
    }  # fmt: skip
    return ["-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in options.items())]


def _set_filer_rules(port: int) -> None:
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/etc/seaweedfs/filer.conf", data=FILER_RULES, method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=probes.TIMEOUT_S):  # noqa: S310
            pass
    except OSError as error:
        raise probes.ProbeFailed(f"filer: {error!r}") from error


def rebuild_indexes(weed: Path, folder: Path) -> None:
    """Make each volume's index anew from its data: only the data is flushed at every write.

    Without it a power cut loses flushed objects whose index entries were still in memory (measured).
    """
    if not list(folder.glob("*.dat")):
        return
    subprocess.run(
        [weed, "fix", "-ignoreError", str(folder)],
        check=True, timeout=600, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True,
    )  # fmt: skip


def _mark_clean(folder: Path) -> None:
    """The indexes are durable before the mark goes."""
    for index in folder.glob("*.idx"):
        with index.open("rb") as handle:
            os.fsync(handle.fileno())
    (folder / UNCLEAN).unlink(missing_ok=True)


def _external_s3(endpoint: str, env: Mapping[str, str]) -> Part:
    access = probes.S3Access(
        endpoint=endpoint,
        access_key=env.get("ROLLGRID_S3_ACCESS_KEY") or env.get("AWS_ACCESS_KEY_ID"),
        secret_key=env.get("ROLLGRID_S3_SECRET_KEY") or env.get("AWS_SECRET_ACCESS_KEY"),
        bucket=env.get("ROLLGRID_S3_BUCKET", BUCKET),
        region=env.get("ROLLGRID_S3_REGION") or env.get("AWS_REGION") or "us-east-1",
    )
    return Part(
        name="s3", kind="server", stage=0, url=_public(endpoint), exports=_s3_exports(access),
        probe=lambda: probes.s3(access),
    )  # fmt: skip


def _s3_exports(access: probes.S3Access) -> dict[str, str]:
    exports = {
        "ROLLGRID_S3_ENDPOINT": access.endpoint,
        "ROLLGRID_S3_ACCESS_KEY": access.access_key,
        "ROLLGRID_S3_SECRET_KEY": access.secret_key,
        "ROLLGRID_S3_BUCKET": access.bucket,
        "ROLLGRID_S3_REGION": access.region,
    }
    return {name: value for name, value in exports.items() if value}


def _clean(env: Mapping[str, str], **own: str) -> dict[str, str]:
    """What a server needs of the environment: nothing of ours, no credentials of the user's."""
    kept = {name: env[name] for name in ("PATH", "HOME", "LANG", "TMPDIR", "TZ") if name in env}
    return {**kept, **own}


def _public(url: str) -> str:
    """The address without a password."""
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ConfigurationError(f"{url!r} is not an address")
    host = parts.hostname if parts.port is None else f"{parts.hostname}:{parts.port}"
    return f"{parts.scheme}://{host}"


def free_port(taken: set[int]) -> int:
    """A free port below the kernel's range for outgoing connections, so that none of those takes it."""
    from .processes import port_is_free

    for _ in range(500):
        number = 15000 + int.from_bytes(os.urandom(2), "big") % 16000
        if number not in taken and port_is_free(number):
            taken.add(number)
            return number
    raise ConfigurationError("no free port between 15000 and 31000")
