"""Making a session's fold again when Redis has lost it: from the stream, and from the ledger what is still open.

One replica does it, under a lock that a dead holder loses; the others wait a second and then say `episode_rebuilding`.
What Redis alone knew were turns that were begun and not yet stored as jobs: their numbers are leapt over, so that
no number is given twice.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from rollgrid_contracts import codec, keys
from rollgrid_contracts.episodes import SessionOpened, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import GroupStatus
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.topology import JOBS
from rollgrid_episodes.tree import Tree
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.state import State, StateError

from . import metrics, session_lua
from .ledger_client import LedgerClient
from .session_episode import Fields, OpenTurn, encoded, fields_of
from .session_events import Recorded, events_behind
from .session_refusals import no_session, rebuilding

LOOK_AGAIN_S = 0.1
LEDGER_S = 2.0
LEAP = 64
"""At least so many turn numbers are leapt over at a rebuild, and at random as many again."""


class Rebuilder:
    """`lock_s` bounds how long one rebuild may take, `wait_s` how long another request waits for it."""

    def __init__(self, state: State, bus: Bus, ledger: LedgerClient, *, lock_s: float, wait_s: float) -> None:
        self._bus, self._ledger, self._lock_s, self._wait_s = bus, ledger, lock_s, wait_s
        self._lock = state.script(session_lua.LOCK)
        self._unlock = state.script(session_lua.UNLOCK)
        self._install = state.script(session_lua.INSTALL)
        self._exists = state.script(session_lua.EXISTS)

    async def rebuild(self, tenant: str, session: str) -> None:
        """Return when the fold is in Redis again.  Raises not_found, episode_rebuilding, BusError, StateError."""
        token, until = secrets.token_hex(8), time.monotonic() + self._wait_s
        name, lock = keys.session(tenant, session), keys.session_lock(tenant, session)
        while not await self._lock([lock], token, int(self._lock_s * 1000)):
            if time.monotonic() > until:
                metrics.REBUILDS.labels("waited").inc()
                raise rebuilding("another request is rebuilding this session")
            await asyncio.sleep(LOOK_AGAIN_S)
            if await self._exists([name]):
                return
        try:
            async with asyncio.timeout(self._lock_s):
                fields = await self._fields(tenant, session)
                outcome = await self.install(tenant, session, fields, token)
        except TimeoutError:
            metrics.REBUILDS.labels("failed").inc()
            raise rebuilding(f"the rebuild took longer than {self._lock_s} s") from None
        except RollgridError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                metrics.REBUILDS.labels("failed").inc()
            raise
        finally:
            await self._let_go(lock, token)
        metrics.REBUILDS.labels("done" if outcome == "ok" else "overtaken").inc()

    async def install(self, tenant: str, session: str, fields: Fields, token: str = "") -> str:
        """Put a fold into Redis unless one is there: ok, there, or lost (the lock of `token` was)."""
        pairs = [part for pair in fields.items() for part in pair]
        names = [keys.session(tenant, session), keys.session_lock(tenant, session)]
        answer: bytes = await self._install(names, token, keys.SESSION_TTL_S, *pairs)
        return answer.decode()

    async def _let_go(self, lock: str, token: str) -> None:
        try:
            await self._unlock([lock], token)
        except StateError:
            return  # it expires

    async def _fields(self, tenant: str, session: str) -> Fields:
        events = await events_behind(self._bus, tenant, session, 0)
        tree = Tree()
        for seq, event, _ in events:
            tree.apply(seq, event)
        if tree.opened is None:
            raise no_session(session)
        status = None if tree.ended else await self._status(tree.opened)
        jobs = status.open_jobs.get(tree.opened.index, {}) if status else {}
        next_turn = max(tree.next_turn, max(jobs, default=-1) + 1) + LEAP + secrets.randbelow(LEAP)
        fields = new_fields(tree, events, next_turn)
        if status is not None and status.closed_seq:
            fields["closed"] = status.closed_seq
        for turn, seq in jobs.items():
            if turn not in tree.nodes and turn not in tree.lost and (job := await self._job(seq)) is not None:
                fields[f"o:{turn}"] = encoded(_open_turn(job, seq))
        return fields

    async def _status(self, opened: SessionOpened) -> GroupStatus | None:
        group = opened.group_id
        try:
            return (await self._ledger.caught_up(opened.tenant, [group], within_s=LEDGER_S)).get(group)
        except RollgridError as error:
            raise rebuilding(f"which turns are open is not known: {error.message}") from error

    async def _job(self, seq: int) -> SampleGroup | None:
        """The job of an open turn; None when it was let go: then its finish is in the stream."""
        stored = await self._bus.stored(JOBS.name, seq)
        if stored is None or stored.data is None:
            return None
        return codec.decode(await self._bus.resolve(stored.data, stored.headers), SampleGroup)


def _open_turn(job: SampleGroup, seq: int) -> OpenTurn:
    node = job.session.node if job.session is not None else TurnNode()
    return OpenTurn(deadline=job.deadline, branch=node.branch, parent=node.parent, began_at=job.created_at, job_seq=seq)


def new_fields(tree: Tree, events: list[Recorded], next_turn: int) -> Fields:
    """All fields of a fold that is not in Redis yet."""
    assert tree.opened is not None
    last = max((stored_at for _, _, stored_at in events), default=tree.opened.opened_at)
    return {"gen": secrets.token_hex(8), "next": next_turn, "last": last, **fields_of(tree, events)}
