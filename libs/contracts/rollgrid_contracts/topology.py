"""Streams, consumers and KV buckets as data; `rollgrid_runtime.bus` makes a server match it.

All streams: file storage, discard new, one partition.  The server must run with
`sync_interval: always`; anything less loses acknowledged messages at a power cut (measured).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from . import subjects
from .scoring import ScorerKind
from .subjects import PoolLane

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

INLINE_LIMIT = 256 * KIB
"""Bytes; a larger payload goes to S3 and a `BlobRef` travels instead."""

MAX_PAYLOAD = 1 * MIB
WORKER_LEASE_S = 9.0
LEDGER_LEASE_S = 6.0
IDEMPOTENCY_TTL_S = 24 * 3600.0
LEDGER_ANSWER_S = 1.0


class Retention(StrEnum):
    LIMITS = "limits"
    INTEREST = "interest"
    WORK_QUEUE = "workqueue"


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subjects: tuple[str, ...]
    retention: Retention
    max_bytes: int
    max_msgs_per_subject: int = -1
    discard_new_per_subject: bool = False
    discard_old: bool = False
    duplicate_window_s: float = 120.0


SUBMIT = Stream(
    name="RG_SUBMIT",
    subjects=(subjects.SUBMIT_ALL,),
    retention=Retention.WORK_QUEUE,
    max_bytes=4 * GIB,
    max_msgs_per_subject=1024,  # with MAX_PAYLOAD a quarter of the stream: no tenant fills it alone
    discard_new_per_subject=True,
    duplicate_window_s=0.1,  # the shortest: Nats-Msg-Id is one name space of all tenants (Idempotency-Key is not)
)
JOBS = Stream(name="RG_JOBS", subjects=(subjects.JOBS_ALL,), retention=Retention.INTEREST, max_bytes=1 * GIB)
SAMPLES = Stream(name="RG_SAMPLES", subjects=(subjects.SAMPLES_ALL,), retention=Retention.LIMITS, max_bytes=2 * GIB)
TRAJECTORIES = Stream(
    name="RG_TRAJECTORIES", subjects=(subjects.TRAJECTORIES_ALL,), retention=Retention.LIMITS, max_bytes=4 * GIB
)
CHECKPOINTS = Stream(
    name="RG_CHECKPOINTS",
    subjects=(subjects.CHECKPOINTS_ALL,),
    retention=Retention.LIMITS,
    max_bytes=64 * MIB,
    max_msgs_per_subject=16,
    discard_old=True,
)
AUDIT = Stream(name="RG_AUDIT", subjects=(subjects.AUDIT_ALL,), retention=Retention.LIMITS, max_bytes=256 * MIB)
STREAMS = (SUBMIT, JOBS, SAMPLES, TRAJECTORIES, CHECKPOINTS, AUDIT)


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ttl_s: float = 0.0
    max_bytes: int = 64 * MIB


WORKERS = Bucket(name="rg_workers", ttl_s=WORKER_LEASE_S)
LANES = Bucket(name="rg_lanes")
POLICIES = Bucket(name="rg_policies")
PINS = Bucket(name="rg_pins")
FINGERPRINTS = Bucket(name="rg_fingerprints", ttl_s=30 * 24 * 3600.0)
RUNS = Bucket(name="rg_runs", ttl_s=30 * 24 * 3600.0)
IDEMPOTENCY = Bucket(name="rg_idem", ttl_s=IDEMPOTENCY_TTL_S, max_bytes=256 * MIB)
SUSPECTS = Bucket(name="rg_suspects", ttl_s=IDEMPOTENCY_TTL_S)
LEDGER = Bucket(name="rg_ledger")
BUCKETS = (WORKERS, LANES, POLICIES, PINS, FINGERPRINTS, RUNS, IDEMPOTENCY, SUSPECTS, LEDGER)

LEDGER_LEASE_KEY = "lease"


class AckPolicy(StrEnum):
    EXPLICIT = "explicit"
    ALL = "all"
    """Acknowledging a message acknowledges all before it: for readers that fold a stream in order."""
    NONE = "none"


class Consumer(msgspec.Struct, frozen=True, kw_only=True):
    """A durable pull consumer, delivering from the stream's start.

    `ack_wait_s` None takes the deployment's ack-wait; `max_ack_pending` -1 is unlimited, and
    `max_deliver` always is: a poison message is ended by the suspects' count, not by the server.
    """

    stream: str
    durable: str
    filter_subject: str
    ack_wait_s: float | None = None
    max_ack_pending: int = 1000
    ack_policy: AckPolicy = AckPolicy.EXPLICIT


ACK_WAIT_S = 30.0
"""Default ack-wait of work consumers; workers heartbeat every third of it."""

LANE_ACK_WAIT_S = 10.0
"""Ack-wait of a worker's lane: how long a turn waits behind a dead worker before a peer is given it."""

LEDGER_ACK_WAIT_S = 30 * 24 * 3600.0
"""The ledger holds a job for as long as its group is open; a take-over makes a new consumer."""


def ledger_consumer(epoch: int) -> Consumer:
    """The ledger's own consumer on RG_JOBS; epoch 0 is made with the stream, before any publish."""
    return Consumer(
        stream=JOBS.name,
        durable=f"ledger-{epoch}",
        filter_subject=subjects.JOBS_ALL,
        ack_wait_s=LEDGER_ACK_WAIT_S,
        max_ack_pending=-1,
    )


def ledger_samples_consumer(epoch: int) -> Consumer:
    """The ledger's reader of RG_SAMPLES (its start is set at take-over).

    Its ack floor tells the next take-over below which sequence nothing without a job is open.
    """
    return Consumer(
        stream=SAMPLES.name,
        durable=f"ledger-{epoch}",
        filter_subject=subjects.SAMPLES_ALL,
        ack_wait_s=LEDGER_ACK_WAIT_S,
        max_ack_pending=-1,
        ack_policy=AckPolicy.ALL,
    )


def closes_consumer(epoch: int) -> Consumer:
    """Headers of every close, read once at a take-over."""
    return Consumer(
        stream=TRAJECTORIES.name,
        durable=f"closes-{epoch}",
        filter_subject=subjects.TRAJECTORIES_ALL,
        max_ack_pending=-1,
        ack_policy=AckPolicy.NONE,
    )


def pool_consumer(lane: PoolLane) -> Consumer:
    """One durable per (pool, priority, tenant); ingest makes it before the first publish."""
    return Consumer(
        stream=JOBS.name,
        durable=f"pool_{lane.pool}_{lane.priority.value}_{lane.tenant}",
        filter_subject=subjects.jobs_pool(lane.pool, lane.priority, lane.tenant),
        max_ack_pending=-1,
    )


def pool_durable_prefix(pool: str) -> str:
    """Durables of `pool_consumer` begin so; samplers find their lanes by it."""
    return f"pool_{pool}_"


def lane_consumer(worker: str) -> Consumer:
    """A worker's private lane; it outlives the worker, and whoever holds the lane's claim in `rg_lanes` reads it."""
    return Consumer(
        stream=JOBS.name,
        durable=f"lane_{worker}",
        filter_subject=subjects.jobs_worker(worker),
        ack_wait_s=LANE_ACK_WAIT_S,
        max_ack_pending=-1,
    )


def scorer_consumer(kind: ScorerKind) -> Consumer:
    return Consumer(
        stream=SAMPLES.name,
        durable=f"scorer-{kind.value}",
        filter_subject=subjects.samples_todo(kind),
        max_ack_pending=-1,
    )


def submit_consumer(tenant: str) -> Consumer:
    """Ingest's reader of one tenant's submissions: one durable each, so that no tenant's flood starves another."""
    return Consumer(stream=SUBMIT.name, durable=f"submit_{tenant}", filter_subject=subjects.submit(tenant))


def tenant_consumer(tenant: str, name: str = "default") -> Consumer:
    """A tenant's own reader of its trajectories through NATS; made by the operator, never by the tenant."""
    return Consumer(
        stream=TRAJECTORIES.name,
        durable=f"tenant_{tenant}_{name}",
        filter_subject=subjects.trajectories_of(tenant),
        max_ack_pending=10_000,
    )


ARCHIVER = Consumer(
    stream=TRAJECTORIES.name,
    durable="archiver",
    filter_subject=subjects.TRAJECTORIES_ALL,
    ack_wait_s=120.0,
    max_ack_pending=-1,
)
CHECKPOINT_WATCH = Consumer(stream=CHECKPOINTS.name, durable="checkpoint-sync", filter_subject=subjects.CHECKPOINTS_ALL)


class Header(StrEnum):
    """Message headers: ids travel here, so that readers can skip bodies."""

    SCHEMA = "Rg-Schema"
    CONTENT_TYPE = "Content-Type"
    GROUP = "Rg-Group"
    BATCH = "Rg-Batch"
    COUNTS = "Rg-Counts"
    JOB_SEQUENCES = "Rg-Job-Seqs"
    CLAIM = "Rg-Claim"
    IDEMPOTENCY_KEY = "Idempotency-Key"
    TRACEPARENT = "traceparent"


DEDUPE_HEADER = "Nats-Msg-Id"
EXPECTED_SEQUENCE_HEADER = "Nats-Expected-Last-Subject-Sequence"
