"""What becomes of a job before it is queued: over, not for this worker, or doubtful enough to ask the record.

It knows no queue and settles nothing: it says what is to be done.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable
from enum import StrEnum

from rollgrid_contracts.fleet import CancelWork, WorkerState
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.pulling import Delivery

from .endings import Endings
from .jobs import HeldJob, Outcome, recorded_of
from .ledger import LedgerDesk
from .suspects import Suspects
from .weights import Weights

log = get_logger(__name__)
REMEMBERED = 20_000
"""Groups and turns whose cancelling is remembered."""
LAST_CHANCE = 1.5
"""A job whose version is not here is kept when fewer delays than this are left to its deadline."""
GIVE_UP_S = 0.5
"""So long before its deadline it fails, so that the record says why."""


class Verdict(StrEnum):
    QUEUE = "queue"
    OVER = "over"
    REFUSE = "refuse"
    ASK = "ask"
    """`Triage.ask` knows, after a question to the record."""
    WAIT = "wait"
    """`Triage.ask` knows, but may wait for weights first."""


class Cancels:
    """What is to be cancelled, also of jobs that are not here yet: groups as a whole, turns one by one."""

    def __init__(self) -> None:
        self._groups: OrderedDict[str, None] = OrderedDict()
        self._turns: OrderedDict[str, None] = OrderedDict()

    def note(self, command: CancelWork) -> None:
        _remember(self._groups, command.group_ids)
        _remember(self._turns, command.turns)

    def ends(self, job: SampleGroup) -> bool:
        """Whether the job's group is over: nothing is to be recorded."""
        return job.group_id in self._groups

    def aborts(self, job: SampleGroup) -> bool:
        """Whether the job is a turn that has to end as cancelled."""
        return job.session is not None and job.call_id in self._turns

    def wants(self, job: SampleGroup) -> bool:
        return self.ends(job) or self.aborts(job)


def _remember(known: OrderedDict[str, None], names: Iterable[str]) -> None:
    for name in names:
        known[name] = None
    while len(known) > REMEMBERED:
        known.popitem(last=False)


class Triage:
    """`doubtful(delivery)`: somebody may have worked on it already."""

    def __init__(
        self,
        weights: Weights,
        ledger: LedgerDesk,
        suspects: Suspects,
        endings: Endings,
        workers: Table[WorkerState],
        doubtful: Callable[[Delivery], bool],
        refuse_delay_s: float,
        pool: str,
    ) -> None:
        self._weights, self._ledger, self._suspects, self._endings = weights, ledger, suspects, endings
        self._workers, self._pool = workers, pool
        self._doubtful, self._refuse_delay_s = doubtful, refuse_delay_s
        self.cancels = Cancels()

    def first(self, held: HeldJob) -> Verdict:
        """At once, while the lane is read on."""
        job = held.job
        if self.cancels.ends(job):
            return Verdict.OVER
        if held.seconds_left() <= 0:
            return Verdict.OVER if job.session is None else Verdict.ASK
        if self.cancels.aborts(job):
            held.abort()
            return Verdict.ASK
        held.doubtful = self._doubtful(held.delivery)
        if not self._served(job):
            soon = held.seconds_left() <= LAST_CHANCE * self._refuse_delay_s
            return Verdict.WAIT if soon or self._lost(job) else Verdict.REFUSE
        return Verdict.ASK if held.doubtful else Verdict.QUEUE

    async def ask(self, held: HeldJob) -> Outcome | None:
        """The outcome; None = to be queued."""
        job, given_up, late = held.job, False, held.seconds_left() <= 0
        if not late and not held.aborted and not self._served(job):
            if not self._lost(job):
                await self._last_chance(held)
            elif not held.private and await self._is_elsewhere(job):  # a private lane has one reader
                return Outcome.REFUSE
            given_up = not self._served(job)
        if held.cancelled:
            return None
        status = await self._ledger.status(job.group_id)
        if status is not None:
            done = recorded_of(job, status)
            if done is None:
                return Outcome.ACK
            held.done = done
        if late:
            return await self._endings.expired(held)
        if held.aborted:
            return await self._endings.aborted(held)
        if given_up:
            return await self._endings.unavailable(held)
        if held.refused or (held.suspect and job.session is not None):
            held.starts = await self._starts(job.call_id)
        if held.refused:
            held.suspect = held.starts > 0
        return None

    def _served(self, job: SampleGroup) -> bool:
        """Whether it may be begun here now.  A private lane may hold jobs of a pool that its owner was in before."""
        return job.pool == self._pool and self._weights.met(job)

    def _lost(self, job: SampleGroup) -> bool:
        return job.pool == self._pool and self._weights.lost(job)

    async def _is_elsewhere(self, job: SampleGroup) -> bool:
        """Whether a worker of the pool has the version."""
        try:
            leases = await self._workers.items()
        except BusError as error:
            log.warning("leases_unreadable", error=error.message)
            return True
        return any(
            loaded.version == job.weights.value
            for lease in leases.values()
            if lease.value.pool == job.pool
            for loaded in lease.value.loaded
        )

    async def _last_chance(self, held: HeldJob) -> None:
        """Given back, the job would come again too late: wait here for its version."""
        margin_s = min(GIVE_UP_S, held.seconds_left() / 2)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, held.seconds_left() - margin_s)):
                await self._weights.serves(held.job)

    async def _starts(self, call_id: str) -> int:
        """Recorded starts; one where they cannot be read."""
        try:
            return await self._suspects.starts(call_id)
        except BusError as error:
            log.warning("starts_unreadable", call=call_id, error=error.message)
            return 1
