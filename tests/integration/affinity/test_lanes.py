"""What a sampler does with its own lane: its tenants' shares, its drain, jobs it cannot serve."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest
from rollgrid_contracts import subjects
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import DrainWorker, LaneClaim
from rollgrid_contracts.jobs import Priority, SampleGroup, SamplingParams
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.topology import JOBS, LANES, lane_consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.settings import NatsSettings, S3Settings

from tests.integration.sampler.stage import Stage, make_job, sampler
from tests.integration.sampler.turns import ended, finishes, make_turn
from tests.support.waiting import until

_names = count()
TENTH = SamplingParams(max_tokens=20, ignore_eos=True)
"""At 200 tokens a second."""


@pytest.fixture
def stage(bus: Bus) -> Stage:
    return Stage(bus)


async def to_lane(stage: Stage, worker: str, *jobs: SampleGroup) -> None:
    await ensure_consumer(stage.bus, lane_consumer(worker))
    for job in jobs:
        await stage.bus.publish(subjects.jobs_worker(worker), job)


def turns(number: int, **changes: Any) -> list[SampleGroup]:
    """First turns of as many sessions."""
    return [make_turn(f"s{next(_names)}", 0, **changes) for _ in range(number)]


async def test_what_comes_by_a_private_lane_counts_to_its_tenants_share(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """A tenant that fills the lane and the pool has one share of the worker, not two."""
    small = [
        make_job(f"b{number}", n=1, tenant="small", priority=Priority.INTERACTIVE, sampling=TENTH)
        for number in range(12)
    ]
    flood = [make_job(f"a{number}", n=1, priority=Priority.INTERACTIVE, sampling=TENTH) for number in range(30)]
    await to_lane(stage, "w-1", *turns(30, sampling=TENTH))
    for job in (*flood, *small):
        await stage.submit(job)
    async with sampler(nats_settings, s3, instance="w-1", slots=1, express=0, scripted_token_rate=400.0):
        for job in small:
            await stage.finished(job, 40)
        tenants = [event.tenant for event in await stage.read()]
    last = max(place for place, tenant in enumerate(tenants) if tenant == "small")
    assert tenants[:last].count("acme") <= 12 * 1.5


async def test_a_drain_finishes_the_own_lane_and_then_gives_it_up(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    jobs = turns(10, sampling=TENTH)
    async with sampler(
        nats_settings, s3, instance="w-1", slots=2, express=0, scripted_token_rate=200.0, drain_s=30.0
    ) as service:
        await to_lane(stage, "w-1", *jobs)
        await until(lambda: service.work.slots.busy == 2, 20, "the lane is being read")
        await stage.bus.publish_core(subjects.worker_control("w-1"), DrainWorker(deadline=time.time() + 30))
        await until(lambda: service.work.draining, 10, "the drain")
        assert (await stage.workers())["w-1"].draining, "ingest binds nothing to it any more"
        samples = await ended(stage, *jobs)
    assert {sample.worker for sample in samples} == {"w-1"}
    assert {sample.attempt for sample in samples} == {1}, "nothing was handed back"
    claim = await Table(stage.bus, LANES, LaneClaim).get("w-1")
    assert claim is not None
    assert claim.value.holder == ""

    late = turns(4)
    async with sampler(nats_settings, s3, instance="w-2"):
        await to_lane(stage, "w-1", *late)
        assert {sample.worker for sample in await ended(stage, *late)} == {"w-2"}
        await until(lambda: settled(stage, "w-1"), 10, "the lane is empty")


async def test_a_drain_without_time_leaves_the_rest_to_a_peer(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    jobs = turns(8, sampling=SamplingParams(max_tokens=100, ignore_eos=True))
    async with sampler(nats_settings, s3, instance="w-2", slots=8):
        async with sampler(
            nats_settings, s3, instance="w-1", slots=1, express=0, scripted_token_rate=100.0, drain_s=4.0
        ) as service:
            await to_lane(stage, "w-1", *jobs)
            await until(lambda: service.work.slots.busy == 1, 20, "the lane is being read")
        samples = await ended(stage, *jobs)
        await until(lambda: settled(stage, "w-1"), 10, "the lane is empty")
    workers = [sample.worker for sample in samples]
    assert 1 <= workers.count("w-1") <= 3
    assert set(workers) == {"w-1", "w-2"}
    assert all(len(found) == 1 for found in (await finishes(stage)).values())


async def test_a_job_of_another_pool_on_the_lane_ends_with_a_typed_error_at_last(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """The worker came back under its name to serve something else: nobody moves the job, and it is not run on wrong weights."""
    (job,) = turns(1, pool="p-of-before", deadline=time.time() + 8)
    await to_lane(stage, "w-1", job)
    async with sampler(nats_settings, s3, instance="w-1"):
        (sample,) = await ended(stage, job)
    assert sample.status is SampleStatus.FAILED
    assert sample.error is not None
    assert sample.error.code is ErrorCode.VERSION_UNAVAILABLE


async def settled(stage: Stage, worker: str) -> bool:
    info = await stage.bus.consumer_info(JOBS.name, lane_consumer(worker).durable)
    return info is not None and not info.num_pending and not info.num_ack_pending


async def test_heartbeats_keep_a_long_turn_beyond_the_lanes_ack_wait(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    (job,) = turns(1, sampling=SamplingParams(max_tokens=60, ignore_eos=True))
    async with sampler(nats_settings, s3, instance="w-1", scripted_token_rate=5.0):
        await to_lane(stage, "w-1", job)
        (sample,) = await ended(stage, job, timeout_s=40)
    assert sample.attempt == 1
    assert len((await finishes(stage))[job.call_id]) == 1
