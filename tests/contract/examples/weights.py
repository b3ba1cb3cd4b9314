"""Versions of the weights, and what policies and runs say of them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from rollgrid_contracts.checkpoints import (
    AdapterInfo,
    AdoptedVersion,
    CheckpointKind,
    CheckpointManifest,
    CheckpointPublished,
    DeltaInfo,
    FileInfo,
    Fingerprint,
    OnDeadline,
    Pin,
    PolicyState,
    Rollout,
    RolloutRequest,
    TensorInfo,
    Upload,
    UploadShard,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import (
    PacedBatch,
    RunPace,
)

from .parts import (
    BATCH,
)

SMOL = PolicyState(
    tenant="acme",
    policy="smol",
    pool="pabc",
    base="SmolLM2-135M-Instruct",
    base_digest="dd" * 32,
    tokenizer_prefix="tokenizers/ee/",
    tokenizer_digest="ee" * 32,
    max_model_len=2048,
    vocab_size=49152,
    dtype="float32",
)

WEIGHTS: dict[str, Any] = {
    "policy_state.parsers": PolicyState(
        tenant="shared",
        policy="p",
        pool="q",
        base="base",
        base_digest="ab" * 32,
        tokenizer_prefix="tokenizers/x/",
        tokenizer_digest="cd" * 32,
        max_model_len=2048,
        vocab_size=512,
        dtype="float32",
        tool_parser="hermes",
        reasoning_parser="qwen3",
    ),
    "checkpoint_manifest": CheckpointManifest(
        schema=1,
        tenant="acme",
        policy="smol",
        version=4,
        kind=CheckpointKind.DELTA,
        base_version=3,
        step=100,
        dtype="bfloat16",
        tokenizer_digest="aa" * 32,
        files=(FileInfo(name="model.safetensors", size=10, sha256="bb" * 32),),
        tensors=(TensorInfo(name="lm_head.weight", dtype="BF16", shape=(2, 3), sha256="cc" * 32),),
        created_at=1.5,
        prefix="checkpoints/acme/smol/4/",
    ),
    "checkpoint_published": CheckpointPublished(
        tenant="acme", policy="smol", version=4, manifest_key="checkpoints/acme/smol/4/manifest.json"
    ),
    "policy_state": replace(
        SMOL,
        eos_token_ids=(2,),
        aliases=("smol-latest",),
        kind=CheckpointKind.LORA,
        desired=4,
        desired_prefix="checkpoints/acme/smol/4/",
        history=(0, 3, 4),
        newest=5,
    ),
    "checkpoint_manifest.lora": CheckpointManifest(
        tenant="acme",
        policy="smol",
        version=5,
        kind=CheckpointKind.LORA,
        files=(FileInfo(name="adapter_model.safetensors", size=10, sha256="bb" * 32),),
        adapter=AdapterInfo(rank=8, alpha=16.0, targets=("q_proj", "v_proj"), rslora=True),
        weights_digest="ab" * 32,
        next_within_s=60.0,
    ),
    "checkpoint_manifest.rollout": CheckpointManifest(
        tenant="acme",
        policy="smol",
        version=6,
        kind=CheckpointKind.FULL,
        files=(FileInfo(name="model.safetensors", size=10, sha256="bb" * 32),),
        rollout=RolloutRequest(canary=1, canary_s=30.0, at_once=2, deadline_s=600.0, on_deadline=OnDeadline.ROLL_BACK),
    ),
    "checkpoint_manifest.delta": CheckpointManifest(
        tenant="acme",
        policy="smol",
        version=7,
        kind=CheckpointKind.DELTA,
        base_version=6,
        files=(FileInfo(name="model.rgdelta", size=10, sha256="bb" * 32),),
        weights_digest="ba" * 32,
        delta=DeltaInfo(
            codec="exponent",
            base_digest="ab" * 32,
            target_digest="ba" * 32,
            blob_digests=("cd" * 32,),
            changed=520321,
            elements=134515008,
        ),
    ),
    "upload": Upload(
        tenant="acme",
        policy="smol",
        upload="step-12",
        kind=CheckpointKind.LORA,
        world=4,
        base_version=3,
        version=7,
        step=12,
        dtype="bfloat16",
        next_within_s=60.0,
        created_at=1.5,
        expires_at=3601.5,
    ),
    "upload_shard": UploadShard(
        rank=2,
        files=(FileInfo(name="model-2.safetensors", size=10, sha256="bb" * 32),),
        tensors=(TensorInfo(name="lm_head.weight", dtype="BF16", shape=(2, 3), sha256="cc" * 32),),
    ),
    "policy_state.rollout": replace(
        SMOL,
        versions=(
            AdoptedVersion(
                version=4,
                kind=CheckpointKind.LORA,
                prefix="checkpoints/acme/smol/4/ab/",
                base_version=2,
                step=100,
                weights_digest="ab" * 32,
                committed_at=1.5,
                adopted_at=2.5,
                bytes=1000,
            ),
        ),
        rollout=Rollout(
            version=4,
            previous=3,
            canary=1,
            canary_s=5.0,
            at_once=2,
            workers=("w-1",),
            started_at=1.5,
            proven_at=2.5,
            deadline=61.5,
            on_deadline=OnDeadline.ROLL_BACK,
        ),
        newest_at=1.5,
        refresh_due=61.5,
    ),
    "policy_state.rolling_back": replace(
        SMOL,
        rollout=Rollout(
            version=4,
            previous=3,
            canary=1,
            started_at=1.5,
            held_since=2.5,
            failure=ErrorInfo(
                code=ErrorCode.ENGINE_ERROR, message="version 4: no", boundary=Boundary.WEIGHTS, field="rollout"
            ),
        ),
    ),
    "policy_state.collecting": replace(
        SMOL,
        versions=(AdoptedVersion(version=4, prefix="checkpoints/acme/smol/4/ab/", going=True),),
    ),
    "policy_state.rewound": replace(
        SMOL,
        versions=(AdoptedVersion(version=5, prefix="checkpoints/acme/smol/5/ab/", step=3, rewinds=4),),
    ),
    "fingerprint": Fingerprint(fingerprint="12" * 32, cold=True, worker="w-1", taken_at=1.5),
    "pin": Pin(until=61.5, batch_id=BATCH, tenant="acme"),
    "run_pace": RunPace(policy="smol", batch=32, max_staleness=1, first_version=3, admitted=64, updated_at=1.5),
    "run_pace.recent": RunPace(
        policy="smol",
        batch=32,
        max_staleness=1,
        first_version=3,
        admitted=96,
        updated_at=2.5,
        version=5,
        versions=2,
        cursor=812,
        recent=(
            PacedBatch(batch_id="b-1", groups=32, at=1.5, settled=True),
            PacedBatch(batch_id="b-2", groups=32, at=2.5),
        ),
    ),
}
