"""What the active ledger does on the side: purge RG_SAMPLES, compare its books with the stream's."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque

from rollgrid_contracts import subjects
from rollgrid_contracts.ids import NO_SESSION
from rollgrid_contracts.topology import JOBS, SAMPLES, ledger_consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from . import metrics
from .closed_index import KEEP_S
from .handler import LedgerHandler
from .held_jobs import HeldJobs
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
FULL_SHARE = 0.5
"""Share of RG_SAMPLES' bound above which neither the grace nor a sleeping scorer holds back the purge."""

SESSIONS_PER_PURGE = 500
CHECKS_BEFORE_ALARM = 2
SAMPLES_PER_CHECK = 5
SAMPLE_S = 0.2


class Upkeep:
    def __init__(
        self, bus: Bus, settings: TrajectoryLoggerSettings, epoch: int, handler: LedgerHandler, jobs: HeldJobs
    ) -> None:
        self._bus, self._settings, self._epoch = bus, settings, epoch
        self._handler, self._jobs = handler, jobs
        self._marks: deque[tuple[float, int]] = deque()
        self._reported: Counter[str] = Counter()
        self._suspicious = 0
        self.alarm: str | None = None
        """What does not add up between the open groups and RG_JOBS, if it lasts."""

    async def purge(self) -> None:
        """Drop events no open group needs, every `purge_every_s`, when it is worth a purge."""
        while True:
            await asyncio.sleep(self._settings.purge_every_s)
            try:
                await self.purge_once(time.monotonic())
            except BusError as error:
                log.warning("purge_failed", stream=SAMPLES.name, error=error.message)

    async def purge_once(self, now: float) -> None:
        ledger = self._handler.ledger
        info = await self._bus.stream_info(SAMPLES.name)
        state = info.state
        self._marks.append((now, int(state.last_seq)))
        floor, bound = ledger.settled_to() + 1, info.config.max_bytes or 0
        if not bound or state.bytes < FULL_SHARE * bound:
            floor = min(floor, self._graced(now), await self._scorers_floor())
        need = ledger.need()
        if bound and need < floor and state.bytes > self._settings.purge_between_share * bound:
            await self._purge_between(floor, int(state.messages))
        below, first, stored = min(need, floor), int(state.first_seq), int(state.messages)
        if below <= first or not stored:
            return
        share = min(1.0, (below - first) / (int(state.last_seq) - first + 1))
        if share * state.bytes < self._settings.purge_min_bytes:
            return
        await self._bus.purge_below(SAMPLES.name, below)
        left = int((await self._bus.stream_info(SAMPLES.name)).state.messages)
        metrics.PURGED.labels(SAMPLES.name).inc(max(0, stored - left))

    async def _purge_between(self, floor: int, stored: int) -> None:
        """Drop what is behind the events of open sessions: these may be needed for hours, what else came since is not."""
        ledger = self._handler.ledger
        plain = subjects.samples_of("*", NO_SESSION)
        await self._bus.purge_below(SAMPLES.name, min(ledger.plain_need(), floor), plain)
        ended = ledger.sessions_closed
        for _ in range(SESSIONS_PER_PURGE):
            if not ended or ended[0][0] >= floor:
                break
            await self._bus.purge_below(SAMPLES.name, floor, ended[0][1])
            ended.popleft()
        left = int((await self._bus.stream_info(SAMPLES.name)).state.messages)
        metrics.PURGED.labels(SAMPLES.name).inc(max(0, stored - left))

    def _graced(self, now: float) -> int:
        """Behind the last sequence that was stored a grace ago: samplers may still read recent winners back."""
        while len(self._marks) > 1 and self._marks[1][0] <= now - self._settings.purge_grace_s:
            self._marks.popleft()
        at, sequence = self._marks[0]
        return sequence + 1 if at <= now - self._settings.purge_grace_s else 0

    async def _scorers_floor(self) -> int:
        """Behind what every scorer has acknowledged."""
        floor = 1 << 63
        for name in await self._bus.consumer_names(SAMPLES.name):
            if not name.startswith("scorer-"):
                continue
            info = await self._bus.consumer_info(SAMPLES.name, name)
            if info is not None and (info.num_pending or info.num_ack_pending) and info.ack_floor is not None:
                floor = min(floor, int(info.ack_floor.stream_seq) + 1)
        return floor

    async def watch(self) -> None:
        """Every `watch_every_s`, compare the open groups with the stream's count and alarm when they differ."""
        while True:
            await asyncio.sleep(self._settings.watch_every_s)
            early = self._handler.ledger.index.forget(time.time() - KEEP_S, self._settings.closed_kept)
            if early:
                log.warning("closes_forgotten_early", count=early, kept=self._settings.closed_kept)
            try:
                await self.watch_once()
            except BusError as error:
                log.warning("watch_failed", error=error.message)

    async def watch_once(self) -> None:
        """A lasting difference is an alarm: a group without its job would not survive us; a job without a group never ends."""
        ledger = self._handler.ledger
        read_before = self._handler.jobs_read
        gaps = []
        for _ in range(SAMPLES_PER_CHECK):
            gap = await self._gap()
            if gap is None:
                return
            gaps.append(gap)
            await asyncio.sleep(SAMPLE_S)
        # while jobs come and go a few are always between us and the server
        slack = (self._handler.jobs_read - read_before) // 4
        apart = min(map(abs, gaps)) if min(gaps) > 0 or max(gaps) < 0 else 0
        metrics.JOBS_MISMATCH.set(apart)
        metrics.DOUBLE_CLOSES.set(ledger.double_closes)
        self._suspicious = self._suspicious + 1 if apart > slack else 0
        self.alarm = None
        if self._suspicious >= CHECKS_BEFORE_ALARM:
            self.alarm = f"open groups hold {apart} jobs more or fewer than the stream holds for the ledger"
        if ledger.double_closes:
            self.alarm = f"{ledger.double_closes} groups were found closed twice"
        if self.alarm is not None:
            log.error("books_differ", gaps=gaps, held=ledger.held(), alarm=self.alarm)

    async def _gap(self) -> int | None:
        """Jobs held by open groups less those the server has out to the ledger and unacknowledged."""
        info = await self._bus.consumer_info(JOBS.name, ledger_consumer(self._epoch).durable)
        if info is None:
            return None
        held = self._handler.ledger.held() + self._handler.unreadable_jobs + self._jobs.letting_go
        return held - int(info.num_ack_pending or 0)

    def report(self) -> None:
        """Bring the metrics up to the fold."""
        ledger = self._handler.ledger
        metrics.EPOCH.set(ledger.epoch)
        metrics.OPEN_GROUPS.set(len(ledger.open))
        for why, count in ledger.superseded.items():
            if count > self._reported[why]:
                metrics.SUPERSEDED.labels(why).inc(count - self._reported[why])
                self._reported[why] = count
