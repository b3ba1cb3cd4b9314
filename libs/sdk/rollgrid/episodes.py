"""Many episodes at once, in complete groups: `run_episodes`, and `run_episodes_async` for asyncio.

Each task is a group of `n` sessions.  Episodes begin in the order of the tasks, so that groups fill one after the
other.  Whatever happens to an episode its session ends: an exception of `play` ends it as failed, and that one alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from rollgrid_contracts import ids

from .errors import GroupOpen, RollgridError, SessionEnded
from .sessions import GIVING_UP_S, OPEN, SessionTerms

if TYPE_CHECKING:
    from .async_client import AsyncClient
    from .async_sessions import AsyncSession
    from .client import Client
    from .results import Group
    from .session_answers import Opened
    from .sessions import Session

T = TypeVar("T")

CLOSES_S = 300.0
"""How long the closes of the groups may take behind the last episode: scorers act after it."""

NOT_PLAYED = "the run ended before it was played"
STOPPED = "the run was interrupted"
LEFT = "its process left it, and its environment with it"

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpisodeEnded(Generic[T]):
    """What `progress` is told: one episode has ended.  `error` is what `play` raised; `done` of `total` have ended so far."""

    task: T
    position: int
    index: int
    session: str
    reward: float | None
    error: Exception | None
    done: int
    failed: int
    total: int


@dataclasses.dataclass(frozen=True)
class Episode(Generic[T]):
    """Sample `index` of the group of the task at `position`, whose label is `group`."""

    task: T
    position: int
    group: str
    index: int


@dataclasses.dataclass(frozen=True)
class Plan(Generic[T]):
    """What is to be played and how far it is, free of I/O.  Called under a lock, or on one event loop."""

    tasks: list[T]
    n: int
    prefix: str
    terms: SessionTerms
    terms_of: Callable[[T], SessionTerms] | None
    progress: Callable[[EpisodeEnded[T]], object] | None
    group_ids: dict[int, str] = dataclasses.field(default_factory=dict)
    cursors: list[int] = dataclasses.field(default_factory=list)
    found_ended: set[str] = dataclasses.field(default_factory=set)
    """Groups of which a session had ended before it was opened here: they may have closed before the cursors, too."""
    never_opened: dict[int, SessionEnded] = dataclasses.field(default_factory=dict)
    """By position: a group that closed before all of it was opened, at its deadline or by a cancel."""
    closed: dict[str, Group] = dataclasses.field(default_factory=dict)
    begun: set[tuple[int, int]] = dataclasses.field(default_factory=set)
    playing: set[str] = dataclasses.field(default_factory=set)
    """Sessions that have been opened here and have not ended."""
    errors: list[Exception | None] = dataclasses.field(default_factory=list)

    def episodes(self) -> Iterator[Episode[T]]:
        for position, task in enumerate(self.tasks):
            for index in range(self.n):
                yield Episode(task, position, f"{self.prefix}-{position}", index)

    def opening(self, run: str, episode: Episode[T]) -> dict[str, Any]:
        """Arguments of `open`."""
        own = {} if self.terms_of is None else self.terms_of(episode.task)
        return {"run": run, "group": episode.group, "index": episode.index, "n": self.n, **self.terms, **own}

    def opened(self, episode: Episode[T], session: Opened) -> None:
        self.begun.add((episode.position, episode.index))
        self.group_ids[episode.position] = session.group_id
        self.cursors.append(session.cursor)
        self.playing.add(session.session)
        if session.status != OPEN:
            self.found_ended.add(session.group_id)

    def refused(self, episode: Episode[T], error: SessionEnded) -> None:
        """It was to be opened, and its group has closed without it."""
        self.begun.add((episode.position, episode.index))
        self.never_opened[episode.position] = error
        self.ended(episode, "", None, None)

    def closed_before(self) -> set[str]:
        """Groups that may have closed before the cursors.  Raises SessionEnded where nothing of one was found."""
        for position, error in self.never_opened.items():
            if position not in self.group_ids:
                raise error
        return self.found_ended | {self.group_ids[position] for position in self.never_opened}

    def missing(self) -> set[str]:
        """Groups that have not been read."""
        return set(self.group_ids.values()) - self.closed.keys()

    def reading(self, timeout: float) -> dict[str, Any]:
        """Arguments of `trajectories` for the groups that are missing."""
        return {"cursor": min(self.cursors, default=0), "until": self.missing(), "timeout": timeout}

    def in_order(self) -> list[Group]:
        return [self.closed[self.group_ids[position]] for position in range(len(self.tasks))]

    def not_played(self) -> list[Episode[T]]:
        """What is missing in groups that were begun."""
        return [
            episode
            for episode in self.episodes()
            if episode.position in self.group_ids and (episode.position, episode.index) not in self.begun
        ]

    def ended(self, episode: Episode[T], session: str, reward: float | None, error: Exception | None) -> None:
        self.errors.append(error)
        self.playing.discard(session)
        if error is not None:
            log.warning("episode %s.%d failed: %s: %s", episode.group, episode.index, type(error).__name__, error)
        if self.progress is None:
            return
        done, failed = len(self.errors), sum(found is not None for found in self.errors)
        self.progress(
            EpisodeEnded(
                task=episode.task, position=episode.position, index=episode.index, session=session, reward=reward,
                error=error, done=done, failed=failed, total=len(self.tasks) * self.n,
            )
        )  # fmt: skip


def _plan(
    tasks: Iterable[T], n: int, concurrency: int, group: str | None, terms: SessionTerms, terms_of: Any, progress: Any
) -> Plan[T]:
    if n < 1 or concurrency < 1:
        raise ValueError(f"n and concurrency are at least 1, not {n} and {concurrency}")
    return Plan(list(tasks), n, ids.new_key() if group is None else group, terms, terms_of, progress)


def run_episodes(
    client: Client,
    tasks: Iterable[T],
    play: Callable[[Session, T], float | None],
    *,
    n: int = 1,
    concurrency: int = 32,
    run: str = "default",
    group: str | None = None,
    terms_of: Callable[[T], SessionTerms] | None = None,
    progress: Callable[[EpisodeEnded[T]], object] | None = None,
    timeout: float = CLOSES_S,
    **terms: Unpack[SessionTerms],
) -> list[Group]:
    """Play each task `n` times, at most `concurrency` episodes at once in threads; the closed groups, in the order of the tasks.

    `play(session, task)` plays one episode and returns its reward, or None (scorers act then, or you post rewards
    afterwards); it may also call `session.close` itself.  What it raises ends its session as failed, and that episode
    alone: the group has its entry all the same, with the error's text and without a reward.

    The k-th group's label is `<group>-<k>`, random unless given.  Under the same label a restarted trainer gets what was
    played before: ended episodes are not played again, one that was left in the middle ends as failed.  `terms_of(task)` are terms of that task's group, beside those
    of all (`SessionTerms`).  `progress` is told of every episode that has ended, from the thread it ran in, one at a time.

    Raises:
        DeadlineExceeded: a group has not closed `timeout` seconds after the last episode.
        SessionEnded: a group of this label closed before any session of it was opened.
        RollgridError: a session could not be opened, or `progress` raised: the rest is not played, and what is missing in
            groups that were begun ends as failed.
        KeyboardInterrupt: the sessions that are being played end as failed, too, and their turns with them.
    """
    plan = _plan(tasks, n, concurrency, group, terms, terms_of, progress)
    lock, stop = threading.Lock(), threading.Event()

    def one(episode: Episode[T]) -> None:
        if stop.is_set():
            return
        try:
            session = client.sessions.open(**plan.opening(run, episode))
        except SessionEnded as raised:
            with lock:
                plan.refused(episode, raised)
            return
        with lock:
            plan.opened(episode, session.opened)
        reward, error = None, None
        try:
            with session:
                left = NOT_PLAYED if stop.is_set() else LEFT if session.opened.turns else None
                if left is not None and not session.ended:
                    client.sessions.cancel(session.id, detail=left)
                    session.life.ended = True
                if not session.ended:
                    reward = _number(play(session, episode.task))
                if not session.ended:
                    session.close(reward)
        except Exception as raised:  # noqa: BLE001 - the caller's code: whatever it raises is this episode's end alone
            error = raised
        with lock:
            plan.ended(episode, session.id, reward, error)

    with ThreadPoolExecutor(concurrency, thread_name_prefix="episode") as pool:
        played = [pool.submit(one, episode) for episode in plan.episodes()]
        try:
            for future in wait(played, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException as error:
            stop.set()
            if not isinstance(error, Exception):  # Ctrl-C: nobody waits for what is being played
                with lock:
                    playing = list(plan.playing)
                _stop(client, playing)
            pool.shutdown()
            _end_the_rest(client, plan, run)
            raise
    for group_id in plan.closed_before():
        with contextlib.suppress(GroupOpen):
            plan.closed[group_id] = client.group(group_id)
    if plan.missing():
        plan.closed.update((found.id, found) for found in client.trajectories(run, **plan.reading(timeout)))
    return plan.in_order()


def _stop(client: Client, sessions: list[str]) -> None:
    """Their turns end with them, and so what `play` waits for."""
    until = time.monotonic() + GIVING_UP_S
    for session in sessions:
        if time.monotonic() < until:
            with contextlib.suppress(RollgridError):
                client.sessions.cancel(session, detail=STOPPED)


def _end_the_rest(client: Client, plan: Plan[Any], run: str) -> None:
    until = time.monotonic() + GIVING_UP_S
    with contextlib.suppress(RollgridError):  # the failure that ended the run is what matters
        for episode in plan.not_played():
            if time.monotonic() < until:
                client.sessions.open(**plan.opening(run, episode)).close(failed=True, detail=NOT_PLAYED)


async def run_episodes_async(
    client: AsyncClient,
    tasks: Iterable[T],
    play: Callable[[AsyncSession, T], Awaitable[float | None]],
    *,
    n: int = 1,
    concurrency: int = 256,
    run: str = "default",
    group: str | None = None,
    terms_of: Callable[[T], SessionTerms] | None = None,
    progress: Callable[[EpisodeEnded[T]], object] | None = None,
    timeout: float = CLOSES_S,
    **terms: Unpack[SessionTerms],
) -> list[Group]:
    """As `run_episodes`, on one event loop.  Cancelled, it ends the sessions of its groups as failed."""
    plan = _plan(tasks, n, concurrency, group, terms, terms_of, progress)
    places = asyncio.Semaphore(concurrency)

    async def one(episode: Episode[T]) -> None:
        async with places:
            try:
                session = await client.sessions.open(**plan.opening(run, episode))
            except SessionEnded as raised:
                plan.refused(episode, raised)
                return
            plan.opened(episode, session.opened)
            reward, error = None, None
            try:
                async with session:
                    if session.opened.turns and not session.ended:
                        await client.sessions.cancel(session.id, detail=LEFT)
                        session.life.ended = True
                    if not session.ended:
                        reward = _number(await play(session, episode.task))
                    if not session.ended:
                        await session.close(reward)
            except Exception as raised:  # noqa: BLE001 - as in `run_episodes`
                error = raised
            plan.ended(episode, session.id, reward, error)

    try:
        async with asyncio.TaskGroup() as playing:
            for episode in plan.episodes():
                playing.create_task(one(episode))
    except BaseException as error:
        await _end_the_rest_async(client, plan, run)
        if isinstance(error, BaseExceptionGroup):
            raise error.exceptions[0] from error
        raise
    for group_id in plan.closed_before():
        with contextlib.suppress(GroupOpen):
            plan.closed[group_id] = await client.group(group_id)
    if plan.missing():
        plan.closed.update([(found.id, found) async for found in client.trajectories(run, **plan.reading(timeout))])
    return plan.in_order()


async def _end_the_rest_async(client: AsyncClient, plan: Plan[Any], run: str) -> None:
    with contextlib.suppress(RollgridError, TimeoutError):
        async with asyncio.timeout(GIVING_UP_S):
            for episode in plan.not_played():
                session = await client.sessions.open(**plan.opening(run, episode))
                await session.close(failed=True, detail=NOT_PLAYED)


def _number(reward: Any) -> float | None:
    """Whatever floats are made of: numpy's, a torch scalar, a bool."""
    return None if reward is None else float(reward)
