"""I11: an object that S3 has acknowledged survives a power cut, as the stack runs its server.

The server's folder is on a loop-mounted file system whose image is copied while the server is
stopped; a server booted on the copy must have every acknowledged object.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollgrid.stack import probes
from rollgrid.stack.home import Home
from rollgrid.stack.parts import Part
from rollgrid.stack.seaweed import s3_access, s3_part
from rollgrid.stack.services import Ports

from tests.support.processes import Process
from tests.support.servers import scratch
from tests.support.waiting import until, wait_until

pytestmark = [pytest.mark.power, pytest.mark.slow, pytest.mark.timeout(300)]

WRITERS, OBJECTS = 4, 200
OPTIONS = "loop,noatime,commit=600"
"""The file system writes nothing of its own accord: only what was flushed is on the copy."""

SIZES = (3_000, 40_000, 6_000_000)
"""A small object, one inside a chunk, one of several chunks."""


def mount(image: Path, target: Path) -> None:
    target.mkdir(exist_ok=True)
    subprocess.run(["mount", "-o", OPTIONS, str(image), str(target)], check=True)


@pytest.fixture
def disk() -> Iterator[Path]:
    """A folder with an ext4 image, mounted at ./before."""
    if os.geteuid() != 0:
        pytest.skip("a loop mount needs root")
    with scratch("power") as folder:
        image = folder / "before.img"
        subprocess.run(["truncate", "-s", "2G", str(image)], check=True)
        subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)
        mounted = subprocess.run(["mount", "-o", "loop", str(image), str(folder)], capture_output=True)
        if mounted.returncode != 0:
            pytest.skip(f"no loop mounts here: {mounted.stderr.decode()}")
        subprocess.run(["umount", str(folder)], check=True)
        mount(image, folder / "before")
        try:
            yield folder
        finally:
            for name in ("before", "after"):
                subprocess.run(["umount", "-l", str(folder / name)], capture_output=True)


def part_on(root: Path) -> tuple[Part, probes.S3Access, Process]:
    home = Home(root / "home")
    home.create()
    ports = Ports(home)
    part = s3_part(home, home.credentials(), ports, {"PATH": os.environ["PATH"]})
    ports.save()
    # The server reads its settings from the folder it is started in.
    argv = ["/usr/bin/env", "-C", str(part.cwd), *part.argv]
    process = Process("weed", argv, root.parent / f"{root.name}.log", part.env)
    return part, s3_access(home, {}, ports.taken), process


async def start(part: Part, process: Process) -> None:
    async def ready() -> bool:
        assert part.probe is not None
        try:
            await part.probe()
        except probes.ProbeFailed:
            return False
        return True

    part.prepare()
    process.start()
    try:
        await until(ready, 60, "S3 works", every_s=0.1)
    except TimeoutError as error:
        raise AssertionError(process.log_tail()) from error


class Writer(threading.Thread):
    """Writes objects by conditional create until told to stop; `acknowledged` maps keys to digests."""

    def __init__(self, number: int, access: probes.S3Access) -> None:
        super().__init__(daemon=True)
        self.number, self.access = number, access
        self.acknowledged: dict[str, str] = {}
        self.stopped = threading.Event()

    def run(self) -> None:
        client: Any = probes.s3_client.__wrapped__(self.access)
        count = 0
        while not self.stopped.is_set():
            body = os.urandom(SIZES[2] if count % 11 == 0 else SIZES[count % 2])
            key = f"archive/{self.number}/{count}"
            try:
                client.put_object(Bucket=self.access.bucket, Key=key, Body=body, IfNoneMatch="*")
            except Exception:
                return  # the server is stopped: not acknowledged
            if not self.stopped.is_set():
                self.acknowledged[key] = hashlib.sha256(body).hexdigest()
            count += 1


async def test_no_acknowledged_object_is_lost(disk: Path) -> None:
    part, access, process = part_on(disk / "before")
    await start(part, process)
    writers = [Writer(number, access) for number in range(WRITERS)]
    for writer in writers:
        writer.start()
    wait_until(lambda: sum(len(writer.acknowledged) for writer in writers) >= OBJECTS, 120, "objects are written")
    process.pause()
    for writer in writers:
        writer.stopped.set()
    acknowledged = {key: digest for writer in writers for key, digest in writer.acknowledged.items()}
    subprocess.run(["cp", "--sparse=always", str(disk / "before.img"), str(disk / "after.img")], check=True)
    process.kill()

    mount(disk / "after.img", disk / "after")
    part, access, process = part_on(disk / "after")
    try:
        await start(part, process)
        client = probes.s3_client(access)
        lost, altered = [], []
        for key, digest in acknowledged.items():
            try:
                body = client.get_object(Bucket=access.bucket, Key=key)["Body"].read()
            except client.exceptions.ClientError:
                lost.append(key)
                continue
            if hashlib.sha256(body).hexdigest() != digest:
                altered.append(key)
        print(f"{len(acknowledged)} acknowledged, {len(lost)} lost, {len(altered)} altered")
        assert not lost
        assert not altered
    finally:
        process.kill()
