"""The state of sessions: what the stream says of them, kept folded in Redis, and the turns that are under way.

The stream is the truth.  Whatever ends or forks a session is a durable event first and folded afterwards; Redis alone
knows only which turns have begun, and loses nothing by being lost.  A read folds what is behind it on the session's
own subject, so every replica answers the same.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import keys, subjects
from rollgrid_contracts.episodes import ForkReason, SessionEnded, SessionForked, SessionOpened, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OpenEpisode
from rollgrid_contracts.samples import SamplesFinished
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_episodes.tree import Tree
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import State, StateError

from . import metrics, session_lua
from .ledger_client import LedgerClient
from .session_episode import Episode, OpenTurn, encoded, episode_of, fields_of, folded
from .session_events import Recorded, events_behind
from .session_rebuild import Rebuilder, new_fields, rebuilding
from .settings import IngestSettings

log = get_logger(__name__)

ATTEMPTS = 16
"""A transition that finds the fold changed reads again, so often at most."""
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
        self._rebuilder = Rebuilder(
            state,
            bus,
            ledger,
            lock_s=settings.session_rebuild_s,
            wait_s=settings.session_rebuild_wait_s,
            turn_s=settings.interactive_deadline_s,
        )
        self._known: OrderedDict[tuple[str, str], Episode] = OrderedDict()
        self._scripts = {name: state.script(source) for name, source in session_lua.ALL.items()}

    # -- opening ------------------------------------------------------------------------------

    async def open(self, opened: SessionOpened, episode: OpenEpisode) -> SessionOpened:
        """Open the session of a group's sample, or find it open already: what it was opened with, first in the stream.

        Raises idempotency_conflict (opened with other terms), session_ended (its group is closed), session_limit,
        QueueFull, BusError, episode_rebuilding.
        """
        tenant, session = opened.tenant, opened.session
        first = await self._first_opened(tenant, session)
        if first is not None:
            return _same_opened(first, opened)
        await self._refuse_closed(opened)
        await self._admit(opened)
        try:
            job = await self._bus.publish(
                subjects.jobs_episode(tenant),
                episode,
                msg_id=opened.group_id,
                timeout_s=self._settings.publish_timeout_s,
            )
            event = msgspec.structs.replace(opened, job_seq=job.sequence)
            ack = await self._bus.publish(
                subjects.samples(ScorerKind.DONE, tenant, session),
                event,
                msg_id=f"{session}.opened",
                timeout_s=self._settings.publish_timeout_s,
            )
        except RollgridError:
            await self._leave(tenant, session)
            raise
        if ack.duplicate:
            return _same_opened((await self.read(tenant, session, at_least=ack.sequence)).opened, opened)
        metrics.SESSIONS.labels("opened").inc()
        with state_at_hand():
            await self._keep_opened(event, ack.sequence)
        return event

    async def _first_opened(self, tenant: str, session: str) -> SessionOpened | None:
        with state_at_hand():
            episode = await self._load(tenant, session)
        if episode is not None:
            return episode.opened
        events = await events_behind(self._bus, tenant, session, 0, limit=1)
        return next((event for _, event, _ in events if isinstance(event, SessionOpened)), None)

    async def _refuse_closed(self, opened: SessionOpened) -> None:
        status = (await self._ledger.groups(opened.tenant, [opened.group_id])).get(opened.group_id)
        if status is not None and (status.closed_seq or opened.index in status.ended):
            raise _ended(opened.session)

    async def _admit(self, opened: SessionOpened) -> None:
        cap, now = self._settings.max_open_sessions, self._clock()
        forget_at = opened.terms.deadline or now + keys.SESSION_TTL_S
        with state_at_hand():
            full = await self._run("ADMIT", keys.open_sessions(opened.tenant), opened.session, now, forget_at, cap)
        if full >= 0:
            raise RollgridError(
                ErrorCode.SESSION_LIMIT,
                f"{full} sessions are open, {cap} may be",
                limit="max_open_sessions",
                retry_after_s=5.0,
            )

    async def _keep_opened(self, opened: SessionOpened, seq: int) -> None:
        tree = Tree()
        tree.apply(seq, opened)
        fields = new_fields(tree, [Recorded(seq, opened, self._clock())], 0)
        await self._rebuilder.install(opened.tenant, opened.session, fields)
        await self._schedule(opened.tenant, opened.session, self._clock() + opened.terms.ttl_s)

    # -- reading ------------------------------------------------------------------------------

    async def read(self, tenant: str, session: str, *, at_least: int = 0) -> Episode:
        """The session with everything the stream has of it (up to RG_SAMPLES sequence `at_least` for certain).

        Raises not_found, episode_rebuilding, BusError, StorageError.
        """
        for _ in range(ATTEMPTS):
            with state_at_hand():
                episode = await self._load(tenant, session)
                if episode is None:
                    await self._rebuild(tenant, session)
                    continue
            caught_up = await self._catch_up(tenant, session, episode)
            if caught_up is not None and caught_up.at >= at_least:
                return caught_up
            metrics.SESSION_RACES.inc()
        raise rebuilding("it changes faster than it can be read")

    async def _load(self, tenant: str, session: str) -> Episode | None:
        known = self._known.get((tenant, session))
        generation, at = (known.generation, known.at) if known else ("", 0)
        flat: list[bytes] = await self._run("LOAD", keys.session(tenant, session), generation, at)
        if not flat:
            return None
        fields = {name.decode(): value for name, value in zip(flat[::2], flat[1::2], strict=True)}
        return self._remember(tenant, session, episode_of(fields, known))

    def _remember(self, tenant: str, session: str, episode: Episode) -> Episode:
        self._known[(tenant, session)] = episode
        self._known.move_to_end((tenant, session))
        while len(self._known) > self._settings.session_cache:
            self._known.popitem(last=False)
        return episode

    async def _rebuild(self, tenant: str, session: str) -> None:
        self._known.pop((tenant, session), None)
        await self._rebuilder.rebuild(tenant, session)
        episode = await self._load(tenant, session)
        if episode is not None and episode.ended is None:
            await self._schedule(tenant, session, episode.expires_at)
            forget_at = min(episode.until, self._clock() + 2 * keys.SESSION_TTL_S)
            await self._run("ADMIT", keys.open_sessions(tenant), session, self._clock(), forget_at, 1 << 30)

    async def _catch_up(self, tenant: str, session: str, episode: Episode) -> Episode | None:
        """The episode with what is behind it in the stream, folded into Redis too; None when Redis has moved on."""
        events = await events_behind(self._bus, tenant, session, episode.at)
        if not events:
            return episode
        tree = folded(episode, events)
        settled = ",".join(str(turn) for turn in episode.open_turns if turn in tree.nodes or turn in tree.lost)
        forked = ",".join(branch for branch in tree.forks if branch not in episode.tree.forks)
        last = max((at for _, event, at in events if isinstance(event, SamplesFinished | SessionForked)), default=0.0)
        fields = fields_of(tree, events, episode.tree)
        pairs = [part for pair in fields.items() for part in pair]
        with state_at_hand():
            answer = await self._run(
                "FOLD",
                keys.session(tenant, session),
                episode.generation,
                episode.at,
                keys.SESSION_TTL_S,
                settled,
                forked,
                tree.next_turn,
                last,
                *pairs,
            )
            if answer != b"ok":
                return None
            if tree.ended is not None:
                await self._leave(tenant, session)
            return await self._load(tenant, session)

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
        token, episode = secrets.token_hex(8), seen
        try:
            for _ in range(ATTEMPTS):
                episode = episode or await self.read(tenant, session)
                self._refuse_turn(episode, node)
                if not _moved_on(episode, node):
                    answer = await self._begin(episode, node, deadline, token)
                    if answer[0] == b"ok":
                        metrics.TURNS.inc()
                        return Begun(int(answer[1]), node)
                    busy = answer[0] == b"busy"
                    if not busy:
                        self._raise_for(answer, episode)
                        episode = None
                        metrics.SESSION_RACES.inc()
                        continue
                latest = await self.read(tenant, session)
                if latest.at != episode.at:  # the turn in the way may have ended since
                    episode = latest
                    if not _moved_on(latest, node):
                        continue
                if episode.terms.on_concurrent_turn != "fork" or node.branch not in episode.tree.branches:
                    raise _busy(session, node.branch)
                branch = await self.fork(tenant, session, node.parent, ForkReason.CONCURRENT_TURN)
                fork = node.fork or ForkReason.CONCURRENT_TURN
                node, episode = msgspec.structs.replace(node, branch=branch, fork=fork), None
        except RollgridError as error:
            metrics.TURNS_REFUSED.labels(error.code.value).inc()
            raise
        raise rebuilding("it changes faster than a turn can begin")

    async def _begin(self, episode: Episode, node: TurnNode, deadline: float, token: str) -> list[Any]:
        opened, tree, now = episode.opened, episode.tree, self._clock()
        turn = OpenTurn(deadline=deadline, branch=node.branch, parent=node.parent, token=token, began_at=now)
        left = self._cap("max_turns", opened) - len(tree.nodes) - len(tree.lost)
        with state_at_hand():
            answer: list[Any] = await self._run(
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

    def _refuse_turn(self, episode: Episode, node: TurnNode) -> None:
        tree, session = episode.tree, episode.opened.session
        if episode.ended is not None or self._clock() >= episode.until:
            raise _ended(session)
        if node.branch not in tree.branches:
            raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no branch {node.branch}", field="branch")
        if node.parent is not None and node.parent not in tree.nodes:
            raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no turn {node.parent}", field="parent")
        cap = self._cap("max_tokens", episode.opened)
        if tree.tokens + len(node.observation) >= cap:
            raise _over("max_tokens", cap, f"the session has {tree.tokens} tokens")

    def _raise_for(self, answer: list[Any], episode: Episode) -> None:
        """Typed refusals of a script; what is not one is tried again."""
        kind = answer[0]
        if kind == b"ended":
            raise _ended(episode.opened.session)
        if kind == b"ending":
            raise _busy(episode.opened.session, None)
        if kind == b"full":
            cap = self._cap("max_turns", episode.opened)
            raise _over("max_turns", cap, f"the session has {cap} turns")

    async def dispatched(self, tenant: str, session: str, turn: int, fence: int) -> None:
        """The turn was stored as RG_JOBS sequence `fence`: finishes of older dispatches of it are stale.

        Never fails: the job is durable, and what Redis loses of it the ledger knows.
        """
        try:
            await self._run("DISPATCHED", keys.session(tenant, session), turn, fence)
        except StateError as error:
            log.warning("dispatch_not_noted", session=session, turn=turn, error=error.message)

    async def abandon_turn(self, tenant: str, session: str, turn: int) -> None:
        """A turn that was begun was certainly not stored as a job: its branch is free again, its number spent."""
        try:
            await self._run("ABANDON", keys.session(tenant, session), turn)
        except StateError as error:
            log.warning("turn_not_abandoned", session=session, turn=turn, error=error.message)

    async def finish_turn(self, tenant: str, session: str, turn: int) -> Episode:
        """After the turn's answer came: fold what the stream has now.  Raises as `read`."""
        return await self.read(tenant, session)

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
            return _same_fork(episode, event)
        await self._reserve(episode, event)
        ack = await self._bus.publish(
            subjects.samples(ScorerKind.DONE, tenant, session),
            event,
            msg_id=f"{session}.fork.{branch}",
            timeout_s=self._settings.publish_timeout_s,
        )
        return _same_fork(await self.read(tenant, session, at_least=ack.sequence), event)

    async def _reserve(self, episode: Episode, event: SessionForked) -> None:
        tenant, session = event.tenant, event.session
        for _ in range(ATTEMPTS):
            if episode.ended is not None or self._clock() >= episode.until:
                raise _ended(session)
            if event.parent is not None and event.parent not in episode.tree.nodes:
                raise RollgridError(ErrorCode.INVALID_REQUEST, f"there is no turn {event.parent}", field="parent")
            cap = self._settings.session_max_branches
            left = cap - len(episode.tree.branches)
            with state_at_hand():
                answer = await self._run(
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
                raise _over("max_branches", cap, f"the session has {len(episode.tree.branches)} branches")
            self._raise_for(answer, episode)
            metrics.SESSION_RACES.inc()
            episode = await self.read(tenant, session)
        raise rebuilding("it changes faster than it can be forked")

    async def end(
        self, ended: SessionEnded, todo: ScorerKind = ScorerKind.DONE, *, idle: Episode | None = None
    ) -> SessionEnded:
        """End the session, durably; ended before in the same way, how that was.

        `todo` is the scorer kind that must act on it.  With `idle` only if nothing has happened since that read and
        no turn is open (session_busy).  Raises session_ended (in another way), QueueFull, and as `read`.
        """
        tenant, session = ended.tenant, ended.session
        episode = await self.read(tenant, session)
        if episode.ended is not None:
            return _same_end(episode.ended, ended)
        last = repr(idle.last_active) if idle is not None else ""
        with state_at_hand():
            name = keys.session(tenant, session)
            answer = await self._run("BEGIN_END", name, self._clock(), "idle" if idle else "any", last)
        if answer[0] in (b"busy", b"moved"):
            raise _busy(session, None)
        if answer[0] == b"gone":
            raise rebuilding("it was lost while it was to be ended")
        if answer[0] == b"ended":
            return _same_end((await self.read(tenant, session)).ended, ended)
        try:
            ack = await self._bus.publish(
                subjects.samples(todo, tenant, session),
                ended,
                msg_id=f"{session}.ended",
                timeout_s=self._settings.publish_timeout_s,
            )
        except RollgridError:
            with contextlib.suppress(StateError):
                await self._run("CANCEL_END", name)
            raise
        first = (await self.read(tenant, session, at_least=ack.sequence)).ended
        if not ack.duplicate:
            metrics.SESSIONS.labels(ended.outcome.value).inc()
        return _same_end(first, ended)

    # -- Redis --------------------------------------------------------------------------------

    async def _run(self, script: str, name: str, *arguments: str | bytes | int | float) -> Any:
        return await self._scripts[script]([name], *arguments)

    async def _schedule(self, tenant: str, session: str, at: float) -> None:
        await self._run("SCHEDULE", keys.session_expiry(), f"{tenant}:{session}", at)

    async def _leave(self, tenant: str, session: str) -> None:
        """It counts as open no longer.  Never fails: what stays is forgotten in time."""
        with contextlib.suppress(StateError):
            await self._run("LEAVE", keys.open_sessions(tenant), session)
            await self._run("LEAVE", keys.session_expiry(), f"{tenant}:{session}")

    def _cap(self, name: str, opened: SessionOpened) -> int:
        """The session's own cap where it is lower than the deployment's."""
        own: int = getattr(opened.terms, name)
        most: int = getattr(self._settings, f"session_{name}")
        return min(own, most) if own else most


@contextlib.contextmanager
def state_at_hand() -> Iterator[None]:
    """Redis away is the same to the caller as Redis emptied: the session is there, its state is not."""
    try:
        yield
    except StateError as error:
        raise rebuilding(error.message) from error


def _moved_on(episode: Episode, node: TurnNode) -> bool:
    """Whether `node`, which claims to go on behind the last turn of its branch, no longer does."""
    return node.fork is None and episode.tree.branches[node.branch].head != node.parent


def _ended(session: str) -> RollgridError:
    return RollgridError(ErrorCode.SESSION_ENDED, f"session {session} has ended", field="session")


def _busy(session: str, branch: str | None) -> RollgridError:
    what = "it is being ended" if branch is None else f"another turn of branch {branch} is under way or was first"
    return RollgridError(ErrorCode.SESSION_BUSY, f"session {session}: {what}", field="session", retry_after_s=1.0)


def _over(limit: str, cap: int, what: str) -> RollgridError:
    return RollgridError(ErrorCode.LIMIT_EXCEEDED, f"{what}, {cap} may be", field="session", limit=limit)


def _same_opened(first: SessionOpened, asked: SessionOpened) -> SessionOpened:
    if _terms(first) != _terms(asked):
        raise RollgridError(
            ErrorCode.IDEMPOTENCY_CONFLICT, f"session {first.session} was opened with other terms", field="session"
        )
    return first


def _terms(opened: SessionOpened) -> SessionOpened:
    """What two openings of one session have in common: a deadline is as long after its opening."""
    span = round(opened.terms.deadline - opened.opened_at, 1) if opened.terms.deadline else 0.0
    terms = msgspec.structs.replace(opened.terms, deadline=span)
    return msgspec.structs.replace(opened, terms=terms, opened_at=0.0, job_seq=0, traceparent=None)


def _same_fork(episode: Episode, asked: SessionForked) -> str:
    found = episode.tree.forks.get(asked.branch)
    if found is None and episode.ended is not None:
        raise _ended(asked.session)
    if found is None or (found.parent, found.reason) != (asked.parent, asked.reason):
        raise RollgridError(ErrorCode.IDEMPOTENCY_CONFLICT, f"branch {asked.branch} is another fork's", field="name")
    return asked.branch


def _same_end(first: SessionEnded | None, asked: SessionEnded) -> SessionEnded:
    if first is None:
        raise rebuilding("its end is stored and not read yet")
    if (first.outcome, first.reward, first.turn_rewards) != (asked.outcome, asked.reward, asked.turn_rewards):
        raise _ended(asked.session)
    return first
