"""Whose private lanes this worker reads: its own, and those of workers of its pool that are gone.

`rg_lanes` has one claim for each lane, written by compare-and-set, so that one worker holds it.  A worker claims its own
at its start and whenever it finds it taken.  Another's may be taken when its owner takes no work (no lease,
quarantined, given up for good) and its holder is gone too; rendezvous hashing says who tries first, then anybody.  The claim directs
work, it guards nothing: two readers of one durable never get one delivery, and a job's record says what is done.

A lane whose owner stays away is removed once it is empty and no session can be bound to it any more.  Whatever is
published there after all is held by the ledger, found by its subject, and read from a lane made anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.fleet import LaneClaim, WorkerState
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.topology import LANES, WORKER_LEASE_S
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, Conflict, PayloadGone, StorageError
from rollgrid_runtime.kv import Table, Versioned, View
from rollgrid_runtime.leases import Leases
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.rendezvous import ranked

from . import metrics
from .jobs import ANY_JOB

log = get_logger(__name__)
LOOK_EVERY_S = 1.0
TURN_S = 1.0
"""Each next worker of the order waits so much longer before it takes a lane."""
SWEEP_EVERY_S = 30.0
"""Lanes that were removed too early are looked for so often."""


class LaneClaims:
    """Run `run` as a task.  `held` are the lanes to read now; `changed` is called when they are others."""

    def __init__(
        self,
        bus: Bus,
        worker: str,
        incarnation: str,
        pool: str,
        changed: Callable[[], None],
        *,
        kept_s: float,
        sweep_s: float = SWEEP_EVERY_S,
    ) -> None:
        self._bus, self._worker, self._incarnation, self._pool = bus, worker, incarnation, pool
        self._changed, self._kept_s, self._sweep_s = changed, kept_s, sweep_s
        self._table: Table[LaneClaim] = Table(bus, LANES, LaneClaim)
        self._view: View[LaneClaim] = View(bus, self._table, self._look_soon)
        self._leases = Leases(bus, self._look_soon)
        self._seen: dict[str, tuple[int, float]] = {}
        self._vacant: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._swept_at = time.monotonic()
        self._own_again_at = 0.0
        self._leaving = False
        self.held: frozenset[str] = frozenset()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._view.follow())
            group.create_task(self._leases.follow())
            group.create_task(self._decide())

    async def leave(self, *, own: bool) -> None:
        """Take no more lanes and give up those of others, at last the own one too: peers may take them at once."""
        self._leaving = True
        for lane in sorted(self.held):
            if lane != self._worker or own:
                try:
                    await self._give_up(lane)
                except BusError as error:  # they take it when the lease has ended
                    log.warning("lane_not_given_up", lane=lane, error=error.message)

    async def _give_up(self, lane: str) -> None:
        found = await self._table.get(lane)
        if found is not None and self._mine(found.value):
            claim = self._claim(lane, given_up=True)
            with contextlib.suppress(Conflict):  # somebody else has it
                self._view.values[lane] = Versioned(claim, await self._table.update(lane, claim, found.revision))
        self._hold(self.held - {lane})

    # -- deciding -----------------------------------------------------------------------------

    def _look_soon(self) -> None:
        self._wake.set()

    async def _decide(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except (BusError, StorageError) as error:
                log.warning("lanes_not_claimed", error=error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._wake.wait()

    async def _look(self) -> None:
        if not self._view.loaded.is_set():
            return
        if not self._leaving:
            await self._claim_own()
        for lane, found in list(self._view.values.items()):
            if lane == self._worker or found.value.pool != self._pool or self._leaving:
                continue
            if self._mine(found.value):
                await self._remove_if_done(lane, found)
            elif self._is_vacant(lane, found) and time.monotonic() - self._vacant[lane] >= self._turn(lane) * TURN_S:
                await self._take(lane, found.revision)
        self._hold(frozenset(lane for lane, found in self._view.values.items() if self._mine(found.value)))
        if not self._leaving and time.monotonic() - self._swept_at > self._sweep_s:
            self._swept_at = time.monotonic()
            await self._sweep()

    async def _claim_own(self) -> None:
        found, now = self._view.values.get(self._worker), time.monotonic()
        if (found is not None and self._mine(found.value)) or now < self._own_again_at:
            return
        self._own_again_at = now + LOOK_EVERY_S  # two processes under one name must not write without end
        current = await self._table.get(self._worker)
        if current is None or not self._mine(current.value):
            await self._take(self._worker, current.revision if current is not None else 0)

    async def _take(self, lane: str, revision: int) -> None:
        """Compare-and-set on `revision` (0 = there is no claim); whoever lost sees it in the view."""
        claim = self._claim(lane)
        try:
            written = await (self._table.update(lane, claim, revision) if revision else self._table.create(lane, claim))
        except Conflict:
            return
        log.info("lane_claimed", lane=lane)
        self._view.values[lane] = Versioned(claim, written)

    def _is_vacant(self, lane: str, found: Versioned[LaneClaim]) -> bool:
        """Whether nobody reads the lane.  A claim just written stands for a lease's time, whatever is known of its holder."""
        claim, now = found.value, time.monotonic()
        revision, since = self._seen.get(lane, (0, now))
        if revision != found.revision:
            since = now
        self._seen[lane] = (found.revision, since)
        fresh = bool(claim.holder) and now - since < WORKER_LEASE_S
        if fresh or not self._leases.loaded.is_set() or self._takes_work(claim) or self._reads(claim):
            self._vacant.pop(lane, None)
            return False
        self._vacant.setdefault(lane, now)
        return True

    def _takes_work(self, claim: LaneClaim) -> bool:
        """Whether the owner itself has the lane, or will claim it."""
        state = self._leases.alive.get(claim.lane)
        if state is None:  # who gave it up need not be waited for
            return bool(claim.holder) and not self._leases.gone(claim.lane)
        return _fit(state) and state.pool == self._pool

    def _reads(self, claim: LaneClaim) -> bool:
        """Whether the holder is there, and the process that made the claim."""
        if not claim.holder:
            return False
        state = self._leases.alive.get(claim.holder)
        if state is None:
            return not self._leases.gone(claim.holder)
        return state.incarnation == claim.incarnation and state.quarantined is None

    def _turn(self, lane: str) -> int:
        """This worker's place among those that might take the lane."""
        peers = {name: one.slots for name, one in self._leases.alive.items() if one.pool == self._pool and _fit(one)}
        return ranked(lane, {**peers, self._worker: peers.get(self._worker, 1)}).index(self._worker)

    def _mine(self, claim: LaneClaim) -> bool:
        return (claim.holder, claim.incarnation) == (self._worker, self._incarnation)

    def _claim(self, lane: str, *, given_up: bool = False) -> LaneClaim:
        return LaneClaim(
            lane=lane,
            holder="" if given_up else self._worker,
            incarnation="" if given_up else self._incarnation,
            claimed_at=time.time(),
            pool=self._pool,
        )

    def _hold(self, lanes: frozenset[str]) -> None:
        metrics.LANES_OF_OTHERS.set(len(lanes - {self._worker}))
        if lanes != self.held:
            self.held = lanes
            self._changed()

    # -- removing -----------------------------------------------------------------------------

    async def _remove_if_done(self, lane: str, found: Versioned[LaneClaim]) -> None:
        """A lane held here for so long that no binding to its owner is left, and of which nobody holds a job, the
        ledger neither."""
        if time.time() - found.value.claimed_at < self._kept_s or not self._leases.gone(lane):
            return
        if await self._bus.subjects(topology.JOBS.name, subjects.jobs_worker(lane)):
            return
        consumer = topology.lane_consumer(lane)
        await self._bus.delete_consumer(consumer.stream, consumer.durable)
        await self._table.remove(lane, found.revision)
        self._view.values.pop(lane, None)
        self._seen.pop(lane, None)
        log.info("lane_removed", lane=lane)

    async def _sweep(self) -> None:
        """Jobs on a lane that is no more: its sender looked before it went and published after."""
        prefix = subjects.jobs_worker("")
        waiting = await self._bus.subjects(topology.JOBS.name, subjects.jobs_worker("*"))
        known = set(await self._bus.consumer_names(topology.JOBS.name))
        for subject in waiting:
            lane = subject.removeprefix(prefix)
            if topology.lane_consumer(lane).durable not in known and await self._pool_of(subject) == self._pool:
                claimed = await self._table.get(lane)
                if claimed is None:
                    log.warning("lane_made_again", lane=lane, jobs=waiting[subject])
                    await self._take(lane, 0)

    async def _pool_of(self, subject: str) -> str | None:
        stored = await self._bus.last_stored(topology.JOBS.name, subject)
        if stored is None or stored.data is None:
            return None
        try:
            job = await self._bus.decoded(stored.data, stored.headers, ANY_JOB)
        except (PayloadGone, msgspec.DecodeError, RecursionError) as error:
            log.warning("lane_job_unreadable", subject=subject, error=repr(error))
            return None
        return job.pool if isinstance(job, SampleGroup) else None


def _fit(worker: WorkerState) -> bool:
    return not worker.draining and worker.quarantined is None
