"""I1, I3, I10: a logger killed at each step of its work, two loggers at once, take-overs."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts import topology
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.topology import LEDGER_LEASE_S
from rollgrid_contracts.trajectories import CloseReason, GroupClosed
from rollgrid_runtime.bus import Bus

from tests.support.processes import Process
from tests.support.services import ServiceProcess, service_environment

from .driver import SCORER, Driver, logger_in_process, make_job, make_sample
from .dying_logger import POINTS
from .episodes import Episodes

pytestmark = pytest.mark.chaos

QUICK = {
    "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.2",
    "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_GROUPS": "8",
    "ROLLGRID_TRAJECTORY_LOGGER_PURGE_EVERY_S": "0.3",
    "ROLLGRID_TRAJECTORY_LOGGER_PURGE_MIN_BYTES": "0",
    "ROLLGRID_TRAJECTORY_LOGGER_PURGE_GRACE_S": "0",
}
EPISODES = 2
ONE_NAME = {"ROLLGRID_TRAJECTORY_LOGGER_INSTANCE": "logger-1"}
"""A restarted process of the same name need not wait for its own old lease."""


class Story:
    """A mixed load and what it must become: completes, scored, cancelled, expired, duplicated."""

    def __init__(self, driver: Driver, groups: int, seed: int, deadline_s: float = 4.0) -> None:
        self.driver, self.rng = driver, random.Random(seed)
        soon = time.time() + deadline_s
        self.jobs = [
            make_job(
                position,
                run=f"run-{position % 3}",
                scorers=(SCORER,) if position % 4 == 1 else (),
                deadline=soon if position % 5 == 4 else time.time() + 600,
            )
            for position in range(groups)
        ]
        self.sequences: list[int] = []
        self.episodes = [Episodes(driver.bus, f"episode-{number}", n=2) for number in range(EPISODES)]

    async def submit(self) -> None:
        for start in range(0, len(self.jobs), 20):
            self.sequences += await self.driver.submit(self.jobs[start : start + 20])
        await self.driver.submit(self.rng.sample(self.jobs, 3))
        for episode in self.episodes:
            await episode.open(0, 1)

    async def play(self) -> None:
        await asyncio.gather(self._play_groups(), *map(self._play_episode, self.episodes))

    async def _play_episode(self, episode: Episodes) -> None:
        """Session 0 has a branch, session 1 a turn that is under way when it ends."""
        for turn in range(3):
            await episode.play(0, turn, turn - 1 if turn else None)
        await episode.fork(0, "b", 0)
        again = await episode.dispatch(0, 3)
        await episode.finish(0, 3, again, 0, branch="b")
        await episode.finish(0, 3, again, 0, branch="b", attempt=2)
        await episode.play(1, 0)
        await episode.dispatch(1, 1)
        await episode.end(1, reward=1.0)
        await episode.end(0, reward=0.5)

    async def _play_groups(self) -> None:
        for job, seq in zip(self.jobs, self.sequences, strict=True):
            match job.position % 5:
                case 3:
                    await self.driver.cancel(job)
                case 4:
                    await self.driver.finish(job, seq, [make_sample(1)])
                case _:
                    await self._finish(job, seq)

    async def _finish(self, job: SampleGroup, seq: int) -> None:
        finished = await self.driver.finish(job, seq)
        if self.rng.random() < 0.2:
            await self.driver.finish(job, seq, [make_sample(i, attempt=2) for i in range(job.n)])
        if job.scorers:
            await self.driver.score(job, seq, finished)

    def check(self, closes: list[tuple[int, GroupClosed]]) -> None:
        times = Counter(closed.group_id for _, closed in closes)
        assert set(times.values()) == {1}, "a group closed twice"
        assert set(times) == {job.group_id for job in self.jobs} | {episode.group for episode in self.episodes}
        names = {episode.group for episode in self.episodes}
        for _, closed in closes:
            if closed.group_id in names:
                self._check_episode(closed)
                continue
            assert [entry.sample.index for entry in closed.entries] == list(range(closed.n))
            position = closed.metadata["position"]
            wanted = {3: CloseReason.CANCELLED, 4: CloseReason.EXPIRED}.get(position % 5, CloseReason.COMPLETE)
            assert closed.reason is wanted, position
            if wanted is CloseReason.COMPLETE:
                assert {entry.sample.attempt for entry in closed.entries} == {1}
                rewards = {entry.reward for entry in closed.entries}
                assert rewards == ({1.0} if closed.scorers else {None})
            if wanted is CloseReason.EXPIRED:
                assert closed.entries[1].sample.status is SampleStatus.SUCCEEDED

    def _check_episode(self, closed: GroupClosed) -> None:
        one, two = closed.entries
        assert (closed.reason, one.reward, two.reward) == (CloseReason.COMPLETE, 0.5, 1.0)
        assert [(turn.turn, turn.node and turn.node.parent, turn.attempt) for turn in one.turns] == [
            (0, None, 1), (1, 0, 1), (2, 1, 1), (3, 0, 1),
        ]  # fmt: skip
        assert [turn.turn for turn in two.turns] == [0]

    async def end(self) -> None:
        """Everything closed once, archived once under equal digests, no job left."""
        count = len(self.jobs) + len(self.episodes)
        closes = await self.driver.wait_closed(count, 40)
        self.check(closes)
        archived = await self.driver.wait_archived(count)
        assert archived == closes
        await self.driver.ack_lane()
        await self.driver.wait_stored(topology.JOBS.name, 0)


def logger_process(folder: Path, env: dict[str, str], name: str, **more: str) -> ServiceProcess:
    return ServiceProcess("trajectory_logger", folder, {**env, **QUICK, **more}, name=name)


@pytest.mark.parametrize("point", POINTS)
async def test_killed_at(point: str, driver: Driver, stack_env: dict[str, str], tmp_path: Path) -> None:
    story = Story(driver, 40, seed=len(point), deadline_s=3.0)
    env = service_environment("trajectory_logger", {**stack_env, **QUICK, **ONE_NAME}, 0)
    nth = (
        1
        if POINTS[point][1] in ("create", "_read_jobs", "_events_start") or "events" in point or "turns" in point
        else 2
    )
    argv = [sys.executable, "-m", "tests.integration.trajectory_logger.dying_logger", point, str(nth)]
    await story.submit()
    with Process("dying", argv, tmp_path / "dying.log", env) as dying:
        dying.start()
        await story.play()
        for _ in range(600):
            if not dying.running:
                break
            await asyncio.sleep(0.05)
        assert dying.returncode == -9, dying.log_tail()
    with logger_process(tmp_path, stack_env, "heir", **ONE_NAME) as heir:
        heir.start()
        await story.end()


async def test_killed_again_and_again(driver: Driver, stack_env: dict[str, str], tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    story = Story(driver, 150, seed, deadline_s=8.0)
    with logger_process(tmp_path, stack_env, "logger", **ONE_NAME) as logger:
        logger.start()
        await story.submit()
        playing = asyncio.create_task(story.play())
        for _ in range(6):
            await asyncio.sleep(story.rng.uniform(0.6, 2.0))
            logger.kill()
            logger.start()
        await playing
        await story.end()


async def test_two_loggers_and_one_of_them_sleeps(driver: Driver, stack_env: dict[str, str], tmp_path: Path) -> None:
    """The sleeper wakes up believing it is the ledger: its closes lose, and it stands by."""
    story = Story(driver, 120, seed=7, deadline_s=14.0)
    with logger_process(tmp_path, stack_env, "one") as one, logger_process(tmp_path, stack_env, "two") as two:
        one.start().wait_ready(20)
        two.start().wait_ready(20)
        assert (one.readiness()[1]["ledger"], two.readiness()[1]["ledger"]) == ("active", "standby")
        await story.submit()
        playing = asyncio.create_task(story.play())
        await driver.wait_closed(1)  # it is in the middle of its work
        one.pause()
        await playing
        async with asyncio.timeout(4 * LEDGER_LEASE_S):
            while two.readiness()[1].get("ledger") != "active":
                await asyncio.sleep(0.1)
        one.resume()
        await story.end()
        async with asyncio.timeout(20):
            while (one.readiness()[1].get("ledger"), two.readiness()[1].get("ledger")) != ("standby", "active"):
                await asyncio.sleep(0.1)
        # having lost the lease is no fault: whoever stands by is ready
        one.wait_ready(10)
        assert one.readiness()[1]["ledger"] == "standby"


async def test_a_stopped_logger_hands_over_at_once(driver: Driver, stack_env: dict[str, str], tmp_path: Path) -> None:
    with logger_process(tmp_path, stack_env, "one") as one, logger_process(tmp_path, stack_env, "two") as two:
        one.start().wait_ready(20)
        two.start().wait_ready(20)
        assert one.stop() == 0
        async with asyncio.timeout(LEDGER_LEASE_S - 2):
            while two.readiness()[1].get("ledger") != "active":
                await asyncio.sleep(0.05)


async def test_the_server_restarts_under_a_working_ledger(
    driver: Driver, stack_env: dict[str, str], tmp_path: Path, nats: Any
) -> None:
    """Deliveries in flight die with a connection: the ledger reads everything again."""
    story = Story(driver, 100, seed=3, deadline_s=10.0)
    with logger_process(tmp_path, stack_env, "logger", **ONE_NAME) as logger:
        logger.start().wait_ready(20)
        await story.submit()
        playing = asyncio.create_task(story.play())
        for _ in range(3):
            await asyncio.sleep(0.5)
            nats.restart()
        await playing
        await story.end()


async def test_five_thousand_open_groups_are_taken_over(
    driver: Driver, bus: Bus, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [make_job(position, n=2) for position in range(5000)]
    sequences: list[int] = []
    async with logger_in_process(stack_env, monkeypatch):
        for start in range(0, len(jobs), 500):
            sequences += await driver.submit(jobs[start : start + 500])
        await asyncio.gather(*(driver.finish(jobs[i], sequences[i], [make_sample(0)]) for i in range(1000)))
    async with logger_in_process(stack_env, monkeypatch) as service:
        answer = await driver.ask(within_s=30, group_ids=tuple(job.group_id for job in jobs[:1000]))
        assert all(list(status.done) == [0] for status in answer.groups)
        assert service.facts()["open_groups"] == 5000
        for start in range(0, len(jobs), 500):
            part = range(start, start + 500)
            await asyncio.gather(
                *(
                    driver.finish(jobs[i], sequences[i], [make_sample(1, attempt=2), make_sample(0, attempt=2)])
                    for i in part
                )
            )
        closes = await driver.wait_closed(5000, 60)
    assert len({closed.group_id for _, closed in closes}) == 5000
    first_thousand = {job.group_id for job in jobs[:1000]}
    for _, closed in closes:
        assert closed.entries[0].sample.attempt == (1 if closed.group_id in first_thousand else 2)
