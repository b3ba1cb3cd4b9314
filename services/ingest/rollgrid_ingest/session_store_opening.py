"""Opening a session: its group's job, then its first event, then its fold; again, and it is the same session."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from rollgrid_contracts import keys, subjects
from rollgrid_contracts.episodes import SessionOpened
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OpenEpisode
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.topology import JOBS
from rollgrid_episodes.tree import Tree
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError

from . import metrics
from .ledger_client import LedgerClient
from .session_events import Recorded, events_behind
from .session_reading import Episodes
from .session_rebuild import new_fields
from .session_refusals import has_ended, same_group, same_opened, state_at_hand
from .settings import IngestSettings


class Openings:
    def __init__(
        self,
        episodes: Episodes,
        bus: Bus,
        ledger: LedgerClient,
        settings: IngestSettings,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._episodes, self._bus, self._ledger, self._settings, self._clock = episodes, bus, ledger, settings, clock

    async def open(self, opened: SessionOpened, episode: OpenEpisode, *, fresh: bool = False) -> SessionOpened:
        """Open the session of a group's sample, or find it open already: what it was opened with, first in the stream.

        Raises idempotency_conflict (opened with other terms, or its group with another `n`), session_ended (its group is closed), session_limit,
        QueueFull, BusError, episode_rebuilding.
        """
        tenant, session = opened.tenant, opened.session
        first = None if fresh else await self._first_opened(tenant, session)
        if first is not None:
            return same_opened(first, opened)
        if not fresh:
            await self._refuse_by_ledger(opened)
        await self._admit(opened)
        try:
            job = await self._bus.publish(
                subjects.jobs_episode(tenant),
                episode,
                msg_id=opened.group_id,
                timeout_s=self._settings.publish_timeout_s,
            )
            if job.duplicate:
                await self._refuse_other_group(opened, job.sequence)
            event = msgspec.structs.replace(opened, job_seq=job.sequence)
            ack = await self._bus.publish(
                subjects.samples(ScorerKind.DONE, tenant, session),
                event,
                msg_id=f"{session}.opened",
                timeout_s=self._settings.publish_timeout_s,
            )
        except RollgridError:
            await self._episodes.leave(tenant, session)
            raise
        if ack.duplicate:
            return same_opened((await self._episodes.read(tenant, session, at_least=ack.sequence)).opened, opened)
        metrics.SESSIONS.labels("opened").inc()
        with state_at_hand():
            await self._keep_opened(event, ack.sequence)
        return event

    async def _first_opened(self, tenant: str, session: str) -> SessionOpened | None:
        with state_at_hand():
            episode = await self._episodes.load(tenant, session)
        if episode is not None:
            return episode.opened
        events = await events_behind(self._bus, tenant, session, 0, limit=1)
        return next((event for _, event, _ in events if isinstance(event, SessionOpened)), None)

    async def _refuse_by_ledger(self, opened: SessionOpened) -> None:
        status = (await self._ledger.groups(opened.tenant, [opened.group_id])).get(opened.group_id)
        if status is None:
            return
        if status.closed_seq or opened.index in status.ended:
            raise has_ended(opened.session)
        same_group(status.n, opened)

    async def _refuse_other_group(self, opened: SessionOpened, job_seq: int) -> None:
        """The group's first job, which the ledger may not have come to: a session beyond its `n` would be in no record."""
        stored = await self._bus.stored(JOBS.name, job_seq)
        if stored is None or stored.data is None:
            return
        same_group((await self._bus.decoded(stored.data, stored.headers, OpenEpisode)).n, opened)

    async def _admit(self, opened: SessionOpened) -> None:
        cap, now = self._settings.max_open_sessions, self._clock()
        forget_at = opened.terms.deadline or now + keys.SESSION_TTL_S
        with state_at_hand():
            full = await self._episodes.run(
                "ADMIT", keys.open_sessions(opened.tenant), opened.session, now, forget_at, cap
            )
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
        await self._episodes.rebuilder.install(opened.tenant, opened.session, fields)
        await self._episodes.schedule(opened.tenant, opened.session, self._clock() + opened.terms.ttl_s)
