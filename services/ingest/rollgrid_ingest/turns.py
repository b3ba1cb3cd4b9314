"""A session's turn from its request to its answer.

The session is read, the prompt planned on its tree, the turn begun, its job stored on the lane of the worker that has
the session's cache, and awaited by the turn's own call id.  A client that leaves stops the turn, never the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

import msgspec
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.episodes import TurnNode, VersionHold
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import CancelWork
from rollgrid_contracts.jobs import Session, VersionRule, WeightConstraint, turn_call
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.logging import get_logger

from .affinity import Affinity, Need
from .handler import Handler
from .prompts import Prompt
from .replies import Collected, Replies, refuse_failed
from .session_episode import Episode
from .session_refusals import has_ended, no_session
from .session_store import SessionStore
from .submission import Accepted, Caller, Submission, TurnPlace
from .turn_keys import BEGINNING_S, TurnKey, TurnKeys, beginning
from .turn_prompts import Planned
from .wire import invalid

log = get_logger(__name__)
TRIES = 2
"""A job whose storing got no answer is sent again: the stream drops a second copy."""

Planning = Callable[[Episode, Planned | None], Awaitable[tuple[Submission, Planned]]]
"""The request as a submission, its prompt planned on the episode's tree, or as it was planned once."""


class Turns:
    """The turns of all sessions of this process."""

    def __init__(self, bus: Bus, store: SessionStore, affinity: Affinity, handler: Handler, replies: Replies) -> None:
        self.bus, self.store, self.affinity, self.handler, self.replies = bus, store, affinity, handler, replies
        self.keys = TurnKeys(bus)

    async def prepare(self, caller: Caller, session: str, branch: str, plan: Planning) -> tuple[Submission, TurnCall]:
        """The turn that the request asks for, begun; or the one that its key stands for.

        Raises not_found, session_busy, session_ended, limit_exceeded, episode_rebuilding and whatever `plan` refuses.
        """
        episode = await self.store.read(caller.tenant, session)
        if branch not in episode.tree.branches:
            raise no_session(session, branch)
        key = await self.keys.claim(caller, session, episode.opened.run)
        if key is not None and key.call_id:
            return await self._again(caller, session, key, plan)
        try:
            return await self._begin(caller, episode, key, plan)
        except BaseException:
            if key is not None:
                await self.keys.release(key)
            raise

    async def _begin(
        self, caller: Caller, episode: Episode, key: TurnKey | None, plan: Planning
    ) -> tuple[Submission, TurnCall]:
        opened = episode.opened
        submission, planned = await plan(episode, None)
        now = time.time()
        left_s = episode.until - now
        if left_s <= 0:
            raise has_ended(opened.session)
        (group,) = submission.groups
        group = msgspec.structs.replace(
            group, deadline_s=min(group.deadline_s, left_s), prompt_text=None, messages=None
        )
        submission = msgspec.structs.replace(submission, groups=(group,), **_terms(submission, episode))
        deadline = now + group.deadline_s
        submission = _placed(submission, episode, 0, planned.node)
        await self.handler.check_turn(submission, episode.until)
        begun = await self.store.begin_turn(caller.tenant, opened.session, planned.node, deadline, seen=episode)
        submission = _placed(submission, episode, begun.turn, begun.node)
        try:
            if key is not None:
                key = await self.keys.names(key, turn_call(opened.session, begun.turn), deadline)
        except BaseException:
            await self.store.abandon_turn(caller.tenant, opened.session, begun.turn)
            raise
        return submission, TurnCall(self, submission, episode, now, key)

    async def _again(self, caller: Caller, session: str, key: TurnKey, plan: Planning) -> tuple[Submission, TurnCall]:
        """The turn of an earlier request with the same key and body, once it has ended.  Raises its failure."""
        turn = int(key.call_id.rpartition("-t")[2])
        record = TurnReader(self.store, caller.tenant, session, turn)
        async with self.replies.listening({key.call_id: 1}, turn=record) as collected:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, key.record.created_at + BEGINNING_S - time.time())):
                    await self.replies.wait(collected, caller.tenant, key.deadline, ask_first=True)
            if not collected.complete.is_set():
                await self._let_go_unless_stored(caller.tenant, session, turn, key, record)
                await self.replies.wait(collected, caller.tenant, key.deadline, ask_first=True)
        episode = await self.store.read(caller.tenant, session)
        node = episode.tree.nodes.get(turn)
        if node is None:
            try:
                refuse_failed(collected.samples(key.call_id))
            except RollgridError as error:
                error.retryable = False  # the key stands for a turn that has ended: another one plays a new turn
                raise
            raise has_ended(session)
        place = node.node
        prompt = episode.tree.token_ids(place.parent).tolist() + place.observation.tolist()
        submission, _ = await plan(episode, Planned(place, Prompt(prompt)))
        submission = _placed(submission, episode, turn, place)
        return submission, TurnCall(self, submission, episode, time.time(), key, again=True)

    async def _let_go_unless_stored(
        self, tenant: str, session: str, turn: int, key: TurnKey, record: TurnReader
    ) -> None:
        """A replica that died before it stored the turn's job left its key behind: raises session_busy, and the next
        request begins the turn anew.
        """
        try:
            stored = await self.store.open_job(await self.store.read(tenant, session), turn)
            if stored is not None or await record() is not None:
                return
        except RollgridError as error:  # not known: waited for
            log.info("turn_not_looked_up", call=key.call_id, error=error.message)
            return
        await self.store.abandon_turn(tenant, session, turn)
        await self.keys.release(key)
        raise beginning()


class TurnReader:
    """Reads one turn from its session.  See `replies.TurnRecord`."""

    def __init__(self, store: SessionStore, tenant: str, session: str, turn: int) -> None:
        self._store, self._tenant, self._session, self._turn = store, tenant, session, turn

    async def __call__(self) -> Sample | None:
        episode = await self._store.read(self._tenant, self._session)
        node = episode.tree.nodes.get(self._turn)
        if node is not None:
            return await self._store.sample(episode, self._turn)
        lost = episode.tree.lost.get(self._turn)
        if lost is not None:
            return _failed(episode, self._turn, lost.status, lost.detail)
        if episode.ended is not None or await self._store.group_closed(episode):
            why = ErrorInfo(code=ErrorCode.SESSION_ENDED, message="the session has ended", boundary=Boundary.CLIENT)
            return Sample(index=episode.opened.index, turn=self._turn, status=SampleStatus.CANCELLED, error=why)
        return None


class TurnCall:
    """One turn that is asked for.  See `door.Call`."""

    def __init__(
        self,
        turns: Turns,
        submission: Submission,
        episode: Episode,
        now: float,
        key: TurnKey | None,
        *,
        again: bool = False,
    ) -> None:
        assert submission.turn is not None
        self._turns, self._submission, self._episode, self._now = turns, submission, episode, now
        self._key, self._again, self._place = key, again, submission.turn
        self._settled = again
        session = submission.turn.session
        self.record = TurnReader(turns.store, submission.tenant, session.session, session.turn)

    async def submit(self) -> Accepted:
        """Store the job on the lane of the worker that is bound to the session."""
        sequence = 0
        if not self._again:
            try:
                sequence = await self._store()
            except BusError:
                # a job that nobody answered for may be there: with a key its client comes back for it
                self._settled = self._key is not None
                raise
        self._settled = True
        place = self._place
        return Accepted(
            batch_id=place.call_id,
            run=self._submission.run,
            cursor=0,
            group_ids=(place.call_id,),
            deadline=self._now + self._submission.groups[0].deadline_s,
            fresh=not self._again,
            job_seq=sequence,
        )

    async def _store(self) -> int:
        turns, asked, place = self._turns, self._submission, self._place
        session, policy = place.session.session, asked.policy
        for attempt in range(TRIES):
            placed = await turns.affinity.place(
                policy.pool, asked.tenant, session, Need(policy, asked.weights), last=self._last_worker()
            )
            worker = msgspec.structs.replace(place.session, worker=placed.worker)
            job = msgspec.structs.replace(asked, turn=msgspec.structs.replace(place, session=worker))
            try:
                sequence = await turns.handler.store_turn(job, placed.worker, self._now)
            except BusError:
                if attempt + 1 == TRIES:
                    raise
                continue
            await turns.store.dispatched(asked.tenant, session, place.session.turn, sequence)
            return sequence
        raise AssertionError("unreachable")

    def _last_worker(self) -> str | None:
        parent = self._place.session.node.parent
        return None if parent is None else self._episode.tree.nodes[parent].sample.worker or None

    async def let_go(self) -> None:
        """A turn that never became a job gives its branch free."""
        if self._settled:
            return
        self._settled = True
        place = self._place
        await self._turns.store.abandon_turn(self._submission.tenant, place.session.session, place.session.turn)
        if self._key is not None:
            await self._turns.keys.release(self._key)

    async def give_up(self, accepted: Accepted, reason: str) -> None:
        """The turn ends as cancelled, unless it has a key: then its client may come back."""
        if self._submission.idempotent:
            return
        command = CancelWork(group_ids=(), turns=(self._place.call_id,))
        try:
            await self._turns.bus.publish_core(subjects.worker_control(subjects.EVERY_WORKER), command)
        except RollgridError as error:  # it runs to its end, or to its deadline
            log.warning("turn_not_cancelled", call=self._place.call_id, reason=reason, error=error.message)

    async def answered(self, collected: Collected) -> None:
        """The version that a pinned session's first turn ran on is kept from here on."""
        if self._episode.terms.hold is not VersionHold.PIN or self._episode.tree.nodes or self._again:
            return
        samples = collected.samples(self._place.call_id)
        if not samples or not samples[0].version_spans:
            return
        version = WeightConstraint(rule=VersionRule.EXACT, value=samples[0].version_spans[-1].version)
        pinned = msgspec.structs.replace(self._submission, weights=version)
        with contextlib.suppress(RollgridError):  # the next turn asks for it, and is told what has gone
            await self._turns.handler.hold_turn(pinned, self._episode.until)


def check_policy(episode: Episode, policy: PolicyState, field: str = "model") -> None:
    """A session stays with the policy it was opened for."""
    if policy.policy != episode.terms.policy:
        raise invalid(f"{field} is not the session's, which is {episode.terms.policy}", field)


def _terms(submission: Submission, episode: Episode) -> dict[str, object]:
    """What the session decides for all its turns."""
    terms = episode.terms
    found: dict[str, object] = {"run": episode.opened.run}
    if terms.hold is VersionHold.PIN:
        found["pinned"] = True
    if terms.hold is VersionHold.PIN and episode.tree.nodes:
        if (version := episode.keeps) is not None:
            found["weights"] = WeightConstraint(rule=VersionRule.EXACT, value=version)
    elif submission.weights == WeightConstraint():
        found["weights"] = WeightConstraint(rule=VersionRule(terms.weights_rule), value=terms.weights_value)
    return found


def _placed(submission: Submission, episode: Episode, turn: int, node: TurnNode) -> Submission:
    opened = episode.opened
    place = TurnPlace(
        batch_id=batch_of(opened.tenant, opened.run, opened.group_id),
        group_id=opened.group_id,
        index=opened.index,
        n=opened.n,
        session=Session(session=opened.session, turn=turn, node=node),
    )
    return msgspec.structs.replace(submission, turn=place)


def batch_of(tenant: str, run: str, group_id: str) -> str:
    """The batch of a group of sessions: the group's alone."""
    return ids.batch_id(tenant, run, group_id)


def _failed(episode: Episode, turn: int, status: SampleStatus, detail: str | None) -> Sample:
    codes = {SampleStatus.CANCELLED: ErrorCode.CANCELLED, SampleStatus.EXPIRED: ErrorCode.EXPIRED}
    code = codes.get(status, ErrorCode.ENGINE_ERROR)
    error = ErrorInfo(code=code, message=detail or f"the turn {status.value}", boundary=Boundary.ENGINE)
    return Sample(index=episode.opened.index, turn=turn, status=status, error=error)
