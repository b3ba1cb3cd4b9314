"""Workers as the fleet sees them: leases in `rg_workers`, renewed, and moved as the policy's state tells them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from rollgrid_contracts import topology
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table

RENEW_S = topology.WORKER_LEASE_S / 3


class Leases:
    def __init__(self, bus: Bus, pool: str, policy: str = "tiny") -> None:
        self._table: Table[WorkerState] = Table(bus, topology.WORKERS, WorkerState)
        self._pool, self._policy = pool, policy
        self.held: dict[str, WorkerState] = {}

    async def put(self, name: str, version: int, **changes: Any) -> None:
        self.held[name] = WorkerState(
            worker=name,
            incarnation=f"{name}/a",
            pool=self._pool,
            engine="scripted",
            device="cpu",
            slots=1,
            loaded=(LoadedVersion(policy=self._policy, version=version),),
        )
        await self.change(name, **changes)

    async def change(self, name: str, **changes: Any) -> None:
        self.held[name] = msgspec.structs.replace(self.held[name], **changes)
        await self._table.put(name, self.held[name])

    async def drop(self, name: str) -> None:
        del self.held[name]
        await self._table.delete(name)

    async def obey(self, name: str, state: PolicyState) -> None:
        """Apply what the state tells this worker to."""
        rollout = state.rollout
        version = state.desired
        if rollout is not None and (name not in rollout.workers or rollout.failure is not None):
            version = rollout.previous
        await self.change(name, loaded=(LoadedVersion(policy=self._policy, version=version),))

    def version(self, name: str) -> int:
        return self.held[name].loaded[0].version

    async def renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            for name in list(self.held):
                await self.change(name)


@contextlib.asynccontextmanager
async def leases(bus: Bus, pool: str) -> AsyncIterator[Leases]:
    held = Leases(bus, pool)
    renewing = asyncio.create_task(held.renew())
    try:
        yield held
    finally:
        renewing.cancel()
        await asyncio.gather(renewing, return_exceptions=True)
