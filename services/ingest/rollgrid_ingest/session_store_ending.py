"""Ending a session, durably and once; and finding that its group has ended without it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from rollgrid_contracts import keys, subjects
from rollgrid_contracts.episodes import SessionEnded, SessionOpened, SessionOutcome
from rollgrid_contracts.scoring import ScorerKind, next_todo
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import StateError

from . import metrics
from .ledger_client import LedgerClient
from .session_episode import Episode
from .session_reading import ATTEMPTS, Episodes
from .session_refusals import busy, has_ended, rebuilding, same_end, state_at_hand

log = get_logger(__name__)


class Endings:
    """An end is announced in Redis first, so that no turn begins beside it; what is announced and not stored passes."""

    def __init__(
        self,
        episodes: Episodes,
        bus: Bus,
        ledger: LedgerClient,
        publish_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._episodes, self._bus, self._ledger, self._publish_s, self._clock = episodes, bus, ledger, publish_s, clock

    async def end(self, ended: SessionEnded, *, idle: Episode | None = None) -> SessionEnded:
        """See `SessionStore.end`."""
        tenant, session = ended.tenant, ended.session
        first = await self.announce(ended, idle)
        if first is not None:
            return same_end(first, ended)
        try:
            ack = await self._bus.publish(
                subjects.samples(todo_of(ended), tenant, session),
                ended,
                msg_id=f"{session}.ended",
                timeout_s=self._publish_s,
            )
        except RollgridError:
            with contextlib.suppress(StateError):
                await self._episodes.run("CANCEL_END", keys.session(tenant, session))
            raise
        if not ack.duplicate:
            metrics.SESSIONS.labels(ended.outcome.value).inc()
        return same_end((await self._episodes.read(tenant, session, at_least=ack.sequence)).ended, ended)

    async def announce(self, ended: SessionEnded, idle: Episode | None) -> SessionEnded | None:
        """No turn begins from here on; how it has ended if it has."""
        tenant, session = ended.tenant, ended.session
        how, last = ("any", "") if idle is None else ("idle", repr(idle.last_active))
        for _ in range(ATTEMPTS):
            episode = await self._episodes.read(tenant, session)
            if episode.ended is not None:
                return episode.ended
            if episode.over(self._clock()):
                raise has_ended(session)
            with state_at_hand():
                answer = await self._episodes.run("BEGIN_END", keys.session(tenant, session), self._clock(), how, last)
            if answer[0] == b"ok":
                return None
            if answer[0] in (b"busy", b"moved"):
                raise busy(session, "a turn is under way, or something has happened since it was looked at")
        raise rebuilding("it is lost faster than it can be ended")

    async def group_closed(self, episode: Episode) -> bool:
        """See `SessionStore.group_closed`."""
        opened = episode.opened
        if episode.closed:
            return True
        try:
            status = (await self._ledger.groups(opened.tenant, [opened.group_id])).get(opened.group_id)
            if status is None or not status.closed_seq:
                return False
            await self._episodes.run("CLOSED", keys.session(opened.tenant, opened.session), status.closed_seq)
        except StateError:
            return True
        except RollgridError as error:
            log.debug("close_unknown", session=opened.session, error=error.message)
            return False
        await self._episodes.leave(opened.tenant, opened.session)
        return True


def ending_of(
    opened: SessionOpened, outcome: SessionOutcome, detail: str | None, at: float, traceparent: str | None
) -> SessionEnded:
    """The end of a session, with nothing said but how it ended."""
    return SessionEnded(
        tenant=opened.tenant,
        run=opened.run,
        group_id=opened.group_id,
        index=opened.index,
        session=opened.session,
        outcome=outcome,
        detail=detail,
        ended_at=at,
        job_seq=opened.job_seq,
        traceparent=traceparent,
    )


def todo_of(ended: SessionEnded) -> ScorerKind:
    scored = ended.outcome is SessionOutcome.CLOSED and ended.leaf is not None
    return next_todo(ended.scorers) if scored else ScorerKind.DONE
