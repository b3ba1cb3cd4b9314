"""Ends sessions that nobody uses any more.  Every ingest sweeps; each session is looked at by one of them at a time.

When a session is due is only a hint to look: what counts is its state then, and no turn or fork may have come since.
A sweeper that dies leaves its claims to be due again.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rollgrid_contracts import keys
from rollgrid_contracts.episodes import SessionEnded, SessionOutcome
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import State, StateError

from . import metrics, session_lua
from .session_episode import Episode
from .session_store import SessionStore
from .session_store_ending import ending_of

log = get_logger(__name__)

CLAIM_S = 60.0
CLAIMED = 32
"""Sessions one sweep looks at together."""
IDLE_S = 30.0
"""Where there was no session, Redis is asked so often; whoever opens one here sweeps from then on."""
AGAIN_S = 5.0
"""A session that could not be ended is due again after so long."""


class Expiry:
    """Run `run` as a task."""

    def __init__(
        self, state: State, store: SessionStore, *, every_s: float, clock: Callable[[], float] = time.time
    ) -> None:
        self._store, self._every_s, self._clock = store, every_s, clock
        self._claim = state.script(session_lua.CLAIM)
        self._count = state.script(session_lua.COUNT)
        self._open = 0

    async def run(self) -> None:
        while True:
            if not self._open:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(IDLE_S):
                        await self._store.scheduled.wait()
                self._store.scheduled.clear()
            await asyncio.sleep(self._every_s)
            try:
                while await self.sweep() == CLAIMED:
                    pass
            except StateError as error:
                log.debug("sessions_not_swept", error=error.message)

    async def sweep(self) -> int:
        """Look at sessions that are due; how many.  Raises StateError."""
        now = self._clock()
        due: list[bytes] = await self._claim([keys.session_expiry()], now, now + CLAIM_S, CLAIMED)
        async with asyncio.TaskGroup() as group:
            for member in due:
                tenant, _, session = member.decode().partition(":")
                group.create_task(self._look_at(tenant, session))
        self._open = int(await self._count([keys.session_expiry()]))
        metrics.SESSIONS_OPEN.set(self._open)
        return len(due)

    async def _look_at(self, tenant: str, session: str) -> None:
        try:
            await self._end_if_unused(tenant, session)
        except RollgridError as error:
            if error.code in (ErrorCode.NOT_FOUND, ErrorCode.SESSION_ENDED):
                await self._store.leave(tenant, session)
                return
            log.warning("session_not_expired", session=session, code=error.code.value, error=error.message)
            await self._look_again(tenant, session, self._clock() + AGAIN_S)

    async def _end_if_unused(self, tenant: str, session: str) -> None:
        episode, now = await self._store.read(tenant, session), self._clock()
        if episode.over(now):  # by an event, or with its group: the ledger's deadline ends that without one
            await self._store.leave(tenant, session)
            return
        busy_until = max((turn.deadline for turn in episode.live_turns(now).values()), default=0.0)
        # while a turn is under way: again before it could end and its `ttl_s` after it be over
        again = now + max(episode.terms.ttl_s, self._every_s)
        due = max(episode.expires_at, min(busy_until, episode.until, again))
        if due > now:
            await self._look_again(tenant, session, due)
            return
        await self._store.end(expired(episode, now), idle=episode)
        log.info("session_expired", session=session, turns=len(episode.tree.nodes))

    async def _look_again(self, tenant: str, session: str, at: float) -> None:
        try:
            await self._store.schedule(tenant, session, at)
        except StateError as error:
            log.debug("session_claim_left", session=session, error=error.message)


def expired(episode: Episode, now: float) -> SessionEnded:
    opened = episode.opened
    return ending_of(opened, SessionOutcome.EXPIRED, f"no turn for {opened.terms.ttl_s:g} s", now, opened.traceparent)
