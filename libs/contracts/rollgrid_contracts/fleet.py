"""Who is there and what it may do: leases, control commands, questions to the ledger."""

from __future__ import annotations

import msgspec

from .checkpoints import CheckpointKind
from .failures import ErrorInfo
from .samples import SampleStatus


class LoadedVersion(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A checkpoint version a worker really runs; `policy_revision` is the `rg_policies` revision it observed.

    Beside the weights there may be LoRA versions on them (`base_version`).  `current` is the one new
    requests get.  `confirmed`: its fingerprint equals that of a cold load.
    """

    policy: str
    tenant: str = "shared"
    version: int
    fingerprint: str | None = None
    policy_revision: int = 0
    kind: CheckpointKind = CheckpointKind.FULL
    base_version: int = 0
    current: bool = True
    confirmed: bool = False
    loaded_at: float = 0.0


class WorkerState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_workers` under the worker id; renewed every `topology.WORKER_LEASE_S` / 3.

    `waiting` counts samples that are in the worker's hands and wait for a slot.
    """

    worker: str
    incarnation: str
    pool: str
    engine: str
    device: str
    region: str = "local"
    dtype: str = ""
    slots: int
    busy: int = 0
    max_model_len: int = 0
    loaded: tuple[LoadedVersion, ...] = ()
    draining: bool = False
    quarantined: str | None = None
    started_at: float = 0.0
    renewed_at: float = 0.0
    tokens_total: int = 0
    samples_total: int = 0
    max_loras: int = 0
    swapping: bool = False
    weights_problem: str | None = None
    waiting: int = 0


class LaneClaim(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_lanes` under a worker id: who reads that worker's private lane.

    A `holder` "" has given it up: whoever of `pool` comes first takes it.
    """

    lane: str
    holder: str
    incarnation: str
    claimed_at: float
    pool: str = ""


class Suspect(msgspec.Struct, frozen=True, kw_only=True):
    """Value of `rg_suspects` under a group id: the workers that began it and did not end it."""

    group_id: str
    starts: int
    workers: tuple[str, ...]


class IdempotencyRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_idem`: the body a client key stands for, and the batch it named.

    `deadline` is the first answer's (UNIX seconds); 0 where it was not recorded.
    """

    body_sha256: str
    run: str
    batch_id: str
    key: str
    groups: int
    cursor: int
    created_at: float
    deadline: float = 0.0


class LedgerLease(msgspec.Struct, frozen=True, kw_only=True):
    """Value of `rg_ledger` under `lease`: for liveness; safety is the compare-and-set close."""

    epoch: int
    holder: str
    consumer: str
    renewed_at: float


class CancelWork(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="cancel_work"):
    """Control: abort generation for these groups; their outcome is already decided.

    A session's turn goes by its `call_id` in `turns`: it is aborted and ends as cancelled, its session goes on.
    """

    group_ids: tuple[str, ...]
    turns: tuple[str, ...] = ()


class DrainWorker(msgspec.Struct, frozen=True, kw_only=True, tag="drain_worker"):
    """Control: take no new work, finish what is held, then leave."""

    deadline: float


WorkerCommand = CancelWork | DrainWorker


class LaneOpened(msgspec.Struct, frozen=True, kw_only=True, tag="lane_opened"):
    """Hint on `subjects.LANES_CONTROL`: a durable was made on RG_JOBS.  Samplers look without it too, later."""

    durable: str


class LedgerQuery(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Question on `rg.ledger.query`: by groups, or by batch.  `tenant` bounds what may be seen."""

    group_ids: tuple[str, ...] = ()
    batch_id: str | None = None
    tenant: str | None = None


class GroupStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`done` maps finished indexes to the RG_SAMPLES sequence of their winning event.

    `closed_seq` is the RG_TRAJECTORIES sequence once closed, else 0; `known` is False for a
    group the ledger has neither open nor closed.

    Of a group of sessions, by index: `turns` maps finished turns to the sequence of their winning event,
    `open_turns` are those whose job is held and that have not finished, `open_jobs` the RG_JOBS sequences of their last
    dispatch, `ended` the indexes that have ended.
    """

    group_id: str
    known: bool = True
    batch_id: str = ""
    run: str = ""
    n: int = 0
    closed_seq: int = 0
    done: dict[int, int] = {}
    turns: dict[int, dict[int, int]] = {}
    open_turns: dict[int, tuple[int, ...]] = {}
    ended: tuple[int, ...] = ()
    open_jobs: dict[int, dict[int, int]] = {}


class BatchStatus(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Counts over the groups of one batch the ledger knows; `first_closed_seq` 0 = none yet."""

    batch_id: str
    run: str
    tenant: str
    groups: int
    closed: int
    samples: int
    finished: int
    counts: dict[SampleStatus, int]
    open_groups: tuple[str, ...] = ()
    last_closed_seq: int = 0


class LedgerAnswer(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Answer of the ledger within 1 s; `folded_to` is how far it has read RG_JOBS."""

    epoch: int
    folded_to: int = 0
    groups: tuple[GroupStatus, ...] = ()
    batch: BatchStatus | None = None
    error: ErrorInfo | None = None


class PacedBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that was admitted lately, and how many of its groups are counted; `settled`: they are known to be jobs."""

    batch_id: str
    groups: int
    at: float
    settled: bool = False


class RunPace(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Value of `rg_runs` under `<tenant>.<run>`: how far sampling may run ahead of training.

    A run that trains `batch` groups per version may have admitted at most
    `(max_staleness + 1 + versions since `first_version`) · batch` groups (AReaL's capacity rule).
    `versions` counts those up to `version`, the newest seen.  Groups that closed without a single
    success give their place back: they are counted up to RG_TRAJECTORIES sequence `cursor`.
    """

    policy: str
    batch: int
    max_staleness: int
    first_version: int
    admitted: int = 0
    updated_at: float = 0.0
    version: int = 0
    versions: int = 0
    cursor: int = 0
    recent: tuple[PacedBatch, ...] = ()
