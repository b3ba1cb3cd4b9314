"""Making a session's fold again when Redis has lost it: from the stream, and from the ledger what is still open.

One replica does it, under a lock that a dead holder loses; the others wait a second and then say `episode_rebuilding`.
What Redis alone knew were turns that were begun and not yet stored as jobs: their numbers are leapt over, so that
no number is given twice.
"""

from __future__ import annotations

import asyncio
import secrets
import time

from rollgrid_contracts import keys
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_episodes.tree import Tree
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.state import State, StateError

from . import metrics, session_lua
from .ledger_client import LedgerClient
from .session_episode import ANY_BRANCH, Fields, OpenTurn, encoded, fields_of
from .session_events import Recorded, events_behind

LOOK_AGAIN_S = 0.1
LEDGER_S = 2.0
LEAP = 64
"""At least so many turn numbers are leapt over at a rebuild, and at random as many again."""


class Rebuilder:
    """`lock_s` bounds how long one rebuild may take, `wait_s` how long another request waits for it."""

    def __init__(
        self, state: State, bus: Bus, ledger: LedgerClient, *, lock_s: float, wait_s: float, turn_s: float
    ) -> None:
        self._bus, self._ledger = bus, ledger
        self._lock_s, self._wait_s, self._turn_s = lock_s, wait_s, turn_s
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
            raise RollgridError(ErrorCode.NOT_FOUND, f"there is no session {session}", field="session")
        open_turns = () if tree.ended else await self._open_turns(tenant, tree)
        lowest = max((tree.next_turn, *(turn + 1 for turn in open_turns)))
        fields = new_fields(tree, events, lowest + LEAP + secrets.randbelow(LEAP))
        now = time.time()
        deadline = min(tree.opened.terms.deadline or float("inf"), now + self._turn_s)
        for turn in open_turns:
            if turn not in tree.nodes and turn not in tree.lost:
                fields[f"o:{turn}"] = encoded(OpenTurn(deadline=deadline, branch=ANY_BRANCH, began_at=now))
        return fields

    async def _open_turns(self, tenant: str, tree: Tree) -> tuple[int, ...]:
        assert tree.opened is not None
        group, index = tree.opened.group_id, tree.opened.index
        try:
            status = (await self._ledger.caught_up(tenant, [group], within_s=LEDGER_S)).get(group)
        except RollgridError as error:
            raise rebuilding(f"which turns are open is not known: {error.message}") from error
        return () if status is None else status.open_turns.get(index, ())


def new_fields(tree: Tree, events: list[Recorded], next_turn: int) -> Fields:
    """All fields of a fold that is not in Redis yet."""
    assert tree.opened is not None
    last = max((stored_at for _, _, stored_at in events), default=tree.opened.opened_at)
    return {"gen": secrets.token_hex(8), "next": next_turn, "last": last, **fields_of(tree, events)}


def rebuilding(why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.EPISODE_REBUILDING,
        f"the state of this session is not at hand: {why}",
        boundary=Boundary.STORAGE,
        retry_after_s=1.0,
    )
