"""Appends closes to their runs' subjects by compare-and-set, many at a time."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.jobs import Priority, SampleGroup
from rollgrid_contracts.samples import BlobRef, SampleStatus
from rollgrid_contracts.topology import INLINE_LIMIT, TRAJECTORIES, Header
from rollgrid_contracts.trajectories import GroupClosed, count_statuses
from rollgrid_runtime import telemetry
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus, Outgoing
from rollgrid_runtime.errors import BusError, Conflict, QueueFull, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import Stored, read_after
from rollgrid_runtime.telemetry import OFF, Span

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

Stamp = Callable[[GroupClosed], GroupClosed]
"""Adds what the fold cannot know."""


def encoded(item: Pending, stamped: Stamp) -> tuple[bytes, dict[str, str]]:
    """The record in the form its submission asked for, and its headers."""
    close, closed = item.close, stamped(item.close.closed)
    item.tally = metrics.tally_of(closed)
    if item.span is OFF:
        item.span = _span(close, closed)
    if item.span.recorded:
        closed = msgspec.structs.replace(closed, traceparent=item.span.traceparent)
    wants_json = close.group.record_format == "json" and _is_finite(closed)
    content_type = codec.JSON if wants_json else codec.MSGPACK
    return codec.encode(closed, content_type), headers_of(closed, content_type)


def _span(close: Close, closed: GroupClosed) -> Span:
    """From the decision to the durable close, behind whatever ended the group."""
    parent = close.group.cause or closed.traceparent
    if not telemetry.sampled(parent):
        return OFF
    return telemetry.start(
        "close group",
        parent,
        kind="producer",
        at=closed.closed_at,
        stream=TRAJECTORIES.name,
        tenant=closed.tenant,
        run=closed.run,
        batch=closed.batch_id,
        group=closed.group_id,
        policy=closed.policy,
        reason=closed.reason.value,
        samples=closed.n,
    )


def _is_finite(closed: GroupClosed) -> bool:
    """Whether JSON can say it: an infinite logprob would be read back as null, and the record not at all."""
    for sample in (sample for entry in closed.entries for sample in (entry.sample, *entry.turns)):
        prompt = sample.prompt_logprobs
        if not all(map(math.isfinite, [*sample.logprobs, *(prompt.logprobs if prompt else ())])):
            return False
    return True


def headers_of(closed: GroupClosed, content_type: str = codec.MSGPACK) -> dict[str, str]:
    headers = {
        Header.CONTENT_TYPE.value: content_type,
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
    """A close to append.  `payload` is its body or, when that is large, its claim check; made when its turn comes."""

    close: Close
    decided: float
    payload: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    tally: metrics.Tally | None = None
    span: Span = OFF


@dataclass(slots=True)
class RunQueue:
    """Closes of one run waiting to be appended, by group.

    `tail` is the last sequence of its subject, as far as known.  `most` closes go into one append:
    fewer while the stream is full, because what is left of it may hold a few.
    """

    tail: int
    most: int
    waiting: dict[str, Pending] = field(default_factory=dict)
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
        stamped: Stamp,
    ) -> None:
        self._bus, self._blobs, self._authority, self._settings = bus, blobs, authority, settings
        self._on_closed, self._stamped = on_closed, stamped
        self._runs = {subject: RunQueue(tail, settings.close_batch) for subject, tail in tails.items()}
        self._ready: set[str] = set()
        self._large: list[Pending] = []
        self._uploading: dict[str, Pending] = {}
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
        self.backlog += 1
        if self.backlog >= self._settings.close_backlog:
            self.room.clear()
        source = close.group.source
        self._hurry = self._hurry or (isinstance(source, SampleGroup) and source.priority is Priority.INTERACTIVE)
        self._queue(Pending(close, time.monotonic()))

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
                for item in large:
                    tasks.create_task(self._upload(item))
                ready, self._ready = self._ready, set()
                for subject in ready:
                    run = self._runs[subject]
                    if run.waiting and not run.busy:
                        run.busy = True
                        tasks.create_task(self._append_all(subject, run, gate))

    def _queue(self, item: Pending) -> None:
        subject = item.close.subject
        run = self._runs.get(subject)
        if run is None:
            run = self._runs[subject] = RunQueue(0, self._settings.close_batch)
        run.waiting[item.close.group_id] = item
        self._ready.add(subject)
        self._wake.set()

    async def _upload(self, item: Pending) -> None:
        """A large close goes to S3 first, beside the small ones: a stalled S3 holds back no others."""
        ref: BlobRef | None = None
        async with self._uploads:
            body, headers = encoded(item, self._stamped)
            while ref is None:
                try:
                    ref = await self._blobs.put_payload(body)
                except StorageError as error:
                    log.warning("close_not_uploaded", group=item.close.group_id, error=error.message)
                    await asyncio.sleep(RETRY_S)
        if self._uploading.pop(item.close.group_id, None) is None:
            return  # a rival closed it meanwhile
        item.payload = codec.encode(ref)
        item.headers = headers | {Header.CLAIM.value: ref.sha256}
        self._queue(item)

    async def _append_all(self, subject: str, run: RunQueue, gate: asyncio.Semaphore) -> None:
        try:
            while run.waiting:
                async with gate:
                    await self._append(subject, run)
        finally:
            run.busy = False

    async def _append(self, subject: str, run: RunQueue) -> None:
        batch = self._take(run)
        if not batch:
            return
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
            now = time.time()
            for item, seq in zip(batch, sequences, strict=True):
                self._stored(run, read_headers(subject, seq, item.headers, now))

    def _take(self, run: RunQueue) -> list[Pending]:
        """What goes into one append; it stays in `waiting` until it is known to be stored."""
        size = 0
        batch: list[Pending] = []
        for group_id, item in list(itertools.islice(run.waiting.items(), run.most)):
            if item.payload is None:
                item.payload, item.headers = encoded(item, self._stamped)
                if len(item.payload) > INLINE_LIMIT:
                    item.payload = None
                    del run.waiting[group_id]
                    self._uploading[group_id] = item
                    self._large.append(item)
                    self._wake.set()
                    continue
            size += len(item.payload)
            if batch and size > self._settings.close_batch_bytes:
                break
            batch.append(item)
        return batch

    def _stored(self, run: RunQueue, read: ClosedRead) -> None:
        run.tail = max(run.tail, read.seq)
        item = run.waiting.pop(read.group_id, None) or self._uploading.pop(read.group_id, None)
        if item is not None:
            self.backlog -= 1
            if self.backlog < self._settings.close_backlog:
                self.room.set()
            ending = item.close.group.ending
            metrics.CLOSED.labels(ending.reason.value if ending else "").inc()
            metrics.CLOSE_SECONDS.observe(time.monotonic() - item.decided)
            for status, count in zip(SampleStatus, read.counts, strict=True):
                if count:
                    metrics.ENTRIES.labels(status.value).inc(count)
            self._account(item, read)
        self._on_closed(read)

    def _account(self, item: Pending, read: ClosedRead) -> None:
        """What a stored close was worth, to the metrics, its trace and the log."""
        source = item.close.group.source
        if item.tally is not None:
            metrics.count(item.tally, read.at)
        item.span.set(sequence=read.seq)
        item.span.end()
        log.debug(
            "group_closed",
            tenant=source.tenant,
            run=source.run,
            group=read.group_id,
            trace_id=telemetry.trace_id(source.traceparent),
            sequence=read.seq,
        )

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
        self._stored(run, read)

    def _hold(self, problem: str) -> None:
        if self.problem is None:
            log.warning("closes_held", problem=problem, waiting=self.backlog)
        self.problem = problem
