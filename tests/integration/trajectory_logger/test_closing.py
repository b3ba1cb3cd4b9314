"""The ledger on real servers: every way a group can end, once, and what becomes of its jobs."""

from __future__ import annotations

import asyncio
import time

import pytest
from rollgrid_contracts import ids, subjects, topology
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import CancelWork
from rollgrid_contracts.samples import Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import ScorerKind, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason

from .driver import RUN, SCORER, TENANT, Driver, logger_in_process, make_job, make_sample

JOBS, SAMPLES = topology.JOBS.name, topology.SAMPLES.name


async def test_i1_i5_finished_groups_close_and_their_jobs_go(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [make_job(position) for position in range(20)]
    async with logger_in_process(stack_env, monkeypatch):
        sequences = await driver.submit(jobs)
        for job, seq in zip(jobs, sequences, strict=True):
            await driver.finish(job, seq)
        closes = await driver.wait_closed(20)
        assert {closed.group_id for _, closed in closes} == {job.group_id for job in jobs}
        assert all(closed.reason is CloseReason.COMPLETE and len(closed.entries) == 4 for _, closed in closes)
        assert {closed.metadata["position"] for _, closed in closes} == set(range(20))
        await driver.ack_lane()
        await driver.wait_stored(JOBS, 0)
        archived = await driver.wait_archived(20)
        assert archived == closes


async def test_scores_decide_the_reward_and_late_ones_are_not_needed(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(0, scorers=(SCORER,))
    failed = make_job(2, n=1, scorers=(SCORER,))
    async with logger_in_process(stack_env, monkeypatch):
        unscored = make_job(1, scorers=(SCORER,), deadline=time.time() + 3)
        first, second, third = await driver.submit([job, unscored, failed])
        loser_then = await driver.finish(job, first)
        duplicate = await driver.finish(job, first, [make_sample(i, attempt=2) for i in range(4)])
        await driver.score(job, first, duplicate, value=9.0)  # judged what was superseded
        await driver.score(job, first, loser_then, value=0.5)
        await driver.finish(unscored, second)
        await driver.finish(failed, third, [make_sample(0, status=SampleStatus.FAILED)])
        closes = {closed.group_id: closed for _, closed in await driver.wait_closed(3)}
    scored = closes[job.group_id]
    assert [entry.reward for entry in scored.entries] == [0.5] * 4
    assert {entry.sample.attempt for entry in scored.entries} == {1}
    assert scored.reward_formula == "1*exact"
    late = closes[unscored.group_id]
    assert {(e.sample.status, e.score_status, e.reward) for e in late.entries} == {
        (SampleStatus.SUCCEEDED, ScoreStatus.NOT_RUN, None)
    }
    assert closes[failed.group_id].entries[0].score_status is ScoreStatus.NOT_RUN


async def test_a_deadline_passes_without_any_worker(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    aborted: list[str] = []

    async def on_cancel(command: CancelWork, reply: str) -> None:
        aborted.extend(command.group_ids)

    await driver.bus.subscribe(subjects.worker_control("*"), CancelWork, on_cancel)
    async with logger_in_process(stack_env, monkeypatch):
        jobs = [make_job(position, deadline=time.time() + 3) for position in range(30)]
        sequences = await driver.submit(jobs)
        await driver.finish(jobs[0], sequences[0], [make_sample(1)])
        closes = await driver.wait_closed(30)
        await driver.wait_stored(JOBS, 0)  # deleted: no sampler will start what has expired
        while len(aborted) < 30:
            await asyncio.sleep(0.02)
    partly = next(closed for _, closed in closes if closed.group_id == jobs[0].group_id)
    statuses = [entry.sample.status for entry in partly.entries]
    assert statuses == [SampleStatus.EXPIRED, SampleStatus.SUCCEEDED, SampleStatus.EXPIRED, SampleStatus.EXPIRED]
    assert all(closed.reason is CloseReason.EXPIRED for _, closed in closes)
    assert partly.entries[0].sample.error is not None
    assert partly.entries[0].sample.error.code is ErrorCode.EXPIRED


async def test_a_cancel_races_completion_and_the_stream_decides(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, behind = make_job(0), make_job(1)
    batch = [make_job(position, key="other") for position in range(10)]
    async with logger_in_process(stack_env, monkeypatch):
        first, second, *_ = await driver.submit([before, behind, *batch])
        await driver.cancel(before)
        await driver.finish(before, first)
        await driver.finish(behind, second)
        await driver.cancel(behind)
        await driver.cancel(batch[0], whole_batch=True)
        closes = {closed.group_id: closed for _, closed in await driver.wait_closed(12)}
        status = (await driver.ask(batch_id=batch[0].batch_id, tenant=TENANT)).batch
        await driver.ack_lane()
        await driver.wait_stored(JOBS, 0)
    assert closes[before.group_id].reason is CloseReason.CANCELLED
    assert closes[behind.group_id].reason is CloseReason.COMPLETE
    assert status is not None
    assert (status.groups, status.closed, status.counts[SampleStatus.CANCELLED]) == (10, 10, 40)


async def test_a_republished_job_closes_nothing_twice(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(0)
    async with logger_in_process(stack_env, monkeypatch):
        first, second = await driver.submit([job, job])
        await driver.finish(job, second)
        await driver.finish(job, first)
        [(seq, _)] = await driver.wait_closed(1)
        (third,) = await driver.submit([job])
        await driver.finish(job, third)
        while (answer := await driver.ask(group_ids=(job.group_id,), tenant=TENANT)).folded_to < third:
            await asyncio.sleep(0.05)
        assert answer.groups[0].closed_seq == seq
        await driver.ack_lane()
        await driver.wait_stored(JOBS, 0)
        assert len(await driver.closes()) == 1


async def test_questions_are_answered_within_the_tenant(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(0)
    async with logger_in_process(stack_env, monkeypatch):
        (seq,) = await driver.submit([job])
        winner = await driver.finish(job, seq, [make_sample(2)])
        while not (answer := await driver.ask(group_ids=(job.group_id,), batch_id=job.batch_id)).groups[0].done:
            await asyncio.sleep(0.02)
        assert answer.groups[0].done == {2: winner}
        assert answer.batch is not None
        assert (answer.batch.groups, answer.batch.samples, answer.batch.finished) == (1, 4, 1)
        assert answer.batch.open_groups == (job.group_id,)
        foreign = await driver.ask(group_ids=(job.group_id,), batch_id=job.batch_id, tenant="globex")
        assert (foreign.groups[0].known, foreign.batch) == (False, None)


async def test_a_refused_queue_job_ends_in_the_record(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ErrorInfo(code=ErrorCode.TOKEN_OUT_OF_RANGE, message="token 99 of 98")
    refused = SamplesFinished(
        tenant=TENANT,
        run=RUN,
        batch_id="bx",
        group_id="gx",
        n=2,
        policy="tiny",
        job_seq=0,
        samples=tuple(Sample(index=i, status=SampleStatus.FAILED, error=error) for i in range(2)),
    )
    nameless = SamplesFinished(
        tenant=TENANT,
        run=ids.REJECTED_RUN,
        batch_id="",
        group_id="gy",
        n=1,
        policy="",
        job_seq=0,
        samples=(Sample(index=0, status=SampleStatus.FAILED, error=error),),
    )
    async with logger_in_process(stack_env, monkeypatch):
        for event in (refused, nameless, refused):
            await driver.bus.publish(subjects.samples(ScorerKind.DONE, TENANT), event)
        closes = {closed.group_id: closed for _, closed in await driver.wait_closed(2)}
        assert closes["gx"].reason is closes["gy"].reason is CloseReason.REJECTED
        assert closes["gx"].error == error
        assert closes["gy"].run == ids.REJECTED_RUN


async def test_an_event_that_names_no_job_wedges_nothing(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(0)
    async with logger_in_process(stack_env, monkeypatch):
        (seq,) = await driver.submit([job])
        await driver.finish(make_job(77), 10**15)
        await driver.bus.publish(subjects.samples(ScorerKind.DONE, TENANT), b"\xc1 not msgpack")
        await driver.finish(job, seq)
        [(_, closed)] = await driver.wait_closed(1)
    assert closed.group_id == job.group_id


async def test_events_are_purged_below_the_oldest_need(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [make_job(position) for position in range(20)]
    async with logger_in_process(stack_env, monkeypatch, purge_min_bytes=0, purge_grace_s=0.1):
        sequences = await driver.submit(jobs)
        finished = [await driver.finish(job, seq) for job, seq in zip(jobs[:9], sequences[:9], strict=True)]
        need = await driver.finish(jobs[9], sequences[9], [make_sample(0)])
        finished += [await driver.finish(job, seq) for job, seq in zip(jobs[10:], sequences[10:], strict=True)]
        await driver.wait_closed(19)
        while (await driver.bus.stream_info(SAMPLES)).state.first_seq < need:
            await asyncio.sleep(0.05)
        assert (await driver.bus.stored(SAMPLES, need)) is not None
        await driver.finish(jobs[9], sequences[9], [make_sample(i) for i in range(1, 4)])
        await driver.wait_closed(20)
        await driver.wait_stored(SAMPLES, 0)
