"""Becoming the ledger: read the closes, then the open jobs, then the events they still need.

The closes decide.  After a power cut jobs come back whose acks had not reached the disk; and no
close is purged from the stream before a manifest that names it, so a group that has ever closed
is known here as closed for as long as its job can come back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from rollgrid_contracts import subjects
from rollgrid_contracts.topology import (
    JOBS,
    SAMPLES,
    TRAJECTORIES,
    Consumer,
    closes_consumer,
    ledger_consumer,
    ledger_samples_consumer,
)
from rollgrid_runtime.archive import ArchiveManifests
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery, Puller

from . import metrics
from .closed_index import KEEP_S, ClosedRead, parse_counts
from .closer import read_headers
from .handler import LedgerHandler
from .ledger import Ledger
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
CLOSES_INACTIVE_S = 60.0
READ_WAIT_S = 0.5


class TakenOver(NamedTuple):
    """`tails` maps each run's subject to its last sequence; the pullers go on where the take-over stopped."""

    tails: dict[str, int]
    jobs: Puller
    events: Puller


class Gap(NamedTuple):
    """Sequences [first, last] of RG_TRAJECTORIES that are no longer stored."""

    first: int
    last: int


async def take_over(
    bus: Bus, manifests: ArchiveManifests, settings: TrajectoryLoggerSettings, epoch: int, handler: LedgerHandler
) -> TakenOver:
    """Read everything into `handler`'s ledger.  The lease must be held.  Raises BusError, StorageError, ConsumerGone."""
    began = time.monotonic()
    ledger = handler.ledger
    floor = await _earlier_floor(bus, epoch)
    await _delete_earlier(bus, epoch)
    tails, gaps = await _read_closes(bus, epoch, ledger)
    if gaps:
        await _read_archived(manifests, gaps, ledger)
    closes = len(ledger.index.groups)

    jobs = bus.puller(ledger_consumer(epoch))
    oldest = await _read_jobs(bus, settings, epoch, jobs, handler)
    start = await _events_start(bus, floor, oldest, settings.refold_margin_s)
    events = bus.puller(ledger_samples_consumer(epoch))
    await ensure_consumer(bus, ledger_samples_consumer(epoch), start_time=start)
    await _read_all(
        bus, settings.fetch, ledger_samples_consumer(epoch), events, handler.on_events, lambda: handler.events_read
    )
    ledger.index.forget(time.time() - KEEP_S, settings.closed_kept)
    metrics.TAKE_OVERS.inc()
    log.info(
        "took_over",
        epoch=epoch,
        closes=closes,
        open_groups=len(ledger.open),
        events=handler.events_read,
        seconds=round(time.monotonic() - began, 3),
    )
    return TakenOver(tails, jobs, events)


async def read_up(bus: Bus, consumer: Consumer, delivered: Callable[[], int]) -> bool:
    """Whether everything the stream holds for `consumer` has been delivered and counted by `delivered`."""
    info = await bus.consumer_info(consumer.stream, consumer.durable)
    if info is None:
        raise BusError(f"{consumer.stream}/{consumer.durable} is gone")
    sent = info.delivered.consumer_seq if info.delivered else 0
    return not info.num_pending and sent <= delivered()


async def know_jobs_end(bus: Bus, epoch: int, handler: LedgerHandler) -> bool:
    """Tell the ledger how far RG_JOBS goes, if everything in it has been read."""
    events_before = handler.ledger.read_to
    last = int((await bus.stream_info(JOBS.name)).state.last_seq)
    if not await read_up(bus, ledger_consumer(epoch), lambda: handler.jobs_read):
        return False
    handler.decide(handler.ledger.jobs_end(last, events_before, time.time()))
    return True


async def _earlier_floor(bus: Bus, epoch: int) -> int:
    """The RG_SAMPLES sequence up to which earlier ledgers left nothing open that has no job."""
    floor = 0
    for name in await bus.consumer_names(SAMPLES.name):
        if name.startswith("ledger-") and name != ledger_samples_consumer(epoch).durable:
            info = await bus.consumer_info(SAMPLES.name, name)
            if info is not None and info.ack_floor is not None:
                floor = max(floor, int(info.ack_floor.stream_seq))
    return floor


async def _delete_earlier(bus: Bus, epoch: int) -> None:
    """An orphan of an earlier epoch would hold jobs for ever."""
    for consumer in (ledger_consumer(epoch), ledger_samples_consumer(epoch), closes_consumer(epoch)):
        prefix = consumer.durable.rsplit("-", 1)[0] + "-"
        for name in await bus.consumer_names(consumer.stream):
            if name.startswith(prefix) and name != consumer.durable:
                await bus.delete_consumer(consumer.stream, name)
    # this epoch's own reader of events may be left from a life that won the lease and died at once
    await bus.delete_consumer(SAMPLES.name, ledger_samples_consumer(epoch).durable)


async def _read_closes(bus: Bus, epoch: int, ledger: Ledger) -> tuple[dict[str, int], list[Gap]]:
    """Every close still in the stream, and the young gaps between them."""
    consumer = closes_consumer(epoch)
    await bus.delete_consumer(consumer.stream, consumer.durable)
    await ensure_consumer(bus, consumer, headers_only=True, inactive_s=CLOSES_INACTIVE_S)
    tails: dict[str, int] = {}
    gaps: list[Gap] = []
    horizon, expected = time.time() - KEEP_S, 1

    def on_close(delivery: Delivery) -> None:
        nonlocal expected
        if delivery.sequence > expected and delivery.timestamp >= horizon:
            gaps.append(Gap(expected, delivery.sequence - 1))
        expected = delivery.sequence + 1
        if subjects.is_rewards(delivery.subject):
            return
        tails[delivery.subject] = delivery.sequence
        try:
            read = read_headers(delivery.subject, delivery.sequence, delivery.headers, delivery.timestamp)
        except (KeyError, ValueError) as error:
            log.error("not_a_close", subject=delivery.subject, seq=delivery.sequence, error=repr(error))
            return
        if ledger.closed(read):
            raise AssertionError("a ledger without open groups has nothing to settle")

    count = 0

    async def on_closes(batch: list[Delivery]) -> None:
        nonlocal count
        for delivery in batch:
            count += 1
            on_close(delivery)

    puller = bus.puller(consumer)
    await _read_all(bus, 1000, consumer, puller, on_closes, lambda: count)
    await puller.close()
    await bus.delete_consumer(consumer.stream, consumer.durable)
    last = int((await bus.stream_info(TRAJECTORIES.name)).state.last_seq)
    if last >= expected and not count:
        gaps.append(Gap(expected, last))
    return tails, gaps


async def _read_archived(manifests: ArchiveManifests, gaps: list[Gap], ledger: Ledger) -> None:
    """Closes that were purged early, from the manifests without which they could not have been purged."""
    await manifests.refresh()
    for gap in gaps:
        at = gap.first
        while at <= gap.last:
            manifest = await manifests.covering(at)
            if manifest is None:
                break
            for close in manifest.closes:
                if gap.first <= close.sequence <= gap.last:
                    subject = subjects.trajectories(close.tenant, close.run)
                    counts = parse_counts(close.counts)
                    ledger.closed(ClosedRead(close.group_id, close.batch_id, subject, close.sequence, counts, close.at))
            at = manifest.last + 1


async def _read_jobs(
    bus: Bus, settings: TrajectoryLoggerSettings, epoch: int, puller: Puller, handler: LedgerHandler
) -> float | None:
    """Every job still in the stream; when the oldest that is open was stored (UNIX seconds)."""
    oldest: float | None = None

    async def on_jobs(batch: list[Delivery]) -> None:
        nonlocal oldest
        for delivery in batch:
            await handler.on_job(delivery)
            if oldest is None and handler.ledger.open:
                oldest = delivery.timestamp

    while True:
        await _read_all(bus, settings.fetch, ledger_consumer(epoch), puller, on_jobs, lambda: handler.jobs_read)
        if await know_jobs_end(bus, epoch, handler):
            return oldest


async def _events_start(bus: Bus, floor: int, oldest: float | None, margin_s: float) -> float:
    """When the first event that is still needed can have been stored (UNIX seconds)."""
    start = time.time() if oldest is None else oldest
    state = (await bus.stream_info(SAMPLES.name)).state
    first = max(floor + 1, int(state.first_seq))
    if first <= int(state.last_seq):
        stored = await bus.stored(SAMPLES.name, first)
        if stored is None or stored.time is None:
            return 0.0
        start = min(start, stored.time.timestamp())
    return start - margin_s


async def _read_all(
    bus: Bus,
    limit: int,
    consumer: Consumer,
    puller: Puller,
    on_batch: Callable[[list[Delivery]], Awaitable[None]],
    delivered: Callable[[], int],
) -> None:
    connection = bus.connection_epoch
    while True:
        batch = await puller.fetch(limit, READ_WAIT_S if delivered() else 0.05)
        await on_batch(batch)
        if bus.connection_epoch != connection:
            raise BusError("the connection was lost while taking over")
        if (not batch or batch[-1].pending == 0) and await read_up(bus, consumer, delivered):
            return
        await asyncio.sleep(0)
