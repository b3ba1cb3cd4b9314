"""The stack's S3: SeaweedFS in one process, made to keep what it has acknowledged.

By itself it does not: object bytes, its index of them and its metadata all wait in the page cache.
Here the metadata store is SQLite (flushed at every commit), a filer rule flushes the bytes of every
object, and the index, which is never flushed, is made again from the bytes after an unclean end.
Measured with a power cut on a loop image: nothing lost with all three, everything without them.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path

from . import binaries, probes
from .home import Credentials, Home
from .parts import Part
from .servers import LOOPBACK, clean_environment, public_address

BUCKET = "rollgrid"
MEMORY = "1GiB"
"""Soft bound (GOMEMLIMIT)."""

VOLUME_MB = 128
"""Several volumes must fit the free disk, or nothing can be written (its own choice can be 1 GiB)."""

UNCLEAN = ".running"
"""There while weed runs: found at a start, it was killed or the power failed."""

FILER_RULES = b'{"version":1,"locations":[{"locationPrefix":"/buckets/","fsync":true}]}'

FILER_TOML = """\
# SQLite flushes at every commit; the default store (LevelDB) does not, and loses acknowledged objects.
# Without the write-ahead log a power cut may bring back the rollback journal of the last commit.
[leveldb2]
enabled = false
[sqlite]
enabled = true
dbFile = "./filer.db?_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
"""


def s3_part(
    home: Home, secrets: Credentials, port: Callable[[str], int], env: Mapping[str, str], *, fsync: bool = True
) -> Part:
    """S3 as a part.  With `fsync` an acknowledged object survives a power cut."""
    if _external(env):
        access = s3_access(home, env, {})
        return Part(
            name="s3", kind="server", stage=0, url=public_address(access.endpoint or ""), exports=_exports(access),
            probe=lambda: probes.s3(access),
        )  # fmt: skip
    names = [f"{part}.port{kind}" for part in ("s3", "master", "volume", "filer", "admin") for kind in ("", ".grpc")]
    ports = {name: port(_port_name(name)) for name in names}
    access = s3_access(home, env, {_port_name(name): number for name, number in ports.items()})
    weed = Weed(home.data / "s3", access, ports, fsync=fsync)
    credentials = {"AWS_ACCESS_KEY_ID": secrets.s3_access_key, "AWS_SECRET_ACCESS_KEY": secrets.s3_secret_key}
    return Part(
        name="s3", kind="server", stage=0, url=access.endpoint or "", exports=_exports(access), argv=weed.argv(),
        env=clean_environment(env, HOME=str(weed.folder), GOMEMLIMIT=MEMORY, **credentials),
        cwd=weed.folder, probe=weed.probe, prepare=weed.prepare, after_clean_stop=weed.mark_clean, stop_s=20.0,
    )  # fmt: skip


def s3_access(home: Home, env: Mapping[str, str], ports: Mapping[str, int]) -> probes.S3Access:
    """How to reach the S3 of a stack: the environment's, else the stack's own on its port."""
    if not _external(env):
        secrets = home.credentials()
        return probes.S3Access(
            endpoint=f"http://{LOOPBACK}:{ports[_port_name('s3.port')]}",
            access_key=secrets.s3_access_key,
            secret_key=secrets.s3_secret_key,
            bucket=BUCKET,
        )
    return probes.S3Access(
        endpoint=_external(env),
        access_key=env.get("ROLLGRID_S3_ACCESS_KEY") or env.get("AWS_ACCESS_KEY_ID"),
        secret_key=env.get("ROLLGRID_S3_SECRET_KEY") or env.get("AWS_SECRET_ACCESS_KEY"),
        bucket=env.get("ROLLGRID_S3_BUCKET", BUCKET),
        region=env.get("ROLLGRID_S3_REGION") or env.get("AWS_REGION") or "us-east-1",
    )


class Weed:
    """`weed mini` in `folder`, on loopback ports named as its options."""

    def __init__(self, folder: Path, access: probes.S3Access, ports: Mapping[str, int], *, fsync: bool) -> None:
        self.folder, self.access, self.ports, self.fsync = folder, access, ports, fsync
        self.program = binaries.weed()
        self._rules_set = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / "filer.toml").write_text(FILER_TOML)

    def argv(self) -> tuple[str, ...]:
        options: dict[str, object] = {
            "dir": self.folder, "ip": LOOPBACK, "ip.bind": LOOPBACK, **self.ports,
            "s3.port.iceberg": 0, "s3.port.lance": 0, "admin.ui": "false", "webdav": "false",
            "master.telemetry": "false", "s3.allowedOrigins": "http://" + LOOPBACK, "s3.autoCreateBucket": "false",
            "filer.exposeDirectoryData": "false", "filer.ui.deleteDir": "false", "master.volumeSizeLimitMB": VOLUME_MB,
        }  # fmt: skip
        return (
            str(self.program),
            "-logtostderr=true",
            "mini",
            *(f"-{name}={value}" for name, value in options.items()),
        )

    def prepare(self) -> None:
        """Before each start."""
        self._rules_set = False
        if self.fsync and (self.folder / UNCLEAN).exists():
            rebuild_indexes(self.program, self.folder)
        (self.folder / UNCLEAN).touch()

    async def probe(self) -> str:
        """Switch durability on, once a start, before anything is called ready; then a real PUT and GET."""
        if self.fsync and not self._rules_set:
            await asyncio.to_thread(set_filer_rules, self.ports["filer.port"])
            self._rules_set = True
        await probes.s3(self.access)
        return await asyncio.to_thread(binaries.version, self.program)

    def mark_clean(self) -> None:
        """After a stop in order: the indexes are durable before the mark goes."""
        for index in self.folder.glob("*.idx"):
            with index.open("rb") as handle:
                os.fsync(handle.fileno())
        (self.folder / UNCLEAN).unlink(missing_ok=True)


def set_filer_rules(port: int) -> None:
    """Have every object's bytes flushed before its PUT is answered.  Raises ProbeFailed."""
    request = urllib.request.Request(
        f"http://{LOOPBACK}:{port}/etc/seaweedfs/filer.conf", data=FILER_RULES, method="PUT"
    )
    try:
        with urllib.request.urlopen(request, timeout=probes.TIMEOUT_S):  # noqa: S310 - loopback
            pass
    except OSError as error:
        raise probes.ProbeFailed(f"filer: {error!r}") from error


def rebuild_indexes(weed: Path, folder: Path) -> None:
    """Make each volume's index anew from its data, which takes about a second per few GiB.

    A volume that was never flushed (its file is empty) stays as it is.
    """
    if not list(folder.glob("*.dat")):
        return
    subprocess.run(
        [weed, "fix", "-ignoreError", str(folder)],
        check=True, timeout=600, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True,
    )  # fmt: skip


def _external(env: Mapping[str, str]) -> str | None:
    return env.get("ROLLGRID_S3_ENDPOINT") or env.get("S3_ENDPOINT") or None


def _port_name(option: str) -> str:
    return f"s3_{option}".replace(".", "_")


def _exports(access: probes.S3Access) -> dict[str, str]:
    exports = {
        "ROLLGRID_S3_ENDPOINT": access.endpoint,
        "ROLLGRID_S3_ACCESS_KEY": access.access_key,
        "ROLLGRID_S3_SECRET_KEY": access.secret_key,
        "ROLLGRID_S3_BUCKET": access.bucket,
        "ROLLGRID_S3_REGION": access.region,
    }
    return {name: value for name, value in exports.items() if value}
