"""A session's turn in a sampler: what it is recorded as, found again by, cancelled and quarantined as."""

from __future__ import annotations

import asyncio
import time

import pytest
from rollgrid_contracts import subjects
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import CancelWork, Suspect
from rollgrid_contracts.jobs import Reply, SamplingParams
from rollgrid_contracts.samples import FinishReason, SampleReply, SampleStatus
from rollgrid_contracts.scoring import ScorerKind, ScorerSpec
from rollgrid_contracts.subjects import EVERY_WORKER
from rollgrid_contracts.topology import SUSPECTS
from rollgrid_runtime.kv import Table
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.service import SamplerService
from rollgrid_sampler.settings import Fault

from .frames import check_same, listening, until
from .stage import Stage, make_job, sampler
from .turns import LANE, LONG, check_turn, ended, finishes, make_turn, session_of

SHORT = SamplingParams(max_tokens=20, ignore_eos=True)


async def test_a_turn_is_recorded_and_answered_as_itself(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """A03: on its session's subject, with its node, for the ledger alone; two turns of one index are two samples."""
    scorer = ScorerSpec(name="exact", type="exact")
    first = make_turn("a", 0, index=1, n=4, sampling=SHORT, scorers=(scorer,))
    second = make_turn("a", 1, index=1, n=4, sampling=SHORT, reply=Reply.STREAM)
    beside = make_job("beside", n=2, sampling=SHORT, reply=Reply.RESULT)
    async with listening(stage.bus, second.call_id) as stream, sampler(nats_settings, s3):
        answers: list[SampleReply] = []

        async def answered(reply: SampleReply, _: str) -> None:
            answers.append(reply)

        await stage.bus.subscribe(subjects.reply(first.call_id), SampleReply, answered)
        sequences = [await stage.submit(job) for job in (first, second)]
        await stage.submit(beside)
        await ended(stage, first, second)
        await stage.finished(beside)
        await until(lambda: stream.replies and answers)
    found = await finishes(stage)
    for job, sequence in zip((first, second), sequences, strict=True):
        (finish,) = found[job.call_id]
        session = session_of(job)
        assert finish.subject == subjects.samples(ScorerKind.DONE, "acme", session.session)
        assert (finish.sample.turn, finish.sample.node) == (session.turn, session.node)
        assert (finish.event.job_seq, finish.event.fence, finish.event.scoring) == (sequence, sequence, None)
        assert finish.event.session is not None
        assert finish.event.session.session == session.session
        assert finish.event.session.node == TurnNode(), "the observation is the sample's, once"
        check_turn(job, finish.sample)
    assert (answers[0].group_id, answers[0].samples) == (first.call_id, (found[first.call_id][0].sample,))
    assert {frame.group_id for frame in stream.frames[1]} == {second.call_id}
    check_same(stream.frames[1], found[second.call_id][0].sample)


async def test_a_turn_sent_twice_has_one_winner_and_its_fence(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """I6: the second dispatch finds the first one's finish by its id, and answers with it."""
    turn = make_turn("twice", 3, sampling=SamplingParams(max_tokens=60, ignore_eos=True), reply=Reply.STREAM)
    async with listening(stage.bus, turn.call_id, answer=False) as stream:
        async with sampler(nats_settings, s3, scripted_token_rate=100.0):
            fence = await stage.submit(turn)
            again = make_turn("twice", 3, sampling=turn.sampling, reply=Reply.RESULT, attempt=2)
            session = session_of(again)
            dispatch = make_turn(
                "twice",
                3,
                sampling=turn.sampling,
                reply=Reply.RESULT,
                attempt=2,
                session=type(session)(session=session.session, turn=3, node=session.node, fence=fence),
            )
            await stage.submit(dispatch)
            await ended(stage, turn)
            await stage.clean(LANE)
            await until(lambda: stream.order.count("reply 0") == 2)
    (finish,) = (await finishes(stage))[turn.call_id]
    assert finish.event.fence == fence
    assert stream.replies == {0: finish.sample}


async def test_what_the_record_has_is_not_sampled_again(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """Redelivered: a finished turn is answered from the record, one of a session that has ended is dropped."""
    turns = [make_turn("old", number, sampling=SHORT) for number in range(2)]
    async with sampler(nats_settings, s3):
        await stage.submit(turns[0])
        (before,) = await ended(stage, turns[0])
    late = make_turn("ended", 0, sampling=SHORT)
    stage.ended[late.group_id] = {0}
    for job in (turns[0], turns[1], late):
        await stage.submit(job)  # older than the connection of whoever takes them: the ledger is asked
    async with listening(stage.bus, turns[0].call_id) as stream, stage.ledger() as asked, sampler(nats_settings, s3):
        await ended(stage, turns[1])
        await stage.clean(LANE)
        await stream.replied(1)
    assert set(asked) == {turns[0].group_id, late.group_id}
    found = await finishes(stage)
    assert {call: len(each) for call, each in found.items()} == {turns[0].call_id: 1, turns[1].call_id: 1}
    assert stream.replies == {0: before}


async def test_a_cancelled_turn_ends_as_cancelled_and_its_session_goes_on(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """A49: running, queued or not here yet; its neighbours end well.  A closed group's turns end silently."""
    running, beside = make_turn("c", 0, n=2), make_turn("c", 0, index=1, n=2)
    queued, later = make_turn("c", 1, index=1, n=2), make_turn("c", 2, index=1, n=2)
    closed = [make_turn("closed", 0, index=index, n=2) for index in range(2)]
    options = {"scripted_token_rate": 100.0, "slots": 4, "express": 0}
    async with sampler(nats_settings, s3, **options) as one:
        for job in (running, beside, *closed, queued):
            await stage.submit(job)
        await _held(one, 5)
        await _cancel(stage, CancelWork(group_ids=(), turns=(running.call_id, queued.call_id, later.call_id)))
        await ended(stage, running, queued)
        assert one.work.slots.busy == 3, "the others go on"
        await stage.submit(later)
        await _cancel(stage, CancelWork(group_ids=(closed[0].group_id,)))
        cancelled = await ended(stage, running, queued, later)
        (well,) = await ended(stage, beside)
        onward = make_turn("c", 1, n=2, sampling=SHORT)
        await stage.submit(onward)
        (next_one,) = await ended(stage, onward)
        await stage.clean(LANE)
    for sample, job in zip(cancelled, (running, queued, later), strict=True):
        assert (sample.status, sample.finish_reason) == (SampleStatus.CANCELLED, FinishReason.ABORT)
        assert sample.error is not None
        assert (sample.error.code, sample.node) == (ErrorCode.CANCELLED, session_of(job).node)
    check_turn(beside, well)
    check_turn(onward, next_one)
    assert not {job.call_id for job in closed} & set(await finishes(stage))


async def test_a_turn_that_misses_its_deadline_ends_as_expired(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """In mid-turn, and where it comes too late; of a group the ledger says so."""
    now = time.time()
    started, waiting = make_turn("e", 0, n=2, deadline=now + 3), make_turn("e", 0, index=1, n=2, deadline=now - 1)
    group = make_job("g", n=1, deadline=now + 3, sampling=LONG)
    async with sampler(nats_settings, s3, scripted_token_rate=10.0):
        for job in (started, waiting, group):
            await stage.submit(job)
        late = await ended(stage, started, waiting)
        await stage.clean()
        await stage.clean(LANE)
    for sample, job in zip(late, (started, waiting), strict=True):
        assert sample.error is not None
        assert (sample.status, sample.error.code) == (SampleStatus.EXPIRED, ErrorCode.EXPIRED)
        assert sample.node == session_of(job).node
    assert not await stage.samples(group.group_id)


@pytest.mark.timeout(90)
async def test_a_poison_turn_is_quarantined_without_its_neighbours(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """I9: starts are counted per turn.  Neighbours are another index, and another turn of the same session."""
    poison = make_turn("p", 1, n=2, prompt=[5, 14])
    neighbours = [make_turn("p", 2, n=2), make_turn("p", 0, index=1, n=2)]
    options = {"scripted_token_rate": 100.0, "max_starts": 2, "scripted_faults": {14: Fault.DIE}}
    for job in (neighbours[0], poison, neighbours[1]):
        await stage.submit(job)
    starts = 0
    async with stage.ledger(), asyncio.timeout(80):
        while poison.call_id not in await finishes(stage):
            async with sampler(nats_settings, s3, **options) as one:
                starts += 1
                await _until_dead_or(one, stage, poison.call_id)
        async with sampler(nats_settings, s3, **options):
            well = await ended(stage, *neighbours)
            await stage.clean(LANE)
    (failed,) = await ended(stage, poison)
    assert failed.error is not None
    assert (failed.status, failed.error.code) == (SampleStatus.FAILED, ErrorCode.POISON)
    assert starts == 4, "one start nobody recorded, two recorded ones, and the end"
    for job, sample in zip(neighbours, well, strict=True):
        check_turn(job, sample)
    table: Table[Suspect] = Table(stage.bus, SUSPECTS, Suspect)
    recorded = {key: found.value.starts for key, found in (await table.items()).items()}
    assert recorded[poison.call_id] == 2  # a neighbour that ended as its sampler did may leave one that expires


async def _held(one: SamplerService, jobs: int) -> None:
    await until(lambda: len(one.work.held()) == jobs and one.work.slots.busy == min(jobs, one.work.slots.total))


async def _cancel(stage: Stage, command: CancelWork) -> None:
    await stage.bus.publish_core(subjects.worker_control(EVERY_WORKER), command)


async def _until_dead_or(one: SamplerService, stage: Stage, call: str) -> None:
    while not one._engine_problem and call not in await finishes(stage):
        await asyncio.sleep(0.02)
