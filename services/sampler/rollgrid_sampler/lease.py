"""This worker's entry in `rg_workers`: written while it lives, at once when it says something new, deleted at its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.topology import WORKER_LEASE_S, WORKERS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger

log = get_logger(__name__)
PAUSE_S = 0.05
"""Between two leases, however fast what they say changes."""


class Lease:
    """`state()` is what it says, `changed` is set when that is something new."""

    def __init__(self, bus: Bus, state: Callable[[], WorkerState], changed: asyncio.Event) -> None:
        self.workers: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
        self._state, self._changed = state, changed
        self._written_at = 0.0

    @property
    def live(self) -> bool:
        return self._written_at > 0.0 and time.monotonic() - self._written_at <= WORKER_LEASE_S

    async def renew(self) -> None:
        self._changed.clear()
        state = self._state()
        try:
            await self.workers.put(state.worker, state)
            self._written_at = time.monotonic()
        except BusError as error:
            log.warning("lease_not_renewed", error=error.message)

    async def keep(self) -> None:
        """Until cancelled."""
        while True:
            await self.renew()
            await asyncio.sleep(PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WORKER_LEASE_S / 3):
                    await self._changed.wait()

    async def end(self) -> None:
        with contextlib.suppress(BusError):
            await self.workers.delete(self._state().worker)
