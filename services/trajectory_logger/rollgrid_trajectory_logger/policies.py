"""What the ledger knows of policies and workers: how stale a record is, and whether anybody could serve a job.

Neither decides how a group ends.  Where the state is not known nothing is claimed: no staleness, plain `expired`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping

import msgspec
from rollgrid_contracts.checkpoints import PolicyState, staleness
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.jobs import SampleGroup, VersionRule, WeightConstraint
from rollgrid_contracts.topology import POLICIES, WORKERS
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table, Versioned, View
from rollgrid_runtime.logging import get_logger

from .ledger import Unmet, unknown

log = get_logger(__name__)
SHARED = "shared"
READ_S = 3.0


class Policies:
    """A local copy of `rg_policies`.  Run `follow` as a task."""

    def __init__(self, bus: Bus) -> None:
        self._view: View[PolicyState] = View(bus, Table(bus, POLICIES, PolicyState))
        self._workers: Table[WorkerState] = Table(bus, WORKERS, WorkerState)

    async def follow(self) -> None:
        await self._view.follow()

    async def read(self) -> None:
        """Wait until the policies were read once; not for ever, a record can do without them."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READ_S):
                await self._view.loaded.wait()

    def stamped(self, closed: GroupClosed) -> GroupClosed:
        """The record with the staleness of each entry that has tokens."""
        state = state_of(self._view.values, closed.tenant, closed.policy)
        return closed if state is None else stamped(closed, state)

    async def unmet(self) -> Unmet:
        """As things are now."""
        try:
            workers = [entry.value for entry in (await self._workers.items()).values()]
        except BusError as error:
            log.info("workers_unknown", error=error.message)
            return unknown
        return lambda job: unmet(job, state_of(self._view.values, job.tenant, job.policy), workers)


def state_of(values: Mapping[str, Versioned[PolicyState]], tenant: str, policy: str) -> PolicyState | None:
    """The tenant's own policy of this name, else the shared one."""
    for owner in (tenant, SHARED):
        found = values.get(f"{owner}.{policy}")
        if found is not None:
            return found.value
    return None


def stamped(closed: GroupClosed, state: PolicyState) -> GroupClosed:
    entries = tuple(
        msgspec.structs.replace(entry, staleness=max(staleness(state, version) for version in entry.versions))
        if entry.versions
        else entry
        for entry in closed.entries
    )
    return msgspec.structs.replace(closed, entries=entries)


def unmet(job: SampleGroup, state: PolicyState | None, workers: Iterable[WorkerState]) -> str | None:
    """Which versions the pool's workers run instead of one the job may be served by; None where one is."""
    if job.weights.rule is VersionRule.LATEST or state is None:
        return None
    serving = [worker for worker in workers if worker.pool == job.pool and worker.quarantined is None]
    running = {
        loaded.version
        for worker in serving
        for loaded in worker.loaded
        if (loaded.policy, loaded.tenant) == (state.policy, state.tenant)
    }
    if not running or any(_serves(version, job.weights, state) for version in running):
        return None
    asked = f"{job.weights.rule.value} {job.weights.value}"
    listed = ", ".join(map(str, sorted(running)))
    return f"no worker had a version for {asked} at the group's deadline: desired {state.desired}, running {listed}"


def _serves(version: int, asked: WeightConstraint, state: PolicyState) -> bool:
    match asked.rule:
        case VersionRule.EXACT:
            return version == asked.value
        case VersionRule.MIN:
            return version >= asked.value
        case VersionRule.MAX_STALENESS:
            return staleness(state, version) <= asked.value
        case VersionRule.LATEST:
            return True
