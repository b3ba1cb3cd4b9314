"""Keeps runs within their pace: a submission beyond the capacity of its run waits, then is asked to come again.

The count of a run lies in KV `rg_runs` and is only ever changed by compare-and-set, so any number of
ingest processes keep one bound; runs without a pace cost nothing.  Nothing that was admitted is ever thrown
away.  Submissions of one run are admitted in the order in which they came to this process.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.fleet import RunPace
from rollgrid_contracts.jobs import WeightConstraint
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.topology import RUNS, TRAJECTORIES, Header
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, Conflict, RollgridError
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import Tail

from . import capacity, metrics
from .catalog import Catalog
from .ledger_client import LedgerClient
from .submission import Pace, Submission
from .wire import invalid

log = get_logger(__name__)
PATIENCE_S = 20.0
"""How long a call is held back, below the idle timeout of common proxies; a client asks again by itself."""

LOOK_S = 2.0
"""A waiting submission looks again after so long even if nothing was told it."""

TURN_S = 5.0
"""Who was asked to come again keeps its place in the line for so long; clients come within two seconds."""

UNSETTLED_S = 30.0
"""Longer than any publish takes: a batch counted so long ago is jobs by now, or never will be."""

WRITES = 8
NO_SUCCESS = f"{SampleStatus.SUCCEEDED.value}=0"
"""In the header that counts the entries of a close."""

STORED_REMEMBERED = 1024


class Short(NamedTuple):
    """The run has no capacity for the submission yet."""

    pace: RunPace
    groups: int


class Losses:
    """Groups of a run that closed without one success, as their closes are stored."""

    def __init__(self) -> None:
        self._lost: list[int] = []
        self.cursor = 0
        self.tail: Tail | None = None

    def on_close(self, headers: Mapping[str, str]) -> None:
        sequence = self.tail.sequence if self.tail is not None else 0
        if sequence <= self.cursor:
            return
        self.cursor = sequence
        admitted = bool(headers.get(Header.JOB_SEQUENCES.value))  # a refused submission never was
        if admitted and NO_SUCCESS in headers.get(Header.COUNTS.value, "").split(","):
            self._lost.append(sequence)

    def behind(self, cursor: int) -> int:
        return sum(sequence > cursor for sequence in self._lost)


class Pacing:
    def __init__(self, bus: Bus, ledger: LedgerClient, catalog: Catalog) -> None:
        self._bus, self._ledger, self._catalog = bus, ledger, catalog
        self._table: Table[RunPace] = Table(bus, RUNS, RunPace)
        self._lines: dict[str, OrderedDict[str, float]] = {}
        self._stored: OrderedDict[str, None] = OrderedDict()
        self.stopping = asyncio.Event()

    async def admit(
        self, submission: Submission, positions: Sequence[int], cursor: int, patience_s: float, deadline: float
    ) -> WeightConstraint:
        """Count the groups at `positions`, waiting up to `patience_s` for capacity; the constraint their jobs carry.

        Behind `deadline` (UNIX seconds) nobody comes again.  Raises paced, limit_exceeded, invalid_request, BusError.
        """
        pace = submission.pace
        if pace is None or not positions:
            return submission.weights
        try:
            return await self._admit(submission, pace, positions, cursor, min(patience_s, deadline - time.time()))
        except RollgridError as error:
            if error.code is not ErrorCode.PACED or time.time() >= deadline:
                self._leave(f"{submission.tenant}.{submission.run}", submission.batch_id)
            raise

    async def _admit(
        self, submission: Submission, pace: Pace, positions: Sequence[int], cursor: int, patience_s: float
    ) -> WeightConstraint:
        give_up = time.monotonic() + patience_s
        losses, moved = Losses(), self._catalog.moved
        found = await self._attempt(submission, pace, positions, cursor, losses)
        if isinstance(found, WeightConstraint):
            return found
        metrics.PACED.inc()
        with metrics.PACE_WAITING.track_inprogress():
            subject = subjects.trajectories(submission.tenant, submission.run)
            losses.cursor = found.pace.cursor
            async with Tail(
                self._bus, TRAJECTORIES.name, subject, losses.on_close, after=found.pace.cursor
            ) as losses.tail:
                while True:
                    left = min(LOOK_S, give_up - time.monotonic())
                    if left <= 0 or self.stopping.is_set():
                        raise _come_again(submission, found)
                    await self._until_moved(losses.tail, moved, left)
                    moved = self._catalog.moved
                    found = await self._attempt(submission, pace, positions, cursor, losses)
                    if isinstance(found, WeightConstraint):
                        return found

    def stored(self, batch_id: str) -> None:
        """The batch's jobs are in RG_JOBS: nobody need ask the ledger."""
        self._stored[batch_id] = None
        while len(self._stored) > STORED_REMEMBERED:
            self._stored.popitem(last=False)

    # -- one attempt ------------------------------------------------------------------------------

    async def _attempt(
        self, submission: Submission, pace: Pace, positions: Sequence[int], cursor: int, losses: Losses
    ) -> WeightConstraint | Short:
        batch_id, run = submission.batch_id, f"{submission.tenant}.{submission.run}"
        first = self._is_first(run, batch_id)
        for _ in range(WRITES):
            entry = await self._table.get(run)
            now = time.time()
            state = self._state(submission)
            counted = self._counted(entry, submission, pace, state, cursor, losses, now)
            groups = capacity.owed(counted, batch_id, len(submission.groups), len(positions))
            if groups > capacity.largest(counted):
                raise _never_fits(groups, counted)
            settled = counted
            if not first or groups > capacity.room(counted):
                settled = await self._settled(counted, submission, now)
            fits = first and groups <= capacity.room(settled)
            after = capacity.admit(settled, batch_id, groups, now) if fits and groups else settled
            try:
                if after != counted:
                    await self._write(run, entry, after)
            except Conflict:
                continue
            if groups and not fits:
                return Short(after, groups)
            self._leave(run, batch_id)
            return capacity.constrained(submission.weights, capacity.floor(after, state, now))
        raise BusError(f"{RUNS.name}/{run}: other writers were first {WRITES} times")

    def _counted(
        self,
        entry: Versioned[RunPace] | None,
        submission: Submission,
        pace: Pace,
        state: PolicyState,
        cursor: int,
        losses: Losses,
        now: float,
    ) -> RunPace:
        """The run's pace as of now: what the submission says of it, versions, losses, batches known to be stored."""
        if entry is None:
            version = capacity.in_force(state, now)
            return capacity.begun(state.policy, pace.batch, pace.max_staleness, version, cursor)
        found = entry.value
        if found.policy != state.policy:
            raise invalid(f"the run {submission.run} is paced by the versions of {found.policy}", "pace")
        found = msgspec.structs.replace(found, batch=pace.batch, max_staleness=pace.max_staleness)
        for item in found.recent:
            if not item.settled and item.batch_id in self._stored:
                found = capacity.settle(found, item.batch_id, None)
        found = capacity.give_back(found, losses.behind(found.cursor), losses.cursor)
        return capacity.seen(found, state, now)

    async def _settled(self, pace: RunPace, submission: Submission, now: float) -> RunPace:
        """Ask the ledger about batches that were counted and of which nobody said that they were stored."""
        for item in pace.recent:
            if item.settled or now - item.at < UNSETTLED_S or item.batch_id == submission.batch_id:
                continue
            try:
                status = await self._ledger.batch(submission.tenant, item.batch_id)
            except RollgridError as error:
                log.info("paced_batch_unknown", batch=item.batch_id, error=error.message)
                continue
            pace = capacity.settle(pace, item.batch_id, 0 if status is None else status.groups)
        return pace

    async def _write(self, run: str, entry: Versioned[RunPace] | None, pace: RunPace) -> None:
        if entry is None:
            await self._table.create(run, pace)
        else:
            await self._table.update(run, pace, entry.revision)

    def _state(self, submission: Submission) -> PolicyState:
        """The policy as it is now; as it was when the request was read where it has gone since."""
        return self._catalog.now(submission.policy)

    # -- waiting ----------------------------------------------------------------------------------

    async def _until_moved(self, tail: Tail, moved: asyncio.Event, seconds: float) -> None:
        """Until a group of the run has closed, a policy has changed, the service stops, or `seconds` are over."""
        waits = [
            asyncio.ensure_future(tail.wait(seconds)),
            asyncio.ensure_future(moved.wait()),
            asyncio.ensure_future(self.stopping.wait()),
        ]
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def _is_first(self, run: str, batch_id: str) -> bool:
        """Take a place in the run's line, or renew it; whether nobody stands before."""
        now = time.monotonic()
        line = self._lines.setdefault(run, OrderedDict())
        for other in [name for name, until in line.items() if until < now and name != batch_id]:
            del line[other]
        line[batch_id] = now + TURN_S
        return next(iter(line)) == batch_id

    def _leave(self, run: str, batch_id: str) -> None:
        line = self._lines.get(run)
        if line is not None:
            line.pop(batch_id, None)
            if not line:
                del self._lines[run]


def _come_again(submission: Submission, short: Short) -> RollgridError:
    pace, free = short.pace, capacity.room(short.pace)
    return RollgridError(
        ErrorCode.PACED,
        f"run {submission.run} is {pace.admitted - pace.versions * pace.batch} groups ahead of version {pace.version}: "
        f"{short.groups} more do not fit, {free} would; a new version or a lost group makes room",
        field="pace",
        limit=f"(max_staleness+1)*batch={capacity.largest(pace)}",
        retry_after_s=1.0,
    )


def _never_fits(groups: int, pace: RunPace) -> RollgridError:
    limit = f"(max_staleness+1)*batch={capacity.largest(pace)}"
    return RollgridError(
        ErrorCode.LIMIT_EXCEEDED,
        f"{groups} groups in one submission never fit the run's pace, the limit is {limit}",
        boundary=Boundary.CLIENT,
        field="tasks",
        limit=limit,
    )
