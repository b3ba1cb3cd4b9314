"""How much waits in each stream and for each kind of reader, as gauges that one process keeps.

A durable's name may hold a tenant or an epoch; the label `consumer` is the kind of reader, so that
the series stay few: all lanes of one priority are one.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict

from prometheus_client import Gauge
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.topology import STREAMS

from .bus import Bus
from .errors import BusError
from .logging import get_logger
from .reading import ConsumerLag, consumer_lags

log = get_logger(__name__)
READ_EVERY_S = 5.0

PENDING = Gauge("rollgrid_queue_pending_messages", "Messages not yet delivered to a reader", ["stream", "consumer"])
UNACKED = Gauge("rollgrid_queue_unacked_messages", "Messages a reader holds", ["stream", "consumer"])
LONGEST = Gauge(
    "rollgrid_queue_longest_pending_messages", "The longest queue among the readers of one kind", ["stream", "consumer"]
)
MESSAGES = Gauge("rollgrid_queue_stream_messages", "Messages a stream holds", ["stream"])
BYTES = Gauge("rollgrid_queue_stream_bytes", "Bytes a stream holds", ["stream"])
LIMIT = Gauge("rollgrid_queue_stream_max_bytes", "Bytes a stream may hold; -1 = no bound", ["stream"])
_ALL = (PENDING, UNACKED, LONGEST, MESSAGES, BYTES, LIMIT)


class QueueLag:
    """Run `run` as a task of exactly one process of the fleet; the gauges are empty when it has ended."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._read()
                except BusError as error:
                    log.warning("queues_not_read", error=error.message)
                await asyncio.sleep(READ_EVERY_S)
        finally:
            for gauge in _ALL:
                gauge.clear()

    async def _read(self) -> None:
        for stream in STREAMS:
            info = await self._bus.stream_info(stream.name)
            MESSAGES.labels(stream.name).set(info.state.messages)
            BYTES.labels(stream.name).set(info.state.bytes)
            LIMIT.labels(stream.name).set(info.config.max_bytes or -1)
            for kind, lags in by_kind(await consumer_lags(self._bus, stream.name)).items():
                PENDING.labels(stream.name, kind).set(sum(lag.pending for lag in lags))
                UNACKED.labels(stream.name, kind).set(sum(lag.unacked for lag in lags))
                LONGEST.labels(stream.name, kind).set(max(lag.pending for lag in lags))


def by_kind(lags: dict[str, ConsumerLag]) -> dict[str, list[ConsumerLag]]:
    found: dict[str, list[ConsumerLag]] = defaultdict(list)
    for durable, lag in lags.items():
        found[reader_kind(durable)].append(lag)
    return dict(found)


def reader_kind(durable: str) -> str:
    """What reads through this durable (`rollgrid_contracts.topology`): few kinds, whatever the names."""
    head, _, rest = durable.partition("_")
    if head == "pool":  # pool_<pool>_<priority>_<tenant>
        priority = rest.partition("_")[2].partition("_")[0]
        return f"pool-{priority}" if priority in set(Priority) else "pool"
    if head in ("lane", "tenant", "submit"):
        return head
    if durable.startswith(("ledger-", "closes-")):
        return durable.partition("-")[0]
    return durable if durable in KNOWN or durable.startswith("scorer-") else "other"


KNOWN = frozenset({"archiver", "checkpoint-sync"})
