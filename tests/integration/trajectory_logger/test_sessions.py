"""Sessions in the record, on real servers: opened, played, ended, closed once, archived turn by turn, over take-overs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.episodes import (
    ForkReason,
    SessionForked,
    SessionOutcome,
)
from rollgrid_contracts.fleet import CancelWork, GroupStatus
from rollgrid_contracts.jobs import turn_call
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerKind, ScoreStatus
from rollgrid_contracts.topology import Header
from rollgrid_contracts.trajectories import CloseReason
from rollgrid_episodes import paths
from rollgrid_runtime.archive import ArchiveReader
from rollgrid_runtime.reading import read_after

from .driver import SCORER, TENANT, Driver, logger_in_process, make_job
from .episodes import Episodes

JOBS, SAMPLES = topology.JOBS.name, topology.SAMPLES.name


async def status_of(driver: Driver, group: str) -> GroupStatus:
    return (await driver.ask(group_ids=(group,), tenant=TENANT)).groups[0]


async def test_i1_i5_a32_two_sessions_one_with_branches_close_and_are_archived_turn_by_turn(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    async def on_cancel(command: CancelWork, reply: str) -> None:
        told.extend(command.turns)

    await driver.bus.subscribe(subjects.worker_control("*"), CancelWork, on_cancel)
    group = Episodes(driver.bus, "tree", label="task-7", metadata={"row": 1})
    async with logger_in_process(stack_env, monkeypatch, purge_min_bytes=0, purge_grace_s=0.1):
        await group.open(0, 1)
        await driver.bus.publish(subjects.jobs_episode(TENANT), group.opening)  # the other session's copy
        first = (await driver.state(SAMPLES)).first_seq
        await group.play(0, 0)
        await group.tell(0, SessionForked(**group.own(0), branch="b", parent=0, reason=ForkReason.BEST_OF_N))
        slow = await group.dispatch(0, 1)
        winner = await group.play(0, 2, 0, branch="b")
        while 2 not in (known := await status_of(driver, group.group)).turns.get(0, {}):
            await asyncio.sleep(0.02)
        assert (known.turns[0][2], known.open_turns, known.ended) == (winner, {0: (1,)}, ())
        await group.finish(0, 1, slow, parent=0)
        await group.play(1, 0, status=SampleStatus.FAILED, tokens=0)
        never = await group.dispatch(1, 1)
        await group.end(0, reward=0.75, turn_rewards={2: 0.5})
        assert (await driver.state(SAMPLES)).first_seq == first, "nothing of an open episode is purged"
        await group.end(1, outcome=SessionOutcome.EXPIRED)
        [(seq, closed)] = await driver.wait_closed(1)
        late = await group.dispatch(0, 3)
        await driver.ack_lane()
        await driver.wait_stored(JOBS, 0)
        while len(told) < 2:
            await asyncio.sleep(0.02)
        assert sorted(told) == sorted([turn_call(group.session(1), 1), turn_call(group.session(0), 3)])
        assert never < late
        assert await driver.wait_archived(1) == [(seq, closed)]
        reader = ArchiveReader(driver.blobs)
        assert (await reader.read(TENANT)).groups == [(seq, closed)]
        assert await reader.get(TENANT, seq) == closed
    one, two = closed.entries
    assert (closed.reason, closed.label, closed.metadata) == (CloseReason.COMPLETE, "task-7", {"row": 1})
    assert [(turn.turn, turn.node and turn.node.parent) for turn in one.turns] == [(0, None), (1, 0), (2, 0)]
    assert (one.reward, one.posted, one.turn_rewards, one.session) == (0.75, 0.75, {2: 0.5}, group.session(0))
    assert [path.turns for path in paths(one)] == [(0, 1), (0, 2)]
    assert (two.sample.status, two.turns, two.reward) == (SampleStatus.EXPIRED, (), None)


async def test_scores_of_a_session_and_a_group_that_never_filled(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = Episodes(driver.bus, "scored", n=1, scorers=(SCORER,))
    async with logger_in_process(stack_env, monkeypatch):
        await scored.open(0)
        await scored.play(0, 0)
        ended = await scored.end(0, ScorerKind.VERIFIER, leaf=0, reward=3.0)
        verdict = Score(scorer="exact", status=ScoreStatus.SCORED, value=0.5)
        for finished_seq in (ended - 1, ended):
            results = (SampleScores(index=0, turn=0, scores=(verdict,)),)
            await scored.tell(
                0, SamplesScored(**scored.who, job_seq=scored.job_seq, finished_seq=finished_seq, results=results)
            )
        short = Episodes(driver.bus, "short", n=3, deadline=time.time() + 3)
        await short.open(0, 1)
        await short.play(0, 0)
        await short.end(0)
        await short.play(1, 0)
        closes = {closed.group_id: closed for _, closed in await driver.wait_closed(2)}
    [entry] = closes[scored.group].entries
    assert (entry.reward, entry.posted, entry.score_status) == (0.5, 3.0, ScoreStatus.SCORED)
    states = [(entry.sample.status, len(entry.turns)) for entry in closes[short.group].entries]
    assert closes[short.group].reason is CloseReason.EXPIRED
    assert states == [(SampleStatus.SUCCEEDED, 1), (SampleStatus.EXPIRED, 1), (SampleStatus.EXPIRED, 0)]


async def test_i6_i11_a_take_over_in_mid_episode_gives_the_same_and_340_turns_go_by_claim_check(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Episodes(driver.bus, "long", n=1)
    async with logger_in_process(stack_env, monkeypatch):
        await group.open(0)
        for turn in range(170):
            await group.play(0, turn, turn - 1 if turn else None, tokens=300)
        while len((await status_of(driver, group.group)).turns.get(0, {})) < 170:
            await asyncio.sleep(0.02)
    stale = await group.dispatch(0, 170)
    await group.finish(0, 169, stale, 168, attempt=9)  # another finish of a turn that has ended
    await driver.bus.publish(subjects.jobs_episode(TENANT), group.opening)
    async with logger_in_process(stack_env, monkeypatch):
        await group.finish(0, 170, stale, 169, tokens=300)
        for turn in range(171, 340):
            await group.play(0, turn, turn - 1, tokens=300)
        await group.end(0, reward=1.0)
        [(seq, closed)] = await driver.wait_closed(1)
        await driver.ack_lane()
        await driver.wait_stored(JOBS, 0)
        assert await driver.wait_archived(1) == [(seq, closed)]
    [entry] = closed.entries
    assert [turn.turn for turn in entry.turns] == list(range(340))
    assert {turn.attempt for turn in entry.turns} == {1}
    page = await read_after(driver.bus, topology.TRAJECTORIES.name, subjects.TRAJECTORIES_ALL, 0, 10)
    assert Header.CLAIM.value in page.messages[0].headers
    [path] = paths(entry)
    assert (len(path.turns), sum(path.mask), len(path.completion_ids)) == (340, 340 * 300, 340 * 300 + 339 * 3)


async def test_i8_an_open_session_does_not_keep_what_others_left_behind_it(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own events stay for as long as it is open; a take-over then still finds all it needs."""
    long, short = Episodes(driver.bus, "hours", n=1), Episodes(driver.bus, "seconds", n=1)
    purging: dict[str, Any] = {"purge_between_share": 0.0, "purge_min_bytes": 0, "purge_grace_s": 0.1}
    jobs = [make_job(position) for position in range(10)]
    async with logger_in_process(stack_env, monkeypatch, **purging):
        await long.open(0)
        await long.play(0, 0)
        own = 2
        await short.open(0)
        await short.play(0, 0)
        await short.end(0)
        sequences = await driver.submit(jobs)
        for job, seq in zip(jobs, sequences, strict=True):
            await driver.finish(job, seq)
        await driver.wait_closed(11)
        await driver.wait_stored(SAMPLES, own)
        await long.play(0, 1, 0)
    await driver.cancel(make_job(0, group_id=long.group, batch_id=long.opening.batch_id))
    async with logger_in_process(stack_env, monkeypatch, **purging):
        closed = next(closed for _, closed in await driver.wait_closed(12) if closed.group_id == long.group)
        await driver.wait_stored(SAMPLES, 0)
    assert closed.reason is CloseReason.CANCELLED
    assert [turn.turn for turn in closed.entries[0].turns] == [0, 1]
