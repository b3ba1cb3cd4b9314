"""Who is there: the leases of `rg_workers`, followed by what the workers themselves write.

A renewal carries the whole state, so nothing is read again for it; the bucket is listed at the start and after each
reconnection.  A lease that was not renewed for `WORKER_LEASE_S` has ended.  While nothing can be heard nobody is taken
for dead: what was known is known on, and gets a whole lease's time once the connection is back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg
from rollgrid_contracts import codec
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.topology import WORKER_LEASE_S, WORKERS

from .bus import Bus
from .errors import BusError
from .kv import Table
from .logging import get_logger

log = get_logger(__name__)
LOOK_EVERY_S = 1.0
"""Ends of leases, and a connection made anew, are seen within so long."""
OPERATION = "KV-Operation"


class _Heard(NamedTuple):
    state: WorkerState
    at: float


class Leases:
    """Run `follow` as a task.  `loaded` is set once the first listing is in."""

    def __init__(self, bus: Bus, on_change: Callable[[], None] | None = None) -> None:
        self._bus, self._on_change = bus, on_change
        self._table: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
        self._heard: dict[str, _Heard] = {}
        self._left: dict[str, float] = {}
        self._epoch = -1
        self._since = 0.0
        self.loaded = asyncio.Event()

    @property
    def alive(self) -> dict[str, WorkerState]:
        """By worker, the state it last wrote."""
        return {worker: heard.state for worker, heard in self._heard.items()}

    def gone(self, worker: str) -> bool:
        """Whether the worker has surely no lease: it would have been heard since the connection was made."""
        listened = bool(self._since) and time.monotonic() - self._since > WORKER_LEASE_S
        return worker not in self._heard and (listened or worker in self._left)

    async def follow(self) -> None:
        """Until cancelled."""
        subscription = await self._bus.subscribe_raw(f"$KV.{WORKERS.name}.>", self._on_write)
        try:
            while True:
                if self._epoch != self._bus.connection_epoch:
                    await self._list()
                elif self._bus.connected:
                    self._expire()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._bus.unsubscribe(subscription)

    async def _list(self) -> None:
        epoch, began = self._bus.connection_epoch, time.monotonic()
        try:
            listed = await self._table.items()
        except BusError as error:
            log.warning("leases_not_listed", error=error.message)
            return
        for worker, known in self._heard.items():
            self._heard[worker] = known._replace(at=max(known.at, began))
        for worker, found in listed.items():
            if worker not in self._heard and self._left.get(worker, 0.0) < began:
                age_s = min(max(0.0, time.time() - found.value.renewed_at), WORKER_LEASE_S)
                self._heard[worker] = _Heard(found.value, began - age_s)
        self._epoch, self._since = epoch, time.monotonic()
        self.loaded.set()
        self._changed()

    async def _on_write(self, msg: Msg) -> None:
        worker, now = msg.subject.removeprefix(f"$KV.{WORKERS.name}."), time.monotonic()
        if (msg.headers or {}).get(OPERATION):  # deleted or purged
            self._left[worker] = now
            if self._heard.pop(worker, None) is not None:
                self._changed()
            return
        try:
            state = codec.decode(msg.data, WorkerState)
        except msgspec.DecodeError as error:
            log.warning("lease_undecodable", worker=worker, error=repr(error))
            return
        before = self._heard.get(worker)
        self._heard[worker] = _Heard(state, now)
        self._left.pop(worker, None)
        if before is None or _told_apart(before.state, state):
            self._changed()

    def _expire(self) -> None:
        now = time.monotonic()
        ended = [worker for worker, heard in self._heard.items() if now - heard.at > WORKER_LEASE_S]
        for worker in ended:
            del self._heard[worker]
        self._left = {worker: at for worker, at in self._left.items() if now - at < 2 * WORKER_LEASE_S}
        if ended:
            self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()


def _told_apart(one: WorkerState, other: WorkerState) -> bool:
    """Whether anything that decides where work goes differs."""
    return (one.incarnation, one.pool, one.draining, one.quarantined, one.slots) != (
        other.incarnation,
        other.pool,
        other.draining,
        other.quarantined,
        other.slots,
    )
