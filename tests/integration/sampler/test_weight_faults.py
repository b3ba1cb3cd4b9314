"""Faults while versions come: S3 gone in the middle of a fetch, a worker killed in the middle of applying, joiners."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.jobs import SamplingParams, VersionRule, WeightConstraint
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler import metrics
from rollgrid_sampler.settings import WeightFault

from tests.support.servers import NatsServer, new_bucket, seaweed_server
from tests.support.services import ServiceProcess

from .stage import Stage, make_job, sampler
from .versions import Versions, full, make_base


@pytest.mark.slow
async def test_s3_down_in_mid_fetch_leaves_the_old_version_serving_and_heals(
    stage: Stage, nats_settings: NatsSettings, tmp_path: Path
) -> None:
    """Two samplers on one node: the version comes once S3 is back, and is fetched once."""
    with seaweed_server() as weed:
        s3 = weed.settings(new_bucket())
        blobs = Blobs(s3)
        await blobs.ensure_bucket()
        versions = Versions(stage.bus, blobs)
        await versions.put(1, {name: data * 4_000_000 for name, data in full(1).items()})
        await versions.desire(0)
        cache = tmp_path / "cache"
        options: dict[str, Any] = {"model": make_base(tmp_path / "base"), "cache": cache, "policy_wait_s": 5.0}
        async with sampler(nats_settings, s3, **options) as one, sampler(nats_settings, s3, **options) as two:
            await versions.desire(1)
            async with asyncio.timeout(20):
                while not list(cache.glob("*/*/*.fetching-*/*")):
                    await asyncio.sleep(0.001)
            weed.kill()
            async with asyncio.timeout(60):
                while not all([one._weights.problem, two._weights.problem]):
                    await asyncio.sleep(0.05)
            job = make_job("meanwhile", n=4)
            await stage.submit(job)
            found = (await stage.finished(job)).values()
            assert {span.version for sample in found for span in sample.version_spans} == {0}
            assert versions.lies(job.group_id, found) == []
            leases = (await stage.workers()).values()
            assert all(lease.weights_problem and not lease.quarantined for lease in leases)
            weed.start().wait_ready(40)
            async with asyncio.timeout(60):
                while {one.engine.loaded.version, two.engine.loaded.version} != {1}:
                    await asyncio.sleep(0.05)
            assert not list(cache.glob("*/*/*.fetching-*")), "what the interrupted fetch had is gone"
            held = [service._weights._folders._held[1][2].fetched for service in (one, two)]
            assert sorted(held)[0] == 0 < sorted(held)[1]
            after = make_job("after", n=4)
            await stage.submit(after)
            assert versions.lies(after.group_id, (await stage.finished(after)).values()) == []
        blobs.close()


@pytest.fixture
def nats_settings(nats: NatsServer) -> NatsSettings:
    """What a killed worker held is given to others after two seconds."""
    return nats.settings(ack_wait_s=2.0)


async def test_a_worker_killed_in_mid_apply_starts_clean_and_its_work_is_done(
    stage: Stage, stack_env: dict[str, str], blobs: Blobs, tmp_path: Path
) -> None:
    versions = Versions(stage.bus, blobs)
    await versions.full(1)
    await versions.desire(0)
    env = {
        **stack_env,
        "ROLLGRID_SAMPLER_ENGINE": "scripted",
        "ROLLGRID_SAMPLER_MODEL": str(make_base(tmp_path / "base")),
        "ROLLGRID_SAMPLER_CACHE": str(tmp_path / "cache"),
        "ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "100",
        "ROLLGRID_SAMPLER_SWAP_MODE": "keep",
        "ROLLGRID_SAMPLER_SCRIPTED_WEIGHT_FAULTS": '{"1": "crash_mid_apply"}',
        "ROLLGRID_NATS_ACK_WAIT_S": "2",
    }
    sampling = SamplingParams(max_tokens=100, ignore_eos=True, seed=1)
    job = make_job("job", n=4, sampling=sampling)
    with ServiceProcess("sampler", tmp_path / "logs", env) as process:
        process.start()
        await asyncio.to_thread(process.wait_ready, 40)
        await stage.submit(job)
        async with asyncio.timeout(20):
            while "rollgrid_sampler_slots_busy 4.0" not in await asyncio.to_thread(process.metrics):
                await asyncio.sleep(0.02)
        await versions.desire(1)
        async with asyncio.timeout(20):
            while process.running:
                await asyncio.sleep(0.02)
        assert process.returncode == -9
        assert await stage.samples(job.group_id) == {}, "nothing of the half applied version is recorded"
        process.start()
        found = (await stage.finished(job, 30)).values()
    assert {span.version for sample in found for span in sample.version_spans} == {1}
    assert versions.lies(job.group_id, found) == []


async def test_a_joiner_during_a_refresh_is_not_ready_before_it_has_caught_up(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, bus: Bus, tmp_path: Path
) -> None:
    versions = Versions(bus, blobs)
    await versions.lora(1)
    await versions.full(2)
    await versions.lora(3, 2)
    await versions.desire(1)
    options: dict[str, Any] = {"scripted_weight_faults": {1: WeightFault.SLOW_APPLY}, "max_loras": 2}
    options |= {"model": make_base(tmp_path / "base"), "cache": tmp_path / "cache", "policy_wait_s": 5.0}
    job = make_job("waiting", n=2, weights=WeightConstraint(rule=VersionRule.MAX_STALENESS, value=0))
    await stage.submit(job)

    async def refresh() -> None:
        """As soon as the joiner is at the adapter of its first look, which takes it a second."""
        while not list((tmp_path / "cache").glob("shared/default/1-*")):
            await asyncio.sleep(0.005)
        await versions.desire(3)

    refreshing = asyncio.create_task(refresh())
    async with sampler(nats_settings, s3, **options) as joiner:
        assert (joiner._weights.current, joiner.engine.loaded.version) == (3, 2)
        found = (await stage.finished(job)).values()
    await refreshing
    assert {span.version for sample in found for span in sample.version_spans} == {3}
    assert versions.lies(job.group_id, found) == []


async def test_a_refused_version_is_a_problem_and_a_slow_one_an_alarm(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, tmp_path: Path
) -> None:
    versions = Versions(stage.bus, blobs)
    for number in (1, 2):
        await versions.full(number)
    await versions.desire(0)
    options: dict[str, Any] = {"model": make_base(tmp_path / "base"), "cache": tmp_path / "cache", "policy_wait_s": 5.0}
    options |= {"scripted_weight_faults": {1: WeightFault.REFUSE, 2: WeightFault.SLOW_APPLY}, "swap_deadline_s": 0.2}
    async with sampler(nats_settings, s3, **options) as one:

        async def lease() -> WorkerState:
            return (await stage.workers())[one.worker]

        await versions.desire(1)
        async with asyncio.timeout(20):
            while "refused" not in ((await lease()).weights_problem or ""):
                await asyncio.sleep(0.02)
        job = make_job("still", n=2)
        await stage.submit(job)
        assert versions.lies(job.group_id, (await stage.finished(job)).values()) == []
        assert one.engine.loaded.version == 0
        await versions.desire(2)
        async with asyncio.timeout(20):
            while not (metrics.SWAP_OVERDUE._value.get() and (await lease()).swapping):
                await asyncio.sleep(0.02)
            while (await lease()).swapping or (await lease()).weights_problem:
                await asyncio.sleep(0.02)
        assert metrics.SWAP_OVERDUE._value.get() == 0
        assert one.engine.loaded.version == 2
