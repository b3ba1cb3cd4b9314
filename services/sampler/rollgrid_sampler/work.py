"""What a sampler has in hand: deliveries in, triage, whose turn it is, slots, and the answer to the queue.

A job is held from its delivery until it is acked, refused or returned; its samples start one by one
as slots come free, tenants and priorities in fair turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from functools import partial
from typing import Any

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import CancelWork
from rollgrid_contracts.jobs import Priority, SampleGroup, VersionRule
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.errors import BusError, PayloadGone, StorageError
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.pulling import Delivery

from . import metrics, traces
from .fair import WEIGHTS, FairQueue
from .handler import Handler
from .jobs import ANY_JOB, HeldJob, Outcome
from .lanes import Lane
from .settings import SamplerSettings
from .slots import Slots
from .triage import Triage, Verdict

log = get_logger(__name__)
REMEMBERED = 20_000
"""Refused jobs remembered."""
PRIVATE_AHEAD = 4
"""Jobs of private lanes in hand, as a multiple of the slots: nobody else would have them, and the fair queue sees more tenants."""
LOOK_S = 0.5


class Work:
    """The jobs in hand.  `failed` is told what ended one otherwise than with an outcome.

    `handler` and `verdicts` are asked for when they are needed: they are made from this.
    """

    def __init__(
        self,
        settings: SamplerSettings,
        worker: str,
        handler: Callable[[], Handler],
        verdicts: Callable[[], Triage],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._settings, self._worker = settings, worker
        self._handler, self._verdicts, self._failed = handler, verdicts, failed
        self.slots = Slots(settings.places, settings.express_places)
        self.draining = False
        """Only the own lane's jobs are begun still."""
        self.closing = False
        """None are."""
        self._queue: FairQueue[PoolLane, HeldJob] = FairQueue()
        self._held: dict[int, HeldJob] = {}
        self._asking: dict[int, HeldJob] = {}
        self._beside: set[asyncio.Task[None]] = set()
        self._refusals: OrderedDict[int, int] = OrderedDict()
        self._room = asyncio.Event()
        self._idle = asyncio.Event()
        self._mean_cost = 8.0

    def held(self) -> Collection[HeldJob]:
        return self._held.values()

    @property
    def queued(self) -> int:
        return len(self._queue)

    @property
    def waiting(self) -> int:
        """Samples that wait for a slot."""
        return self._queue.cost

    # -- deliveries in ------------------------------------------------------------------------

    def private_allowance(self) -> int:
        """Jobs the own lane may ask for now."""
        held = sum(one.private for one in self._held.values())
        return 0 if self.closing else max(0, PRIVATE_AHEAD * self.slots.total - held)

    def allowance(self, lane: Lane, lanes: int) -> int:
        """Jobs one of `lanes` may ask for now: its share of the free slots, and a small prefetch."""
        if self.draining:
            return 0
        depth = self._depth(lane) if isinstance(lane, PoolLane) else self._waiting_of(lane)
        free = max(0.0, self.slots.free - self._queue.cost) / self._mean_cost
        share = free / max(1, lanes)
        return max(0, int(share) + self._settings.prefetch - depth) or (
            1 if self.slots.free > self._queue.cost and not depth else 0
        )

    def _depth(self, lane: PoolLane) -> int:
        """Jobs of the lane that wait here, those the record is asked about too: a slow answer must not gather a backlog."""
        return self._queue.depth(lane) + sum(held.lane == lane for held in self._asking.values())

    def _waiting_of(self, worker: str) -> int:
        """Jobs of another worker's lane that wait here."""
        subject = subjects.jobs_worker(worker)
        return sum(one.task is None and one.delivery.subject == subject for one in self._held.values())

    async def wait_for_room(self) -> None:
        """Until there may be room for more, or a moment has passed."""
        self._room.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._room.wait()

    def look(self) -> None:
        """There may be room for more."""
        self._room.set()

    async def take(self, lane: Lane, delivery: Delivery) -> None:
        """A delivery from the lane's reader: hold it, and triage it beside the reading."""
        known = self._held.get(delivery.sequence)
        if known is not None:  # came back to us while we work on it: the newer delivery is the one to ack
            known.delivery = delivery
            return
        try:
            job = await delivery.message(ANY_JOB)
        except PayloadGone as error:
            log.error("job_payload_gone", sequence=delivery.sequence, error=error.message)
            await self._settle(delivery, Outcome.ACK)
            return
        except StorageError as error:
            log.warning("job_unreadable_now", sequence=delivery.sequence, error=error.message)
            await self._settle(delivery, Outcome.REFUSE)
            return
        except (msgspec.DecodeError, RecursionError) as error:
            log.error("job_undecodable", sequence=delivery.sequence, error=repr(error))
            await self._settle(delivery, Outcome.ACK)
            return
        if not isinstance(job, SampleGroup):
            await self._settle(delivery, Outcome.ACK)
            return
        refused = self._refusals.get(delivery.sequence, 0)
        begun = delivery.delivered - 1 - refused > 0
        held = HeldJob(delivery, job, _share_of(job, lane), suspect=begun, private=isinstance(lane, str))
        if begun and (job.weights.rule is not VersionRule.LATEST or job.pinned):
            held.suspect, held.refused = False, True  # others may have given it back as often as that
        self._held[held.sequence] = held
        metrics.delivered(held)
        traces.begin(held, self._worker)
        with bound(**held.ids):
            await self._triage_or_queue(held)

    async def _triage_or_queue(self, held: HeldJob) -> None:
        self._mean_cost += (max(1, len(held.job.indexes)) - self._mean_cost) / 16
        match self._verdicts().first(held):
            case Verdict.OVER:
                await self._end(held, Outcome.ACK)
            case Verdict.REFUSE:
                await self._end(held, Outcome.REFUSE)
            case Verdict.ASK:
                self._asking[held.sequence] = held
                self._run_beside(self._ask(held))
            case Verdict.WAIT:
                self._run_beside(self._ask(held))
            case Verdict.QUEUE:
                self._enqueue(held)

    def _run_beside(self, step: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(step)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _ask(self, held: HeldJob) -> None:
        try:
            outcome = await self._verdicts().ask(held)
        finally:
            self._asking.pop(held.sequence, None)
        if held.cancelled or self._held.get(held.sequence) is not held:
            return
        if outcome is None:
            self._enqueue(held)
        else:
            await self._end(held, outcome)

    def _enqueue(self, held: HeldJob) -> None:
        if held.cancelled or self._begins_no(held) or self._held.get(held.sequence) is not held:
            return
        self._queue.push(held.lane, held, max(1, len(held.missing)), WEIGHTS[held.lane.priority])
        self._room.set()

    def _begins_no(self, held: HeldJob) -> bool:
        return self.closing or (self.draining and not held.private)

    # -- work ---------------------------------------------------------------------------------

    def fill(self) -> None:
        """Start the samples whose turn it is, as many as there is room for."""
        while (held := self._next()) is not None:
            if held.task is None:
                self.slots.admit(held.sequence, held.job.tenant, alone=held.alone)
                held.span.event("dispatched", time.time())
                held.task = asyncio.create_task(self._handler().handle(held), name=held.job.group_id)
                held.task.add_done_callback(partial(self._worked, held))
            self.slots.start(held.sequence)
            held.seats.release()

    def _next(self) -> HeldJob | None:
        """The job whose next sample may start.  A suspect in turn waits until nothing else is in hand."""
        first = self._queue.peek()
        if first is not None and first.task is None and first.alone and not self.slots.admissible(alone=True):
            return self._queue.take(lambda held: held.task is not None and self._may_start(held))
        return self._queue.take(self._may_start)

    def _may_start(self, held: HeldJob) -> bool:
        if held.task is None and (self._begins_no(held) or not self.slots.admissible(alone=held.alone)):
            return False
        return self.slots.room(held.job.tenant, hurried=held.lane.priority is Priority.INTERACTIVE)

    def free_seat(self, held: HeldJob) -> None:
        self.slots.release(held.sequence)
        self.fill()
        self._room.set()

    def _worked(self, held: HeldJob, task: asyncio.Task[Outcome]) -> None:
        self._queue.remove(lambda waiting: waiting is held)
        self.slots.leave(held.sequence)
        self.fill()
        self._room.set()
        if task.cancelled():
            return  # draining: handed back by whoever cancelled it
        error = task.exception()
        if error is not None:
            self._failed(error)
        else:
            self._run_beside(self._end(held, task.result()))

    async def _end(self, held: HeldJob, outcome: Outcome) -> None:
        self._held.pop(held.sequence, None)
        held.span.set(outcome=outcome.value)
        held.span.end()
        if outcome is Outcome.REFUSE:
            metrics.REFUSALS.inc()
            self._refusals[held.sequence] = self._refusals.get(held.sequence, 0) + 1
            while len(self._refusals) > REMEMBERED:
                self._refusals.popitem(last=False)
        else:
            self._refusals.pop(held.sequence, None)
        with bound(**held.ids):
            await self._settle(held.delivery, outcome)
            log.debug("job_settled", outcome=outcome.value, attempt=held.attempt)
        if not self._held:
            self._idle.set()
        self._room.set()

    async def _settle(self, delivery: Delivery, outcome: Outcome) -> None:
        try:
            if outcome is Outcome.ACK:
                await delivery.ack()
            else:
                await delivery.nak(self._settings.refuse_delay_s if outcome is Outcome.REFUSE else 0.0)
        except BusError as error:  # it comes again after the ack-wait, and the record tells what is done
            log.warning("delivery_not_settled", sequence=delivery.sequence, outcome=outcome.value, error=error.message)

    # -- handing back -------------------------------------------------------------------------

    async def cancel(self, command: CancelWork) -> None:
        """End or abort what the caller, or whoever has the answer, no longer wants."""
        cancels = self._verdicts().cancels
        cancels.note(command)
        for held in self._queue.remove(lambda held: held.task is None and cancels.wants(held.job)):
            if not cancels.ends(held.job):
                held.abort()
                self._run_beside(self._ask(held))
        for held in list(self._held.values()):
            if cancels.ends(held.job) and not held.cancelled:
                held.cancel()
                if held.task is None:
                    await self._end(held, Outcome.ACK)
            elif cancels.aborts(held.job):
                held.abort()

    def private_waits(self) -> bool:
        """Jobs of private lanes are in hand that have not begun."""
        return any(held.private and held.task is None for held in self._held.values())

    async def return_unstarted(self, *, private: bool) -> None:
        self._queue.remove(lambda held: held.task is None and held.private is private)
        for held in [h for h in self._held.values() if h.task is None and h.private is private]:
            await self._end(held, Outcome.RETURN)

    async def ended(self) -> None:
        """Nothing is in hand any more."""
        while self._held:
            self._idle.clear()
            await self._idle.wait()

    async def hand_back(self) -> None:
        """Stop all of it; whatever is still held goes back at once for others to take."""
        working = [held.task for held in self._held.values() if held.task is not None]
        await cancelled([*working, *self._beside])
        for held in list(self._held.values()):
            await self._end(held, Outcome.RETURN)


def _share_of(job: SampleGroup, lane: Lane) -> PoolLane:
    """Whose turn it uses: what comes by a private lane counts to its tenant's share as what comes by the pool's."""
    if isinstance(lane, PoolLane):
        return lane
    return PoolLane(job.pool, Priority.INTERACTIVE if job.session is not None else job.priority, job.tenant)


async def cancelled(tasks: list[asyncio.Task[Any]]) -> None:
    """Cancel them and wait until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
