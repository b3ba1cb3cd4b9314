"""What checkpoint-sync sees of the fleet: policies, leases and fingerprints, each as a view of its bucket."""

from __future__ import annotations

import asyncio
import contextlib

from rollgrid_contracts import topology
from rollgrid_contracts.checkpoints import Fingerprint, PolicyState
from rollgrid_contracts.fleet import WorkerState
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table, View

BURST_S = 0.25
"""Leases are renewed all the time: one listing for all renewals of a quarter of a second."""


class Fleet:
    """Run `follow` as a task; `changed` is set whenever one of the views moves."""

    def __init__(self, bus: Bus) -> None:
        self.changed = asyncio.Event()
        note = self.changed.set
        self._policies = View(bus, Table(bus, topology.POLICIES, PolicyState), note)
        self._workers = View(bus, Table(bus, topology.WORKERS, WorkerState), note, burst_s=BURST_S)
        self._fingerprints = View(bus, Table(bus, topology.FINGERPRINTS, Fingerprint), note, burst_s=BURST_S)

    async def follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            for view in (self._policies, self._workers, self._fingerprints):
                group.create_task(view.follow())

    async def known(self, within_s: float) -> None:
        """Wait for the first listing of the leases, no longer than that."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._workers.loaded.wait()

    def policy(self, key: str) -> PolicyState | None:
        found = self._policies.values.get(key)
        return found.value if found is not None else None

    def workers(self) -> list[WorkerState] | None:
        """The live leases; None until they were read once."""
        if not self._workers.loaded.is_set():
            return None
        return [found.value for found in self._workers.values.values()]

    def fingerprints(self) -> dict[str, Fingerprint]:
        return {key: found.value for key, found in self._fingerprints.values.items()}
