"""Jobs in, finishes out: the whole sampler on the scripted engine against a real nats-server."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from prometheus_client import REGISTRY
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import CancelWork, DrainWorker
from rollgrid_contracts.jobs import Priority, Reply, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.samples import FinishReason, SampleReply, SampleStatus
from rollgrid_contracts.scoring import ScorerSpec
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import pool_consumer
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.script import sample_key, script, weights_digest
from rollgrid_sampler.settings import Fault

from .stage import POOL, Stage, make_job, sampler


async def test_a_group_is_sampled_recorded_and_acked(stage: Stage, nats_settings: NatsSettings, s3: S3Settings) -> None:
    job = make_job()
    sequence = await stage.submit(job)
    async with sampler(nats_settings, s3) as service:
        found = await stage.finished(job)
        await stage.clean()
        events = await stage.read()
        leases = await stage.workers()
    assert [len(e.samples) for e in events] == [8], "eight samples that end together travel in one event"
    event = events[0]
    assert (event.job_seq, event.fence, event.engine, event.n) == (sequence, sequence, "scripted", 8)
    assert stage.events[0][1] == "rg.0.samples.done.acme.-"
    for index, sample in found.items():
        assert sample.status is SampleStatus.SUCCEEDED
        assert sample.seed == ids.sample_seed(1, index)
        assert len(sample.token_ids) == len(sample.logprobs) > 0
        assert sample.version_spans[0].start == 0
        assert sample.version_spans[-1].end == len(sample.token_ids)
        assert sample.timings.dequeued_at <= sample.timings.finished_at
        key = sample_key(weights_digest(None), ids.sample_id(job.group_id, index), index, sample.seed)
        tokens, logprobs = script(key, 0, len(sample.token_ids), 512, 2, 0.01)
        assert sample.token_ids.tolist() == tokens.tolist()
        assert np.array_equal(np.frombuffer(sample.logprobs.packed, "<f4"), logprobs)
    assert leases[service.worker].pool == POOL
    assert await stage.workers() == {}, "a drained sampler takes its lease away"


async def test_samples_that_need_scores_carry_the_task(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    scorers = (ScorerSpec(name="exact", type="exact_match"),)
    job = make_job(n=4, scorers=scorers, task={"answer": "42"}, prompt_text="?")
    bad = make_job("bad", n=2, scorers=scorers, prompt=[600])
    await stage.submit(job)
    await stage.submit(bad)
    async with sampler(nats_settings, s3):
        await stage.finished(job)
        failed = await stage.finished(bad)
    by_group = {event.group_id: (subject, event) for _, subject, event in stage.events}
    subject, event = by_group[job.group_id]
    assert subject == "rg.0.samples.verifier.acme.-"
    assert event.scoring is not None
    assert event.scoring.task == {"answer": "42"}
    subject, event = by_group[bad.group_id]
    assert subject == "rg.0.samples.done.acme.-", "a failed sample needs no scoring"
    assert event.scoring is None
    assert {s.error.code for s in failed.values() if s.error} == {ErrorCode.TOKEN_OUT_OF_RANGE}


@pytest.mark.parametrize(
    ("prompt", "code", "limit"),
    [
        ([], ErrorCode.EMPTY_PROMPT, "1"),
        ([5] * 64, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "63"),
        ([512], ErrorCode.TOKEN_OUT_OF_RANGE, "511"),
    ],
)
async def test_a_bad_prompt_fails_typed_in_one_attempt_beside_good_ones(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, prompt: list[int], code: ErrorCode, limit: str
) -> None:
    bad, good = make_job("bad", prompt=prompt), make_job("good")
    await stage.submit(bad)
    await stage.submit(good)
    async with sampler(nats_settings, s3, max_model_len=64):
        failed, fine = await stage.finished(bad), await stage.finished(good)
        await stage.clean()
    for sample in failed.values():
        assert sample.status is SampleStatus.FAILED
        assert sample.attempt == 1
        assert sample.error is not None
        assert (sample.error.code, sample.error.field, sample.error.limit) == (code, "prompt_token_ids", limit)
    assert all(sample.status is SampleStatus.SUCCEEDED for sample in fine.values())


async def test_an_engine_error_fails_one_group_and_no_other(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    jobs = {fault: make_job(fault.value, prompt=[token]) for token, fault in ((11, Fault.ERROR), (12, Fault.EMPTY))}
    good = make_job("good")
    for job in (*jobs.values(), good):
        await stage.submit(job)
    async with sampler(nats_settings, s3, scripted_faults={11: Fault.ERROR, 12: Fault.EMPTY}):
        error = await stage.finished(jobs[Fault.ERROR])
        empty = await stage.finished(jobs[Fault.EMPTY])
        fine = await stage.finished(good)
    assert {s.error.code for s in error.values() if s.error} == {ErrorCode.ENGINE_ERROR}
    assert {s.error.code for s in empty.values() if s.error} == {ErrorCode.EMPTY_COMPLETION}
    assert {s.status for s in fine.values()} == {SampleStatus.SUCCEEDED}


async def test_finishes_are_coalesced_when_they_come_apart(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    job = make_job(n=32, sampling=SamplingParams(max_tokens=8, seed=3))
    await stage.submit(job)
    async with sampler(nats_settings, s3, slots=4):
        await stage.finished(job)
    sizes = [len(event.samples) for event in await stage.read()]
    assert sum(sizes) == 32
    assert max(sizes) >= 8
    assert len(sizes) <= 6


async def test_an_interactive_job_is_published_singly_and_answered_with_the_record(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    job = make_job(n=3, reply=Reply.RESULT, priority=Priority.INTERACTIVE)
    replies: dict[int, object] = {}

    async def on_reply(message: SampleReply, _: str) -> None:
        for sample in message.samples:
            recorded = await stage.samples(job.group_id)
            assert recorded[sample.index] == sample, "durable before the reply, and equal to it"
            replies[sample.index] = sample

    await stage.bus.subscribe(subjects.reply(job.group_id), SampleReply, on_reply)
    await stage.submit(job)
    async with sampler(nats_settings, s3), asyncio.timeout(10):
        while set(replies) != {0, 1, 2}:
            await asyncio.sleep(0.01)
    assert [len(event.samples) for event in await stage.read()] == [1, 1, 1]


async def test_two_workers_on_one_interactive_job_answer_with_the_first_record(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """The job is delivered twice (as after a lost ack); unseeded samples name the worker that made them."""
    job = make_job(n=2, reply=Reply.RESULT, sampling=SamplingParams(max_tokens=8))
    answers: list[SampleReply] = []

    async def on_reply(message: SampleReply, _: str) -> None:
        answers.append(message)

    await stage.bus.subscribe(subjects.reply(job.group_id), SampleReply, on_reply)
    await stage.submit(job)
    await stage.submit(job)
    async with sampler(nats_settings, s3), asyncio.timeout(10):
        while sum(len(a.samples) for a in answers) < 4:
            await asyncio.sleep(0.01)
    recorded = await stage.samples(job.group_id)
    assert len(await stage.read()) == 2, "the second publish of a sample id is a duplicate"
    assert all(recorded[s.index] == s for answer in answers for s in answer.samples)


async def test_a_redelivered_job_generates_only_what_the_record_misses(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    job = make_job(n=6, reply=Reply.RESULT)
    answered: set[int] = set()

    async def on_reply(message: SampleReply, _: str) -> None:
        answered.update(sample.index for sample in message.samples)

    await stage.bus.subscribe(subjects.reply(job.group_id), SampleReply, on_reply)
    async with stage.ledger() as asked:
        await stage.submit(job)
        async with sampler(nats_settings, s3):
            await stage.finished(job)
        before = len(await stage.read())
        answered.clear()
        await stage.submit(job)  # the same group again, as after a lost ack
        async with sampler(nats_settings, s3):
            async with asyncio.timeout(10):
                while answered != set(range(6)):
                    await asyncio.sleep(0.01)
            await stage.clean()
    assert job.group_id in asked
    assert len(await stage.read()) == before, "nothing was generated twice"


async def test_cancel_aborts_running_and_waiting_groups(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    slow = [make_job(f"slow{i}", prompt=[11]) for i in range(4)]
    async with sampler(nats_settings, s3, slots=8, scripted_faults={11: Fault.HANG}) as service:
        for job in slow:
            await stage.submit(job)
        async with asyncio.timeout(10):
            while len(service.work.held()) < 2:
                await asyncio.sleep(0.01)
        await stage.bus.publish_core(
            subjects.worker_control("all"), CancelWork(group_ids=tuple(job.group_id for job in slow))
        )
        await stage.clean()
        good = make_job("good")
        await stage.submit(good)
        await stage.finished(good)
        assert service.work.slots.busy == 0
    assert {e.group_id for e in await stage.read()} == {good.group_id}


async def test_a_silent_record_gathers_no_backlog_at_one_sampler(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """Jobs that may have been begun are asked about; meanwhile the rest of them stays for others."""
    jobs = [make_job(f"old{i}") for i in range(40)]
    for job in jobs:
        await stage.submit(job)  # before the sampler connects: all are doubtful
    most = 0
    async with sampler(nats_settings, s3, slots=8) as service, asyncio.timeout(30):
        while len(await stage.read()) < len(jobs):
            most = max(most, sum(held.task is None for held in service.work.held()))
            await asyncio.sleep(0.001)
    assert 0 < most <= 4, "unbegun: a prefetch of 2, one for the free slots, and one on its way"


async def test_past_its_deadline_a_job_is_left_to_the_ledger(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    late = make_job("late", deadline=time.time() - 1)
    stuck = make_job("stuck", prompt=[11], deadline=time.time() + 1.5)
    await stage.submit(late)
    await stage.submit(stuck)
    async with sampler(nats_settings, s3, scripted_faults={11: Fault.HANG}):
        await stage.clean()
    assert await stage.read() == []


async def test_a_version_nobody_has_is_refused_without_counting(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    waiting = make_job("waits", weights=WeightConstraint(rule=VersionRule.MIN, value=1))
    served = make_job("served", weights=WeightConstraint(rule=VersionRule.EXACT, value=0))
    await stage.submit(waiting)
    await stage.submit(served)
    before = _refusals()
    async with sampler(nats_settings, s3) as service:
        await stage.finished(served)
        async with asyncio.timeout(10):
            while _refusals() < before + 3:
                await asyncio.sleep(0.02)
        assert not any(held.suspect for held in service.work.held())
    assert {e.group_id for e in await stage.read()} == {served.group_id}
    assert (await stage.pending(PoolLane(POOL, Priority.NORMAL, "acme")))[0] + (
        await stage.pending(PoolLane(POOL, Priority.NORMAL, "acme"))
    )[1] == 1


async def test_a_flood_of_one_tenant_does_not_starve_another(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    flood = [make_job(f"f{i}", tenant="flood") for i in range(60)]
    for job in flood:
        await stage.submit(job)
    async with sampler(nats_settings, s3, slots=8, scripted_token_rate=400.0):
        async with asyncio.timeout(20):
            while len(await stage.read()) < 3:
                await asyncio.sleep(0.01)
        single = make_job("single", tenant="small")
        await stage.submit(single)
        await stage.finished(single)
        flooded = [event.group_id for event in await stage.read()].index(single.group_id)
        assert flooded < 40, f"{flooded} of 60 jobs of the flood went before the other tenant's one"


async def test_a_drain_finishes_what_runs_and_hands_back_the_rest(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    jobs = [make_job(f"j{i}", sampling=SamplingParams(max_tokens=100, ignore_eos=True)) for i in range(10)]
    for job in jobs:
        await stage.submit(job)
    async with sampler(nats_settings, s3, slots=16, scripted_token_rate=100.0, prefetch=4) as service:
        async with asyncio.timeout(10):
            while service.work.slots.busy < 16:
                await asyncio.sleep(0.01)
        await stage.bus.publish_core(subjects.worker_control(service.worker), DrainWorker(deadline=time.time() + 25))
        async with asyncio.timeout(30):
            while service.work.held() or not service.work.draining:
                await asyncio.sleep(0.01)
        running = {event.group_id for event in await stage.read()}
    assert 2 <= len(running) < 10
    async with sampler(nats_settings, s3, slots=64):
        for job in jobs:
            found = await stage.finished(job)
            assert {s.finish_reason for s in found.values()} == {FinishReason.LENGTH}
        await stage.clean()


async def test_a_full_record_is_waited_out_not_dropped(
    nats_settings: NatsSettings, s3: S3Settings, stage: Stage
) -> None:
    """RG_SAMPLES at its bound: the sampler retries with heartbeats and nothing is lost (I8)."""
    settings = nats_settings.model_copy(update={"samples_max_bytes": 2048, "ack_wait_s": 2.0})
    jobs = [make_job(f"full{i}", sampling=SamplingParams(max_tokens=64, ignore_eos=True)) for i in range(4)]
    async with sampler(settings, s3) as service:
        for job in jobs:
            await stage.submit(job)
        async with asyncio.timeout(10):
            while service._handler.samples_total < 32:
                await asyncio.sleep(0.01)
        await asyncio.sleep(4.5)  # more than two ack-waits under a full stream
        assert await stage.read() == []
        info = await stage.bus.js.consumer_info(
            "RG_JOBS", pool_consumer(PoolLane(POOL, Priority.NORMAL, "acme")).durable
        )
        assert info.num_redelivered == 0, "held jobs are kept alive by heartbeats"
        from rollgrid_contracts.topology import SAMPLES
        from rollgrid_runtime.provision import ensure_stream

        await ensure_stream(stage.bus, SAMPLES)
        for job in jobs:
            await stage.finished(job)
        await stage.clean()


def _refusals() -> float:
    return REGISTRY.get_sample_value("rollgrid_sampler_refusals_total") or 0.0
