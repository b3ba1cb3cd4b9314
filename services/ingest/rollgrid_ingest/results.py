"""Closed groups by cursor: pages, long polls and event streams, from the stream or, when older, the archive.

The cursor is the RG_TRAJECTORIES sequence everywhere, so a reader may change between them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

from rollgrid_contracts import codec, subjects
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.topology import EXPECTED_SEQUENCE_HEADER, TRAJECTORIES, Header
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.archive import ArchiveReader
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import BATCH_SEQUENCE_HEADER, FALLBACK_WAKE_S, PAGE_BYTES, Stored, Tail, read_after

from .handler import Handler
from .ledger_client import LedgerClient

log = get_logger(__name__)


class Record(NamedTuple):
    """A closed group under its cursor, as stored in msgpack (`packed`), or decoded (`read`) from JSON or the archive."""

    cursor: int
    packed: bytes | None = None
    read: GroupClosed | None = None
    archived: bool = False

    @property
    def group(self) -> GroupClosed:
        return self.read if self.read is not None else codec.decode(self.packed or b"", GroupClosed)

    @property
    def msgpack(self) -> bytes:
        return self.packed if self.packed is not None else codec.encode(self.read)


class ResultPage(NamedTuple):
    """`cursor` is how far was read, `done` that a batch has no more to come."""

    records: list[Record]
    cursor: int
    done: bool


class ReadScope(NamedTuple):
    """What is read: a run, or one batch of it."""

    tenant: str
    run: str
    batch_id: str | None = None
    groups: int = 0
    job_seq: int = 0


class Results:
    def __init__(self, bus: Bus, blobs: Blobs, ledger: LedgerClient, handler: Handler) -> None:
        self._bus, self._ledger, self._handler = bus, ledger, handler
        self._archive = ArchiveReader(blobs)
        self.stopping = asyncio.Event()

    async def scope_of_batch(self, tenant: str, batch_id: str, run: str | None) -> tuple[ReadScope, int]:
        """The batch's scope and a cursor before its first close.

        Raises not_found, and not_ready when only the ledger could tell and does not answer.
        """
        known = self._handler.known(tenant, batch_id)
        if known is not None:
            return ReadScope(tenant, known.run, batch_id, known.groups, known.job_seq), known.cursor
        if run is not None:
            return ReadScope(tenant, run, batch_id), 0
        status = await self._ledger.batch(tenant, batch_id)
        if status is None:
            raise not_found("batch", batch_id)
        return ReadScope(tenant, status.run, batch_id), 0

    async def page(self, scope: ReadScope, cursor: int, limit: int, wait_s: float) -> ResultPage:
        """Up to `limit` records behind `cursor`; an empty page is held back for `wait_s` until something comes."""
        found = await self._next(scope, cursor, limit)
        if found.records or found.done or wait_s <= 0:
            return found
        deadline = time.monotonic() + wait_s
        async with Tail(self._bus, TRAJECTORIES.name, subjects.trajectories(scope.tenant, scope.run)) as tail:
            while True:
                found = await self._next(scope, found.cursor, limit)
                left = deadline - time.monotonic()
                if found.records or found.done or left <= 0 or self.stopping.is_set():
                    return found
                await tail.wait(left)

    async def follow(self, scope: ReadScope, cursor: int, limit: int, idle_s: float) -> AsyncIterator[ResultPage]:
        """Pages as they come, for ever or until the batch is done; an empty one after `idle_s` of silence."""
        async with Tail(self._bus, TRAJECTORIES.name, subjects.trajectories(scope.tenant, scope.run)) as tail:
            quiet_since = time.monotonic()
            while not self.stopping.is_set():
                found = await self._next(scope, cursor, limit)
                cursor = found.cursor
                if found.records or found.done or time.monotonic() - quiet_since >= idle_s:
                    quiet_since = time.monotonic()
                    yield found
                if found.done:
                    return
                if not found.records:
                    await tail.wait(min(idle_s, FALLBACK_WAKE_S))

    async def at(self, tenant: str, run: str | None, sequence: int) -> GroupClosed | None:
        """The group closed at this sequence, None when neither stream nor archive has it for this tenant.

        Without a `run` it may be any of the tenant's.
        """
        stored = await self._bus.stored(TRAJECTORIES.name, sequence)
        if stored is None:
            return await self._archive.get(tenant, sequence)
        subject = stored.subject or ""
        if subjects.is_rewards(subject):
            return None
        owner, found = subjects.run_of_trajectory(subject)
        if owner != tenant or run not in (None, found):
            return None
        return await self._bus.decoded(stored.data, stored.headers, GroupClosed)

    # -- one read -------------------------------------------------------------------------------

    async def _next(self, scope: ReadScope, cursor: int, limit: int) -> ResultPage:
        """What is there now.  Reads on over other batches' records until it has some or there are no more."""
        while True:
            records, reached, more = await self._read(scope, cursor, limit)
            if records and more:
                return ResultPage(records, reached, False)
            if not more:
                return ResultPage(records, reached, await self._is_done(scope, reached))
            cursor = reached

    async def _read(self, scope: ReadScope, cursor: int, limit: int) -> tuple[list[Record], int, bool]:
        """(records of the scope, cursor reached, whether more may follow at once)."""
        page = await read_after(
            self._bus, TRAJECTORIES.name, subjects.trajectories(scope.tenant, scope.run), cursor, limit
        )
        if page.messages and not _follows(page.messages[0], cursor):
            archived = await self._read_archive(scope, cursor, page.messages[0].sequence, limit)
            if archived is not None:
                return archived
        records: list[Record] = []
        size = 0
        for position, stored in enumerate(page.messages):
            # claim checks are small in the stream and large when resolved; a purge may cut a page in two
            if size > PAGE_BYTES or (position and not _follows(stored, cursor)):
                return records, cursor, True
            cursor = stored.sequence
            if _in_scope(scope, stored.headers.get(Header.BATCH.value)):
                data = await self._bus.resolve(stored.data, stored.headers)
                size += len(data)
                kind = stored.headers.get(Header.CONTENT_TYPE.value, codec.MSGPACK)
                if kind == codec.MSGPACK:
                    records.append(Record(cursor, data))
                else:
                    records.append(Record(cursor, None, codec.decode(data, GroupClosed, kind)))
        return records, cursor, page.pending > 0

    async def _read_archive(
        self, scope: ReadScope, cursor: int, before: int, limit: int
    ) -> tuple[list[Record], int, bool] | None:
        """As `_read`, of what was purged between `cursor` and the stream's message at `before`; None without any."""
        page = await self._archive.read(scope.tenant, scope.run, cursor, limit)
        reached = min(page.read_to, before - 1)
        if reached <= cursor:
            return None
        records = [
            Record(sequence, None, group, archived=True)
            for sequence, group in page.groups
            if sequence < before and _in_scope(scope, group.batch_id)
        ]
        return records, reached, True

    async def _is_done(self, scope: ReadScope, cursor: int) -> bool:
        """Whether every group of the batch has closed at or before `cursor`."""
        if scope.batch_id is None:
            return False
        try:
            status = await self._ledger.settled_batch(scope.tenant, scope.batch_id, scope.job_seq)
        except RollgridError as error:
            log.info("batch_end_unknown", batch=scope.batch_id, error=error.message)
            return False
        return (
            status is not None
            and status.closed == status.groups >= max(1, scope.groups)
            and status.last_closed_seq <= cursor
        )


def _in_scope(scope: ReadScope, batch_id: str | None) -> bool:
    return scope.batch_id is None or scope.batch_id == batch_id


def _follows(stored: Stored, cursor: int) -> bool:
    """Whether no close of this run lies between `cursor` and `stored`: each names its predecessor.

    The ledger appends by compare-and-set on the run's last sequence, and an atomic batch is
    consecutive; the headers that did it are stored.  Where the predecessor is behind the cursor
    and yet not in the stream, it was purged, and is in the archive.
    """
    expected = stored.headers.get(EXPECTED_SEQUENCE_HEADER)
    if expected is not None:
        return int(expected) <= cursor
    if int(stored.headers.get(BATCH_SEQUENCE_HEADER, "1")) > 1:
        return stored.sequence - 1 <= cursor
    return False


def not_found(what: str, name: str, field: str | None = None) -> RollgridError:
    message = f"no such {what}: {name[:80]}"
    return RollgridError(ErrorCode.NOT_FOUND, message, boundary=Boundary.CLIENT, field=field or what)
