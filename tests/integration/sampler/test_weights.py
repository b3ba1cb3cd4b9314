"""Versions by level: desired in `rg_policies`, fetched from S3, applied, reported; bad ones refused."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts import codec
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo, PolicyState, version_root
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.script import sample_key, script, weights_digest

from .stage import POOL, Stage, make_job, sampler

KEY = "shared.default"


def state(**changes: Any) -> PolicyState:
    fields: dict[str, Any] = {
        "tenant": "shared",
        "policy": "default",
        "pool": POOL,
        "base": "tiny",
        "base_digest": "",
        "tokenizer_prefix": "",
        "tokenizer_digest": "",
        "max_model_len": 512,
        "vocab_size": 512,
        "dtype": "float32",
    }
    return PolicyState(**{**fields, **changes})


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"base")
    return folder


@pytest.fixture
def policies(stage: Stage) -> Table[PolicyState]:
    return Table(stage.bus, POLICIES, PolicyState)


async def publish(
    blobs: Blobs, version: int, data: bytes, *, digest: str | None = None, kind: CheckpointKind = CheckpointKind.FULL
) -> PolicyState:
    root = version_root("shared", "default", version)
    await blobs.put(root + "files/model.safetensors", data)
    file = FileInfo(name="model.safetensors", size=len(data), sha256=digest or hashlib.sha256(data).hexdigest())
    manifest = CheckpointManifest(
        tenant="shared", policy="default", version=version, kind=kind, files=(file,), prefix=root + "files/"
    )
    assert await blobs.create(root + "manifest.json", codec.encode(manifest, codec.JSON))
    return state(desired=version, desired_prefix=root + "files/", history=(0, version), newest=version)


def expected(folder_bytes: bytes, group: str, seed: int | None, length: int, tmp_path: Path) -> list[int]:
    folder = tmp_path / hashlib.sha256(folder_bytes).hexdigest()[:8]
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(folder_bytes)
    key = sample_key(weights_digest(folder), f"{group}.0", 0, seed)
    tokens: list[int] = script(key, 0, length, 512, 2, 0.01)[0].tolist()
    return tokens


@pytest.mark.parametrize("mode", list(OnRefresh))
async def test_a_desired_version_is_applied_and_stamped(
    stage: Stage,
    nats_settings: NatsSettings,
    s3: S3Settings,
    blobs: Blobs,
    base: Path,
    tmp_path: Path,
    policies: Table[PolicyState],
    mode: OnRefresh,
) -> None:
    revision = await policies.create(KEY, state())
    async with sampler(nats_settings, s3, model=base, cache=tmp_path / "cache", policy_wait_s=5, swap_mode=mode) as one:
        before = make_job("before", n=1)
        await stage.submit(before)
        old = (await stage.finished(before))[0]
        after = make_job("after", n=1, weights=WeightConstraint(rule=VersionRule.EXACT, value=1))
        await stage.submit(after)
        revision = await policies.update(KEY, await publish(blobs, 1, b"new"), revision)
        new = (await stage.finished(after))[0]
        async with asyncio.timeout(10):
            while (await stage.workers())[one.worker].loaded[0].policy_revision != revision:
                await asyncio.sleep(0.05)
        lease = (await stage.workers())[one.worker]
    assert [s.version_spans[0].version for s in (old, new)] == [0, 1]
    assert old.token_ids.tolist() == expected(b"base", before.group_id, old.seed, len(old.token_ids), tmp_path)
    assert new.token_ids.tolist() == expected(b"new", after.group_id, new.seed, len(new.token_ids), tmp_path)
    assert new.weight_fingerprint not in (None, old.weight_fingerprint)
    assert (lease.loaded[0].version, lease.loaded[0].fingerprint) == (1, new.weight_fingerprint)


async def test_a_joiner_loads_the_desired_version_cold(
    stage: Stage,
    nats_settings: NatsSettings,
    s3: S3Settings,
    blobs: Blobs,
    base: Path,
    tmp_path: Path,
    policies: Table[PolicyState],
) -> None:
    await policies.create(KEY, await publish(blobs, 3, b"three"))
    async with sampler(nats_settings, s3, model=base, cache=tmp_path / "cache", policy_wait_s=5) as one:
        assert one.engine.loaded.version == 3
        job = make_job("cold", n=1)
        await stage.submit(job)
        sample = (await stage.finished(job))[0]
    assert sample.token_ids.tolist() == expected(b"three", job.group_id, sample.seed, len(sample.token_ids), tmp_path)


@pytest.mark.parametrize("damage", ["digest", "missing", "kind"])
async def test_a_bad_version_never_advances_the_label(
    stage: Stage,
    nats_settings: NatsSettings,
    s3: S3Settings,
    blobs: Blobs,
    base: Path,
    tmp_path: Path,
    policies: Table[PolicyState],
    damage: str,
) -> None:
    revision = await policies.create(KEY, state())
    match damage:
        case "digest":
            bad = await publish(blobs, 1, b"torn", digest="0" * 64)
        case "missing":
            bad = state(desired=1, desired_prefix="checkpoints/shared/default/1/", history=(0, 1))
        case _:
            bad = await publish(blobs, 1, b"delta", kind=CheckpointKind.DELTA)
    async with sampler(nats_settings, s3, model=base, cache=tmp_path / "cache", policy_wait_s=5) as one:
        revision = await policies.update(KEY, bad, revision)
        async with asyncio.timeout(10):
            while "weights" not in await one.problems():
                await asyncio.sleep(0.02)
        job = make_job("still", n=1)
        await stage.submit(job)
        sample = (await stage.finished(job))[0]
        assert [span.version for span in sample.version_spans] == [0]
        # a later good version heals it without a restart
        await policies.update(KEY, await publish(blobs, 2, b"good"), revision)
        async with asyncio.timeout(15):
            while one.engine.loaded.version != 2 or await one.problems():
                await asyncio.sleep(0.02)


async def test_samples_running_at_a_swap_keep_their_constraint(
    stage: Stage,
    nats_settings: NatsSettings,
    s3: S3Settings,
    blobs: Blobs,
    base: Path,
    tmp_path: Path,
    policies: Table[PolicyState],
) -> None:
    """An exact_version job whose samples would cross the seam is given back, not recorded with mixed tokens."""
    revision = await policies.create(KEY, state())
    options: dict[str, Any] = {
        "swap_mode": OnRefresh.KEEP,
        "scripted_token_rate": 40.0,
        "policy_wait_s": 5,
        "pin_grace_s": 0,
    }
    sampling = SamplingParams(max_tokens=150, ignore_eos=True)
    exact = make_job("exact", n=2, sampling=sampling, weights=WeightConstraint(rule=VersionRule.EXACT, value=0))
    free = make_job("free", n=2, sampling=sampling)
    async with sampler(nats_settings, s3, model=base, cache=tmp_path / "cache", **options) as one:
        await stage.submit(exact)
        await stage.submit(free)
        async with asyncio.timeout(10):
            while one.work.slots.busy < 4:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        await policies.update(KEY, await publish(blobs, 1, b"new"), revision)
        found = await stage.finished(free)
        assert {tuple(span.version for span in s.version_spans) for s in found.values()} == {(0, 1)}
        await asyncio.sleep(0.3)
        assert await stage.samples(exact.group_id) == {}
