"""LoRA versions side by side, the version of each request, groups that one version must make, rollouts."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts.checkpoints import Pin, Rollout, pin_key
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, Reply, SampleGroup, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import PINS, SUSPECTS, pool_consumer
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.service import SamplerService

from .frames import joined, listening, until
from .stage import Stage, make_job, sampler
from .versions import Versions, make_base

LONG = SamplingParams(max_tokens=200, ignore_eos=True, seed=1)
"""Two seconds at 100 tokens a second."""


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    base = make_base(tmp_path / "base")
    return {"model": base, "cache": tmp_path / "cache", "policy_wait_s": 5.0, "max_loras": 3}


@pytest.fixture
def versions(stage: Stage, blobs: Blobs) -> Versions:
    return Versions(stage.bus, blobs)


def exact(version: int) -> WeightConstraint:
    return WeightConstraint(rule=VersionRule.EXACT, value=version)


async def settled(one: SamplerService, current: int, adapters: set[int]) -> None:
    async with asyncio.timeout(15):
        while (one._weights.current, set(one.engine.loaded.adapters)) != (current, adapters):
            await asyncio.sleep(0.02)


async def running(one: SamplerService, samples: int) -> None:
    async with asyncio.timeout(10):
        while one.work.slots.busy < samples:
            await asyncio.sleep(0.01)


def made_by(sample: Sample) -> list[int]:
    return [span.version for span in sample.version_spans]


async def test_a_restart_restores_three_adapters_before_it_is_ready_and_each_request_gets_its_version(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    for number in (1, 2, 3, 4):
        await versions.lora(number)
    await versions.desire(4)
    asked = {
        "latest": (WeightConstraint(), 4),
        "exact": (exact(2), 2),
        "min": (WeightConstraint(rule=VersionRule.MIN, value=3), 4),
        "stale": (WeightConstraint(rule=VersionRule.MAX_STALENESS, value=0), 4),
        "base": (exact(0), 0),
    }
    jobs = {name: make_job(name, n=2, weights=constraint) for name, (constraint, _) in asked.items()}
    for job in jobs.values():
        await stage.submit(job)
    async with sampler(nats_settings, s3, **options) as one:
        assert set(one.engine.loaded.adapters) == {2, 3, 4}, "ready, and everything is there"
        for name, job in jobs.items():
            found = (await stage.finished(job)).values()
            assert [made_by(sample) for sample in found] == [[asked[name][1]]] * 2, name
            assert versions.lies(job.group_id, found) == []
            assert {sample.weight_fingerprint for sample in found} != {None}
        lease = (await stage.workers())[one.worker]
        assert lease.max_loras == 3
        assert {(v.version, v.kind.value, v.current) for v in lease.loaded} == {
            (0, "full", False),
            (2, "lora", False),
            (3, "lora", False),
            (4, "lora", True),
        }
        # version 1 does not fit beside them, until somebody holds a pin on it
        pins: Table[Pin] = Table(stage.bus, PINS, Pin)
        await pins.create(pin_key("shared", "default", 1, "b1"), Pin(until=time.time() + 60))
        await settled(one, 4, {1, 3, 4})
        old = make_job("old", n=1, weights=exact(1))
        await stage.submit(old)
        assert versions.lies(old.group_id, (await stage.finished(old)).values()) == []


async def test_requests_on_an_adapter_meet_a_newer_one_as_they_asked(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    """A20 for LoRA: they end on the old one, or go on under the new one behind what they have where that is exact."""
    await versions.lora(1)
    await versions.lora(2)
    await versions.desire(1)
    biased = SamplingParams(max_tokens=200, ignore_eos=True, seed=1, min_tokens=5)
    asked: dict[str, tuple[SampleGroup, list[int]]] = {
        "wait": (make_job("wait", n=1, sampling=LONG, on_refresh=OnRefresh.WAIT), [1]),
        "abort": (make_job("abort", n=1, sampling=LONG, on_refresh=OnRefresh.ABORT), [1, 2]),
        "keep": (make_job("keep", n=1, sampling=LONG, on_refresh=OnRefresh.KEEP), [1, 2]),
        "abort, not exact": (make_job("abort2", n=1, sampling=biased, on_refresh=OnRefresh.ABORT), [2]),
        "keep, not exact": (make_job("keep2", n=1, sampling=biased, on_refresh=OnRefresh.KEEP), [1]),
        "pinned": (make_job("pinned", n=1, sampling=LONG, on_refresh=OnRefresh.ABORT, pinned=True), [1]),
    }
    async with sampler(nats_settings, s3, scripted_token_rate=100.0, **options) as one:
        for job, _ in asked.values():
            await stage.submit(job)
        await running(one, len(asked))
        await asyncio.sleep(0.3)
        await versions.desire(2)
        for name, (job, expected) in asked.items():
            found = (await stage.finished(job)).values()
            assert [made_by(sample) for sample in found] == [expected], name
            assert versions.lies(job.group_id, found, 0.01) == [], name


@pytest.mark.parametrize("how", ["newer", "unloaded"])
async def test_a_stream_goes_on_over_its_adapters_as_it_is_recorded(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any], how: str
) -> None:
    """A14 over a LoRA refresh: frames adjacent, text without a hole, alternatives of both versions."""
    for number in (1, 2):
        await versions.lora(number)
    await versions.desire(1)
    options |= {"scripted_token_rate": 100.0, "max_loras": 1 if how == "unloaded" else 2, "pin_grace_s": 0.1}
    mode = OnRefresh.ABORT if how == "newer" else OnRefresh.WAIT
    sampling = SamplingParams(max_tokens=150, ignore_eos=True, seed=1, logprobs=2)
    job = make_job("stream", n=2, sampling=sampling, on_refresh=mode, reply=Reply.STREAM)
    async with listening(stage.bus, job.group_id) as stream, sampler(nats_settings, s3, **options):
        await stage.submit(job)
        await until(lambda: min(stream.tokens(0), stream.tokens(1)) > 20)
        await versions.desire(2)
        await stream.replied(2)
        found = await stage.samples(job.group_id)
    for index, sample in found.items():
        assert made_by(sample) == [1, 2]
        whole = joined(stream.frames[index])
        assert (whole.token_ids, whole.logprobs, whole.text) == (sample.token_ids, sample.logprobs, sample.text)
        assert (whole.spans, whole.top_logprobs) == (sample.version_spans, sample.top_logprobs)
        assert sample.top_logprobs is not None
        assert len(sample.top_logprobs.token_ids) == 2 * len(sample.token_ids)
    assert versions.lies(job.group_id, found.values()) == []


async def test_an_adapter_in_use_makes_room_only_after_its_grace(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    for number in (1, 2):
        await versions.lora(number)
    await versions.desire(1)
    options |= {"max_loras": 1, "pin_grace_s": 0.3, "scripted_token_rate": 100.0}
    free, pinned = make_job("free", n=1, sampling=LONG), make_job("pinned", n=2, sampling=LONG, pinned=True)
    async with sampler(nats_settings, s3, **options) as one:
        for job in (free, pinned):
            await stage.submit(job)
        await running(one, 3)
        await asyncio.sleep(0.2)
        await versions.desire(2)
        await settled(one, 2, {2})
        found, lost = (await stage.finished(free)).values(), (await stage.finished(pinned)).values()
    assert [made_by(sample) for sample in found] == [[1, 2]], "unloaded, it went on elsewhere"
    assert versions.lies(free.group_id, found) == []
    assert {sample.error.code for sample in lost if sample.error} == {ErrorCode.VERSION_GONE}


@pytest.mark.parametrize("grace_s", [10.0, 0.2])
async def test_a_pinned_group_holds_a_swap_back_within_the_grace(
    stage: Stage,
    nats_settings: NatsSettings,
    s3: S3Settings,
    versions: Versions,
    options: dict[str, Any],
    grace_s: float,
) -> None:
    """Full weights: four samples one after the other; a swap in the middle waits, or the rest fails typed."""
    await versions.full(1)
    await versions.desire(0)
    short = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    group = make_job("group", n=4, sampling=short, pinned=True)
    options |= {"slots": 1, "express": 0, "scripted_token_rate": 100.0, "pin_grace_s": grace_s}
    async with sampler(nats_settings, s3, **options) as one:
        await stage.submit(group)
        await running(one, 1)
        await versions.desire(1)
        found = await stage.finished(group)
        await settled(one, 1, set())
    made = [sample for sample in found.values() if sample.status is SampleStatus.SUCCEEDED]
    assert versions.lies(group.group_id, made) == []
    assert {tuple(made_by(sample)) for sample in made} <= {(0,)}
    if grace_s > 5:
        assert len(made) == 4
    else:
        assert 1 <= len(made) < 4
        codes = {s.error.code for s in found.values() if s.error is not None}
        assert codes == {ErrorCode.VERSION_GONE}


async def test_a_pinned_group_that_another_worker_began_ends_on_its_version_or_typed(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    for number in (1, 2):
        await versions.lora(number)
    await versions.desire(1)
    first = make_job("group", n=4, indexes=(0, 1), pinned=True)
    async with stage.ledger():
        async with sampler(nats_settings, s3, **options):
            await stage.submit(first)
            await stage.finished(first)
        await versions.desire(2)
        rest = make_job("group", n=4, indexes=(0, 1, 2, 3), pinned=True)
        await stage.submit(rest)  # older than the connection of whoever takes it: the ledger is asked
        async with sampler(nats_settings, s3, **options):
            found = await stage.finished(rest)
            assert [made_by(sample) for sample in found.values()] == [[1]] * 4, "kept loaded beside the newest"
        gone = make_job("group", n=6, indexes=(0, 1, 2, 3, 4, 5), pinned=True)
        await stage.submit(gone)
        async with sampler(nats_settings, s3, **{**options, "max_loras": 1}):
            lost = await stage.finished(gone)
    assert {lost[i].error.code for i in (4, 5) if lost[i].error is not None} == {ErrorCode.VERSION_GONE}  # type: ignore[union-attr]
    assert lost[0].status is SampleStatus.SUCCEEDED


async def test_a_version_that_never_comes_is_an_error_to_try_again_and_no_start(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    await versions.full(1)
    await versions.desire(0)
    never = make_job("never", n=2, weights=exact(7), deadline=time.time() + 8)
    soon = [make_job(f"soon{number}", n=2, weights=exact(1), sampling=LONG) for number in range(4)]
    neighbour = make_job("neighbour", n=2)
    options |= {"scripted_token_rate": 100.0}
    async with sampler(nats_settings, s3, **options) as one, sampler(nats_settings, s3, **options) as two:
        for job in (never, *soon):
            await stage.submit(job)
        async with asyncio.timeout(30):  # all are given back, time and again
            while (await stage.bus.consumer_info("RG_JOBS", _lane(never))).delivered.consumer_seq < 20:  # type: ignore[union-attr]
                await asyncio.sleep(0.05)
        await stage.submit(neighbour)
        assert {s.status for s in (await stage.finished(neighbour)).values()} == {SampleStatus.SUCCEEDED}
        failed = (await stage.finished(never)).values()
        assert time.time() < never.deadline + 5, "at its deadline, whatever else is waited for"
        await versions.desire(1)
        async with asyncio.timeout(30):  # nobody is suspected, or each would have a sampler to itself
            while one.work.slots.jobs + two.work.slots.jobs < len(soon):
                await asyncio.sleep(0.01)
        for job in soon:
            assert versions.lies(job.group_id, (await stage.finished(job)).values()) == []
    errors = [sample.error for sample in failed]
    assert {error.code for error in errors if error} == {ErrorCode.VERSION_UNAVAILABLE}
    assert all(error is not None and error.retryable and error.field == "weights" for error in errors)
    starts: Table[Any] = Table(stage.bus, SUSPECTS, object)
    assert [await starts.get(job.group_id) for job in soon] == [None] * 4


def _lane(job: SampleGroup) -> str:
    return pool_consumer(PoolLane(job.pool, job.priority, job.tenant)).durable


async def test_only_the_workers_of_a_rollout_apply_its_version(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, versions: Versions, options: dict[str, Any]
) -> None:
    await versions.lora(1)
    await versions.full(2)
    await versions.desire(1)
    async with (
        sampler(nats_settings, s3, instance="canary", **options) as canary,
        sampler(nats_settings, s3, instance="other", **options) as other,
    ):
        rollout = Rollout(version=2, previous=1, canary=1, workers=("canary",))
        await versions.desire(2, rollout=rollout)
        await settled(canary, 2, set())
        await settled(other, 1, {1})
        async with asyncio.timeout(10):
            while await _current(stage) != {"canary": 2, "other": 1}:
                await asyncio.sleep(0.02)
        async with sampler(nats_settings, s3, instance="joiner", **options) as joiner:
            assert joiner._weights.current == 1, "a joiner is not part of it"
        await versions.desire(2)
        await settled(other, 2, set())


async def _current(stage: Stage) -> dict[str, int]:
    """As the leases tell."""
    leases = await stage.workers()
    return {name: v.version for name, lease in leases.items() for v in lease.loaded if v.current}
