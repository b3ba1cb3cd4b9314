"""Workers, lanes, the ledger's answers, and the manifests of the archive."""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.checkpoints import (
    CheckpointKind,
)
from rollgrid_contracts.columns import ArchivedClose, ArchivedPost, ArchivedRewards, ArchivedTurns, ArchiveManifest
from rollgrid_contracts.fleet import (
    CancelWork,
    DrainWorker,
    GroupStatus,
    IdempotencyRecord,
    LaneClaim,
    LaneOpened,
    LedgerAnswer,
    LedgerLease,
    LedgerQuery,
    LoadedVersion,
    Suspect,
    WorkerState,
)

from .parts import (
    BATCH,
    BATCH_STATUS,
    ERROR,
    GROUP,
    LOADED,
    STATUS,
)

FLEET: dict[str, Any] = {
    "lane_opened": LaneOpened(durable="pool_q_interactive_a"),
    "worker_state": WorkerState(
        worker="w-1",
        incarnation="w-1/abc",
        pool="pabc",
        engine="vllm",
        device="cpu",
        region="eu",
        dtype="float32",
        slots=32,
        busy=3,
        max_model_len=2048,
        loaded=(LOADED,),
        draining=True,
        quarantined="bad weights",
        started_at=1.5,
        renewed_at=2.5,
        tokens_total=1000,
        samples_total=10,
    ),
    "worker_state.swapping": WorkerState(
        worker="w-1",
        incarnation="w-1/abc",
        pool="pabc",
        engine="vllm",
        device="cpu",
        slots=32,
        loaded=(
            LoadedVersion(
                policy="smol",
                version=5,
                fingerprint="12" * 32,
                kind=CheckpointKind.LORA,
                base_version=2,
                current=False,
                confirmed=True,
                loaded_at=1.5,
            ),
        ),
        max_loras=4,
        swapping=True,
        weights_problem="version 6: file model.safetensors does not match its digest",
    ),
    "worker_state.waiting": WorkerState(
        worker="w-1", incarnation="w-1/abc", pool="pabc", engine="vllm", device="cpu", slots=32, busy=32, waiting=40
    ),
    "lane_claim": LaneClaim(lane="w-1", holder="w-2", incarnation="w-2/x", claimed_at=1.5),
    "lane_claim.given_up": LaneClaim(lane="w-1", holder="", incarnation="", claimed_at=1.5, pool="pabc"),
    "suspect": Suspect(group_id=GROUP, starts=2, workers=("w-1", "w-2")),
    "idempotency_record": IdempotencyRecord(
        body_sha256="ff" * 32, run="run-1", batch_id=BATCH, key="k", groups=2, cursor=44, created_at=1.5
    ),
    "idempotency_record.deadline": IdempotencyRecord(
        body_sha256="ff" * 32, run="run-1", batch_id=BATCH, key="k", groups=2, cursor=44, created_at=1.5, deadline=61.5
    ),
    "ledger_lease": LedgerLease(epoch=4, holder="logger-1", consumer="ledger-4", renewed_at=1.5),
    "cancel_work": CancelWork(group_ids=(GROUP,)),
    "cancel_work.turns": CancelWork(group_ids=(), turns=("s-1-t2",)),
    "group_status.open_jobs": GroupStatus(
        group_id=GROUP,
        batch_id=BATCH,
        run="run-1",
        n=2,
        open_turns={0: (2,), 1: (0, 4)},
        open_jobs={0: {2: 51}, 1: {0: 48, 4: 50}},
    ),
    "group_status.episode": GroupStatus(
        group_id=GROUP,
        batch_id=BATCH,
        run="run-1",
        n=2,
        turns={0: {0: 31, 1: 33}},
        open_turns={0: (2,), 1: (0,)},
        ended=(1,),
    ),
    "drain_worker": DrainWorker(deadline=1.5),
    "ledger_query": LedgerQuery(group_ids=(GROUP,), batch_id=BATCH, tenant="acme"),
    "ledger_answer": LedgerAnswer(epoch=4, folded_to=99, groups=(STATUS,), batch=BATCH_STATUS, error=ERROR),
    "archive_manifest": ArchiveManifest(
        first=8,
        last=12,
        groups=1,
        rows=8,
        key="archive/0/data/8-12-0123456789ab.parquet",
        sha256="01" * 32,
        size=4096,
        closes=(
            ArchivedClose(
                sequence=9,
                group_id=GROUP,
                batch_id=BATCH,
                tenant="acme",
                run="run-1",
                counts="succeeded=8,failed=0,cancelled=0,expired=0",
                at=1_700_000_010.5,
            ),
        ),
        unreadable=(11,),
        tenants=("acme",),
        last_at=1_700_000_011.5,
        created_at=1_700_000_012.5,
        writer="logger-1",
    ),
    "archive_manifest.rewards": ArchiveManifest(
        first=13,
        last=13,
        groups=0,
        rows=0,
        key=None,
        closes=(),
        rewards=ArchivedRewards(
            key="archive/0/rewards/13-13-0123456789ab.parquet",
            sha256="02" * 32,
            size=2048,
            rows=2,
            posts=(ArchivedPost(sequence=13, group_id=GROUP, tenant="acme", run="run-1", key="wabc"),),
        ),
    ),
    "archive_manifest.turns": ArchiveManifest(
        schema=2,
        first=14,
        last=14,
        groups=1,
        rows=8,
        key="archive/0/data/14-14-0123456789ab.parquet",
        closes=(),
        turns=ArchivedTurns(key="archive/0/turns/14-14-0123456789ab.parquet", sha256="03" * 32, size=8192, rows=160),
    ),
}
