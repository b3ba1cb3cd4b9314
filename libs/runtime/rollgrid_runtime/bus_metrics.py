"""What the bus counts: durable writes by what they cost the server, how long they take, reconnects."""

from __future__ import annotations

from prometheus_client import Counter, Histogram
from rollgrid_contracts.topology import STREAMS, Retention

ACK = b"+ACK"

WRITES = Counter(
    "rollgrid_bus_durable_writes_total",
    "Writes that the server flushes to disk: publish, ack and kv one fsync each, batch about four whatever its size",
    ["kind"],
)
MESSAGES = Counter("rollgrid_bus_durable_messages_total", "Messages stored by durable publishes and batches")
SECONDS = Histogram(
    "rollgrid_bus_publish_seconds",
    "From a durable publish to its ack",
    ["kind"],
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20),
)
RECONNECTS = Counter("rollgrid_bus_reconnects_total", "Times the connection to NATS was made again")

_FLUSHING = tuple(f".{stream.name}." for stream in STREAMS if stream.retention is not Retention.LIMITS)
_PUBLISH, _BATCH, _ACK, _KV = (WRITES.labels(kind) for kind in ("publish", "batch", "ack", "kv"))
_PUBLISH_SECONDS, _BATCH_SECONDS = SECONDS.labels("publish"), SECONDS.labels("batch")


def published(seconds: float) -> None:
    _PUBLISH.inc()
    MESSAGES.inc()
    _PUBLISH_SECONDS.observe(seconds)


def published_batch(messages: int, seconds: float) -> None:
    _BATCH.inc()
    MESSAGES.inc(messages)
    _BATCH_SECONDS.observe(seconds)


def acknowledged(subject: str) -> None:
    """An ack on a limits stream is not flushed; on the others it costs as much as a publish (measured)."""
    if any(stream in subject for stream in _FLUSHING):
        _ACK.inc()


def written() -> None:
    """A key of a bucket was written or deleted."""
    _KV.inc()
