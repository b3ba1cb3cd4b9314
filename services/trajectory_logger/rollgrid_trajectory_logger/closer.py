"""Appends closes to their runs' subjects by compare-and-set, many at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollgrid_contracts import codec
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.samples import BlobRef, SampleStatus
from rollgrid_contracts.topology import INLINE_LIMIT, TRAJECTORIES, Header
from rollgrid_contracts.trajectories import GroupClosed, count_statuses
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus, Outgoing
from rollgrid_runtime.errors import BusError, Conflict, QueueFull, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import Stored, read_after

from . import metrics
from .authority import Authority
from .closed_index import ClosedRead, format_counts, parse_counts
from .ledger import Close
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
RUNS_AT_ONCE = 8
RETRY_S = 0.5
REREAD_PAGE = 256
REREAD_PAUSE_S = 0.02
UPLOADS_AT_ONCE = 8


def headers_of(closed: GroupClosed) -> dict[str, str]:
    headers = {
        Header.GROUP.value: closed.group_id,
        Header.BATCH.value: closed.batch_id,
        Header.COUNTS.value: format_counts(tuple(count_statuses(closed.entries).values())),
        Header.JOB_SEQUENCES.value: ",".join(map(str, closed.job_seqs)),
    }
    if closed.traceparent:
        headers[Header.TRACEPARENT.value] = closed.traceparent
    return headers


def read_headers(subject: str, seq: int, headers: dict[str, str], at: float) -> ClosedRead:
    """A close from its headers; raises KeyError or ValueError when they are not those of a close."""
    return ClosedRead(
        group_id=headers[Header.GROUP.value],
        batch_id=headers.get(Header.BATCH.value, ""),
        subject=subject,
        seq=seq,
        counts=parse_counts(headers[Header.COUNTS.value]),
        at=at,
    )


@dataclass(slots=True, eq=False)
class Pending:
    """A close to append: `payload` is its body or, when that is large, its claim check in S3."""

    group_id: str
    batch_id: str
    subject: str
    headers: dict[str, str]
    payload: bytes
    reason: str
    decided: float
    counts: tuple[int, ...]


@dataclass(slots=True)
class RunQueue:
    """Closes of one run waiting to be appended.

    `tail` is the last sequence of its subject, as far as known.  `most` closes go into one append:
    fewer while the stream is full, because what is left of it may hold a few.
    """

    tail: int = 0
    most: int = 1
    waiting: list[Pending] = field(default_factory=list)
    busy: bool = False


class Closer:
    """`on_closed` is called for every close known to be stored, whoever wrote it."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        authority: Authority,
        settings: TrajectoryLoggerSettings,
        tails: dict[str, int],
        on_closed: Callable[[ClosedRead], None],
    ) -> None:
        self._bus, self._blobs, self._authority, self._settings = bus, blobs, authority, settings
        self._on_closed = on_closed
        self._runs = {subject: RunQueue(tail, settings.close_batch) for subject, tail in tails.items()}
        self._large: list[Close] = []
        self._uploads = asyncio.Semaphore(UPLOADS_AT_ONCE)
        self._wake = asyncio.Event()
        self._hurry = False
        self.backlog = 0
        self.room = asyncio.Event()
        """Set while fewer closes than `close_backlog` wait to be written."""
        self.room.set()
        self.problem: str | None = None
        """Why closes cannot be stored right now."""

    def add(self, close: Close) -> None:
        payload = codec.encode(close.closed)
        self.backlog += 1
        if self.backlog >= self._settings.close_backlog:
            self.room.clear()
        if len(payload) > INLINE_LIMIT:
            self._large.append(close)
        else:
            self._queue(close, payload, headers_of(close.closed))
        self._hurry = self._hurry or close.closed.priority is Priority.INTERACTIVE
        self._wake.set()

    async def run(self) -> None:
        """Append for ever.  Raises LeaseLost when another ledger is found to have taken over."""
        gate = asyncio.Semaphore(RUNS_AT_ONCE)
        async with asyncio.TaskGroup() as tasks:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if not self._hurry:
                    await asyncio.sleep(self._settings.close_linger_s)
                self._hurry = False
                large, self._large = self._large, []
                for close in large:
                    tasks.create_task(self._upload(close))
                for subject, run in self._runs.items():
                    if run.waiting and not run.busy:
                        run.busy = True
                        tasks.create_task(self._append_all(subject, run, gate))

    def _queue(self, close: Close, payload: bytes, headers: dict[str, str]) -> None:
        closed = close.closed
        run = self._runs.setdefault(close.subject, RunQueue(0, self._settings.close_batch))
        run.waiting.append(
            Pending(
                closed.group_id,
                closed.batch_id,
                close.subject,
                headers,
                payload,
                closed.reason.value,
                time.monotonic(),
                parse_counts(headers[Header.COUNTS.value]),
            )
        )

    async def _upload(self, close: Close) -> None:
        """A large close goes to S3 first, beside the small ones: a stalled S3 holds back no others."""
        ref: BlobRef | None = None
        async with self._uploads:
            payload = codec.encode(close.closed)
            while ref is None:
                try:
                    ref = await self._blobs.put_payload(payload)
                except StorageError as error:
                    log.warning("close_not_uploaded", group=close.group_id, error=error.message)
                    await asyncio.sleep(RETRY_S)
        self._queue(close, codec.encode(ref), headers_of(close.closed) | {Header.CLAIM.value: ref.sha256})
        self._wake.set()

    async def _append_all(self, subject: str, run: RunQueue, gate: asyncio.Semaphore) -> None:
        try:
            while run.waiting:
                async with gate:
                    await self._append(subject, run)
        finally:
            run.busy = False

    async def _append(self, subject: str, run: RunQueue) -> None:
        batch = self._take(run)
        try:
            items = [Outgoing(subject, item.payload, item.headers) for item in batch]
            sequences = await self._bus.publish_batch(items, expected_last=run.tail)
        except QueueFull as error:
            self._hold(error.message)
            run.most = max(1, len(batch) // 2)
            await asyncio.sleep(RETRY_S)
            await self._reread(subject, run)  # a part of the batch may be stored
        except Conflict:
            metrics.CONFLICTS.inc()
            log.warning("close_conflict", subject=subject, expected=run.tail)
            await self._authority.confirm()
            await self._reread(subject, run)
        except BusError as error:
            self._hold(error.message)
            await self._reread(subject, run)
        else:
            self.problem = None
            run.most = min(2 * run.most, self._settings.close_batch)
            metrics.CLOSES_PER_APPEND.observe(len(batch))
            for item, seq in zip(batch, sequences, strict=True):
                self._stored(run, item, seq)

    def _take(self, run: RunQueue) -> list[Pending]:
        """What goes into one append; it stays in `waiting` until it is known to be stored."""
        size, count = 0, 0
        for item in run.waiting[: run.most]:
            size += len(item.payload)
            if count and size > self._settings.close_batch_bytes:
                break
            count += 1
        return run.waiting[:count]

    def _stored(self, run: RunQueue, item: Pending, seq: int) -> None:
        run.tail = max(run.tail, seq)
        run.waiting.remove(item)
        self.backlog -= 1
        if self.backlog < self._settings.close_backlog:
            self.room.set()
        metrics.CLOSED.labels(item.reason).inc()
        for status, count in zip(SampleStatus, item.counts, strict=True):
            if count:
                metrics.ENTRIES.labels(status.value).inc(count)
        metrics.CLOSE_SECONDS.observe(time.monotonic() - item.decided)
        self._on_closed(ClosedRead(item.group_id, item.batch_id, item.subject, seq, item.counts, time.time()))

    async def _reread(self, subject: str, run: RunQueue) -> None:
        """Learn what really is on the run's subject behind the tail: our own lost acks, or a rival's closes."""
        while True:
            try:
                page = await read_after(self._bus, TRAJECTORIES.name, subject, run.tail, REREAD_PAGE)
                for message in page.messages:
                    self._found(subject, run, message)
                if page.messages:
                    continue
                last = await self._bus.last_stored(TRAJECTORIES.name, subject)
                if last is None:  # whatever was on it is purged: an emptied subject counts from 0 again
                    run.tail = 0
                elif int(last.seq or 0) > run.tail:  # stored between the two questions
                    await asyncio.sleep(REREAD_PAUSE_S)
                    continue
                return
            except BusError as error:
                self._hold(error.message)
                await asyncio.sleep(RETRY_S)

    def _found(self, subject: str, run: RunQueue, message: Stored) -> None:
        run.tail = max(run.tail, message.sequence)
        try:
            read = read_headers(subject, message.sequence, message.headers, time.time())
        except (KeyError, ValueError) as error:
            log.error("not_a_close", subject=subject, seq=message.sequence, error=repr(error))
            return
        mine = next((item for item in run.waiting if item.group_id == read.group_id), None)
        if mine is not None:
            self._stored(run, mine, message.sequence)
        else:
            self._on_closed(read)

    def _hold(self, problem: str) -> None:
        if self.problem is None:
            log.warning("closes_held", problem=problem, waiting=self.backlog)
        self.problem = problem
