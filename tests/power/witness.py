"""Reads RG_TRAJECTORIES and the manifests as they appear: `python -m tests.power.witness JOURNAL`.

A process of its own, as a trainer at the stream is.  A line is on disk before the next read, so a
witness that is killed claims no more than it has read.  Servers come from the environment.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.columns import MANIFEST_PREFIX
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, StorageError
from rollgrid_runtime.reading import Stored, read_after
from rollgrid_runtime.settings import NatsSettings, S3Settings

from tests.chaos.checker import Close

PAGE = 500
STREAM_EVERY_S = 0.005
"""As soon as a close can be read it is: one that is readable before it is durable must be caught."""

MANIFESTS_EVERY_S = 0.2
OUTSIDE_HEADERS = ("Nats-Sequence", "Nats-Time-Stamp", "Nats-Subject", "Nats-Num-Pending", "Nats-Last-Sequence")
"""What a direct get adds: not part of what was stored, but for the sequence and the time."""


class ReadClose(msgspec.Struct, frozen=True, kw_only=True, tag="close"):
    """One message of RG_TRAJECTORIES; `stamp` is when the server says it stored it."""

    sequence: int
    subject: str
    stamp: str
    headers: dict[str, str]
    data: bytes

    @classmethod
    def of(cls, stored: Stored) -> ReadClose:
        own = {name: value for name, value in sorted(stored.headers.items()) if name not in OUTSIDE_HEADERS}
        stamp = stored.headers.get("Nats-Time-Stamp", "")
        return cls(sequence=stored.sequence, subject=stored.subject, stamp=stamp, headers=own, data=stored.data)

    @property
    def group_id(self) -> str:
        return self.headers[topology.Header.GROUP.value]

    def close(self) -> Close:
        """Decoded.  The bodies of these tests are inline: no claim checks."""
        kind = self.headers.get(topology.Header.CONTENT_TYPE, codec.MSGPACK)
        return Close(self.sequence, self.subject, self.headers, codec.decode(self.data, GroupClosed, kind))


class ReadManifest(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    key: str
    sha256: str


class Purged(msgspec.Struct, frozen=True, kw_only=True, tag="purged"):
    """The stream said that it begins at `first`."""

    first: int


Line = ReadClose | ReadManifest | Purged


class Witnessed(NamedTuple):
    """What the witness has read: closes by sequence, digests of manifests by key, the stream's beginning."""

    closes: Mapping[int, ReadClose]
    manifests: Mapping[str, str]
    first: int


def read(path: Path) -> Witnessed:
    closes: dict[int, ReadClose] = {}
    manifests: dict[str, str] = {}
    first = 1
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else ():
        if not raw.endswith(b"\n"):
            break
        line: Line = codec.decode(raw, Line, codec.JSON)  # type: ignore[arg-type]
        if isinstance(line, ReadClose):
            closes[line.sequence] = line
        elif isinstance(line, ReadManifest):
            manifests[line.key] = line.sha256
        else:
            first = line.first
    return Witnessed(closes, manifests, first)


async def stream_closes(bus: Bus) -> list[ReadClose]:
    """Every message the stream holds, in order."""
    found: list[ReadClose] = []
    while True:
        after = found[-1].sequence if found else 0
        page = await read_after(bus, topology.TRAJECTORIES.name, subjects.TRAJECTORIES_ALL, after, PAGE)
        found += map(ReadClose.of, page.messages)
        if not page.messages or not page.pending:
            return found


async def new_manifests(blobs: Blobs, known: Mapping[str, str]) -> dict[str, str]:
    """Digests of the manifests that are listed and not `known`."""
    found: dict[str, str] = {}
    for key in await blobs.keys(MANIFEST_PREFIX):
        data = await blobs.get(key) if key not in known else None
        if data is not None:
            found[key] = hashlib.sha256(data).hexdigest()
    return found


class Witness:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = read(path)

    async def run(self) -> None:
        """Until killed."""
        blobs = Blobs(S3Settings())
        await blobs.ensure_bucket()
        bus = await Bus.connect(NatsSettings(), "witness", blobs)
        self._write(Purged(first=self._known.first))  # it watches: the flow may begin
        await asyncio.gather(self._closes(bus), self._manifests(bus, blobs))

    def _write(self, line: Line) -> None:
        with self._path.open("ab", buffering=0) as out:
            out.write(codec.encode(line, codec.JSON) + b"\n")

    async def _closes(self, bus: Bus) -> None:
        after = max(self._known.closes, default=0)
        while True:
            try:
                page = await read_after(bus, topology.TRAJECTORIES.name, subjects.TRAJECTORIES_ALL, after, PAGE)
            except BusError as error:
                print(f"the stream is not read: {error.message}", file=sys.stderr)
                continue
            for stored in page.messages:
                self._write(ReadClose.of(stored))
                after = stored.sequence
            await asyncio.sleep(STREAM_EVERY_S)

    async def _manifests(self, bus: Bus, blobs: Blobs) -> None:
        known, first = dict(self._known.manifests), self._known.first
        while True:
            try:
                fresh = await new_manifests(blobs, known)
                begins = int((await bus.stream_info(topology.TRAJECTORIES.name)).state.first_seq)
            except (BusError, StorageError) as error:
                print(f"the archive is not read: {error.message}", file=sys.stderr)
                continue
            for key, sha256 in fresh.items():
                self._write(ReadManifest(key=key, sha256=sha256))
            known |= fresh
            if begins > first:
                self._write(Purged(first=begins))
                first = begins
            await asyncio.sleep(MANIFESTS_EVERY_S)


if __name__ == "__main__":
    asyncio.run(Witness(Path(sys.argv[1])).run())
