"""The state of sessions: what the stream says of them, kept folded in Redis, and the turns that are under way.

The stream is the truth.  Whatever ends or forks a session is a durable event first and folded afterwards; Redis alone
knows only which turns have begun, and loses nothing by being lost.  A read folds what is behind it on the session's
own subject, so every replica answers the same.
"""

from __future__ import annotations

import dataclasses
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import keys, subjects
from rollgrid_contracts.episodes import ForkReason, SessionEnded, SessionForked, SessionOpened, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OpenEpisode
from rollgrid_contracts.samples import Sample, SamplesFinished
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import State, StateError

from . import metrics
from .ledger_client import LedgerClient
from .session_episode import Episode, OpenTurn, encoded
from .session_events import event_at
from .session_reading import ATTEMPTS, Episodes
from .session_refusals import branch_busy, busy, has_ended, over, rebuilding, same_fork, state_at_hand
from .session_store_ending import Endings
from .session_store_opening import Openings
from .settings import IngestSettings

log = get_logger(__name__)

HOLD_S = 30.0
"""An ending or a fork that was announced and not published within so long no longer holds anybody."""


class Begun(NamedTuple):
    """A turn that may be sampled.  `node` may name another branch than was asked for (`on_concurrent_turn` fork)."""

    turn: int
    node: TurnNode


class SessionStore:
    def __init__(
        self,
        state: State,
        bus: Bus,
        ledger: LedgerClient,
        settings: IngestSettings,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus, self._ledger, self._settings, self._clock = bus, ledger, settings, clock
        self._episodes = Episodes(state, bus, ledger, settings, clock)
        self._openings = Openings(self._episodes, bus, ledger, settings, clock)
        self._endings = Endings(self._episodes, bus, ledger, settings.publish_timeout_s, clock)
        self.schedule, self.leave = self._episodes.schedule, self._episodes.leave
        self.scheduled = self._episodes.scheduled
        """Set whenever a session is to be looked at later."""

    async def open(self, opened: SessionOpened, episode: OpenEpisode, *, fresh: bool = False) -> SessionOpened:
        """Open the session of a group's sample, or find it open already: what it was opened with, first in the stream.

        `fresh`: the group's id was made for this call alone, so nobody can have opened or closed it before.
        Raises idempotency_conflict (opened with other terms), session_ended (its group is closed), session_limit,
        QueueFull, BusError, episode_rebuilding.
        """
        return await self._openings.open(opened, episode, fresh=fresh)

    async def read(self, tenant: str, session: str, *, at_least: int = 0) -> Episode:
        """The session with everything the stream has of it (up to RG_SAMPLES sequence `at_least` for certain).

        Raises not_found, episode_rebuilding, BusError, StorageError.
        """
        return await self._episodes.read(tenant, session, at_least=at_least)

    async def sample(self, episode: Episode, turn: int) -> Sample:
        """A node's sample as it was recorded, alternatives and prompt logprobs included while the stream has them.

        Raises KeyError when the turn is no node, BusError, StorageError.
        """
        node = episode.tree.nodes[turn]
        event = await event_at(self._bus, node.seq)
        whole = episode.tree.own(event) if isinstance(event, SamplesFinished) else None
        return node.sample if whole is None else whole

    # -- turns --------------------------------------------------------------------------------

    async def begin_turn(
        self, tenant: str, session: str, node: TurnNode, deadline: float, *, seen: Episode | None = None
    ) -> Begun:
        """Begin a turn at `node`: its number, which no other turn of the session has or will have.

        `seen` is the episode from which the caller made `node`, if it has just read one.  Where the terms say fork, a
        turn whose branch is busy, or has moved on since, begins a branch of its own.

        Raises session_busy (a turn of the branch is under way, or ended since `node` was made), session_ended,
        limit_exceeded (max_turns, max_tokens, max_branches), invalid_request (no such parent or branch), and as `read`.
        """
        try:
            begun = await self._begin(tenant, session, node, deadline, seen)
        except RollgridError as error:
            metrics.TURNS_REFUSED.labels(error.code.value).inc()
            raise
        metrics.TURNS.inc()
        return begun

    async def _begin(
        self, tenant: str, session: str, node: TurnNode, deadline: float, episode: Episode | None
    ) -> Begun:
        token = secrets.token_hex(8)
        for _ in range(ATTEMPTS):
            episode = episode or await self.read(tenant, session)
            self._refuse_turn(episode, node)
            if not moved_on(episode, node):
                answer = await self._try_to_begin(episode, node, deadline, token)
                if answer[0] == b"ok":
                    return Begun(int(answer[1]), node)
                self._raise_for(answer, episode)
                if answer[0] != b"busy":
                    metrics.SESSION_RACES.inc()
                    episode = None
                    continue
            latest = await self.read(tenant, session)
            if latest.at != episode.at or await self._let_go_of_lost(latest, node.branch):
                episode = latest  # what was in the way may have ended
                if not moved_on(episode, node):
                    continue
            if episode.terms.on_concurrent_turn != "fork":
                raise branch_busy(session, node.branch)
            branch = await self.fork(tenant, session, node.parent, ForkReason.CONCURRENT_TURN)
            node = msgspec.structs.replace(node, branch=branch, fork=node.fork or ForkReason.CONCURRENT_TURN)
            episode = None
        raise rebuilding("it changes faster than a turn can begin")

    async def _try_to_begin(self, episode: Episode, node: TurnNode, deadline: float, token: str) -> list[Any]:
        opened, tree, now = episode.opened, episode.tree, self._clock()
        turn = OpenTurn(deadline=deadline, branch=node.branch, parent=node.parent, token=token, began_at=now)
        left = self._cap("max_turns", opened) - len(tree.nodes) - len(tree.lost)
        with state_at_hand():
            answer: list[Any] = await self._episodes.run(
                "BEGIN",
                keys.session(opened.tenant, opened.session),
                episode.generation,
                episode.at,
                now,
                HOLD_S,
                left,
                keys.SESSION_TTL_S,
                token,
                node.branch,
                encoded(turn),
            )
        return answer

    async def _let_go_of_lost(self, episode: Episode, branch: str) -> bool:
        """Whether what holds the branch was a turn that nobody will sample: its replica died before it stored the job."""
        opened, now = episode.opened, self._clock()
        for turn, held in episode.live_turns(now).items():
            if held.branch != branch or held.job_seq or held.began_at + HOLD_S > now:
                continue
            try:
                job = await self.open_job(episode, turn)
            except RollgridError as error:
                log.debug("open_turn_unknown", session=opened.session, turn=turn, error=error.message)
                return False
            if job is not None:
                await self.dispatched(opened.tenant, opened.session, turn, job)
                return False
            await self.abandon_turn(opened.tenant, opened.session, turn)
            return True
        return False

    async def open_job(self, episode: Episode, turn: int) -> int | None:
        """RG_JOBS sequence of a turn's job that is open; None: it has ended, or was never stored.  Raises not_ready."""
        opened = episode.opened
        known = await self._ledger.caught_up(opened.tenant, [opened.group_id], within_s=1.0)
        status = known.get(opened.group_id)
        return status.open_jobs.get(opened.index, {}).get(turn) if status is not None else None

    def _refuse_turn(self, episode: Episode, node: TurnNode) -> None:
        tree, session = episode.tree, episode.opened.session
        if episode.over(self._clock()):
            raise has_ended(session)
        if node.branch not in tree.branches:
            raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no branch {node.branch}", field="branch")
        if node.parent is not None and node.parent not in tree.nodes:
            raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no turn {node.parent}", field="parent")
        cap = self._cap("max_tokens", episode.opened)
        if tree.tokens + len(node.observation) >= cap:
            raise over("max_tokens", cap, f"the session has {tree.tokens} tokens")

    def _raise_for(self, answer: list[Any], episode: Episode) -> None:
        """Typed refusals of a script; what is not one is tried again."""
        kind = answer[0]
        if kind == b"ended":
            raise has_ended(episode.opened.session)
        if kind == b"ending":
            raise busy(episode.opened.session, "it is being ended")
        if kind == b"full":
            cap = self._cap("max_turns", episode.opened)
            raise over("max_turns", cap, f"the session has {cap} turns")

    async def dispatched(self, tenant: str, session: str, turn: int, job_seq: int) -> None:
        """The turn was stored as RG_JOBS sequence `job_seq`: it holds its branch until it has ended.

        Never fails: the job is durable, and what Redis loses of it the ledger knows.
        """
        try:
            await self._episodes.run("DISPATCHED", keys.session(tenant, session), turn, job_seq)
        except StateError as error:
            log.warning("dispatch_not_noted", session=session, turn=turn, error=error.message)

    async def abandon_turn(self, tenant: str, session: str, turn: int) -> None:
        """A turn that was begun was certainly not stored as a job: its branch is free again, its number spent."""
        try:
            await self._episodes.run("ABANDON", keys.session(tenant, session), turn)
        except StateError as error:
            log.warning("turn_not_abandoned", session=session, turn=turn, error=error.message)

    # -- forks and ends -----------------------------------------------------------------------

    async def fork(
        self,
        tenant: str,
        session: str,
        parent: int | None,
        reason: ForkReason,
        detail: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        *,
        name: str | None = None,
    ) -> str:
        """A branch behind turn `parent` (None: at the root), durable before its name is returned.

        Raises session_ended, invalid_request (no such turn), limit_exceeded (max_branches), idempotency_conflict
        (`name` is another fork's), QueueFull, and as `read`.
        """
        branch = name or f"b{secrets.token_hex(4)}"
        episode = await self.read(tenant, session)
        opened = episode.opened
        event = SessionForked(
            tenant=tenant,
            run=opened.run,
            group_id=opened.group_id,
            index=opened.index,
            session=session,
            branch=branch,
            parent=parent,
            reason=reason,
            detail=detail,
            metadata=dict(metadata or {}),
            forked_at=self._clock(),
            job_seq=opened.job_seq,
        )
        if branch in episode.tree.branches:
            return same_fork(episode, event)
        await self._reserve(episode, event)
        ack = await self._bus.publish(
            subjects.samples(ScorerKind.DONE, tenant, session),
            event,
            msg_id=f"{session}.fork.{branch}",
            timeout_s=self._settings.publish_timeout_s,
        )
        return same_fork(await self.read(tenant, session, at_least=ack.sequence), event)

    async def _reserve(self, episode: Episode, event: SessionForked) -> None:
        tenant, session = event.tenant, event.session
        for _ in range(ATTEMPTS):
            if episode.over(self._clock()):
                raise has_ended(session)
            if event.parent is not None and event.parent not in episode.tree.nodes:
                raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no turn {event.parent}", field="parent")
            cap = self._settings.session_max_branches
            left = cap - len(episode.tree.branches)
            with state_at_hand():
                answer = await self._episodes.run(
                    "RESERVE_BRANCH",
                    keys.session(tenant, session),
                    episode.generation,
                    episode.at,
                    event.branch,
                    self._clock(),
                    left,
                    HOLD_S,
                )
            if answer[0] == b"ok":
                return
            if answer[0] == b"full":
                raise over("max_branches", cap, f"the session has {len(episode.tree.branches)} branches")
            self._raise_for(answer, episode)
            metrics.SESSION_RACES.inc()
            episode = await self.read(tenant, session)
        raise rebuilding("it changes faster than it can be forked")

    async def end(self, ended: SessionEnded, *, idle: Episode | None = None) -> SessionEnded:
        """End the session, durably; ended before in the same way, how that was.

        Its scorers act on a path that was closed (`leaf`), no others.  With `idle` only if nothing has happened since
        that read and no turn is open (session_busy).  Raises session_ended (in another way), QueueFull, and as `read`.
        """
        return await self._endings.end(ended, idle=idle)

    async def group_closed(self, episode: Episode) -> bool:
        """Whether the ledger has closed the session's group: by its deadline or a cancel, which no session is told of.

        From then on no turn begins.  A ledger that is silent has not.
        """
        return await self._endings.group_closed(episode)

    async def with_group(self, episode: Episode) -> Episode:
        """The episode, `closed` where the ledger has closed its group."""
        if episode.over(self._clock()) or not await self.group_closed(episode):
            return episode
        return dataclasses.replace(episode, closed=True)

    def _cap(self, name: str, opened: SessionOpened) -> int:
        """The session's own cap where it is lower than the deployment's."""
        own: int = getattr(opened.terms, name)
        most: int = getattr(self._settings, f"session_{name}")
        return min(own, most) if own else most


def moved_on(episode: Episode, node: TurnNode) -> bool:
    """Whether `node`, which claims to go on behind the last turn of its branch, no longer does."""
    return node.fork is None and episode.tree.branches[node.branch].head != node.parent
