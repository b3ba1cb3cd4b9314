"""Who is there, as heard from the workers themselves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.topology import WORKER_LEASE_S, WORKERS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_runtime.leases import Leases

from tests.support.servers import NatsServer
from tests.support.waiting import until


def state(worker: str, **changes: object) -> WorkerState:
    fields = {"incarnation": "i", "pool": "p", "engine": "scripted", "device": "cpu", "slots": 4} | changes
    return WorkerState(worker=worker, renewed_at=time.time(), **fields)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def following(bus: Bus) -> AsyncIterator[tuple[Leases, list[set[str]]]]:
    """The leases, and who was there at each change."""
    seen: list[set[str]] = []
    leases = Leases(bus, lambda: seen.append(set(leases.alive)))
    task = asyncio.create_task(leases.follow())
    try:
        await until(leases.loaded.is_set, 10, "listed")
        yield leases, seen
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def renewed(table: Table[WorkerState], worker: str) -> None:
    while True:
        await table.put(worker, state(worker))
        await asyncio.sleep(WORKER_LEASE_S / 3)


async def test_leases_are_listed_heard_deleted_and_end(bus: Bus) -> None:
    table: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
    await table.put("before", state("before"))
    async with following(bus) as (leases, seen):
        assert set(leases.alive) == {"before"}
        keeping = asyncio.create_task(renewed(table, "steady"))
        await until(lambda: "steady" in leases.alive, WORKER_LEASE_S - 2, "heard at once")
        await table.put("steady", state("steady", draining=True, busy=3))
        await until(lambda: leases.alive["steady"].draining, WORKER_LEASE_S - 2, "what it says is known")

        await table.put("leaves", state("leaves"))
        await until(lambda: "leaves" in leases.alive, WORKER_LEASE_S - 2, "heard")
        await table.delete("leaves")
        await until(lambda: "leaves" not in leases.alive, WORKER_LEASE_S - 2, "its end is heard")
        assert leases.gone("leaves")
        assert not leases.gone("never-heard-of"), "it may be about to renew its lease"

        await until(lambda: set(leases.alive) == {"steady"}, WORKER_LEASE_S + 6, "a lease that ended")
        await until(lambda: leases.gone("never-heard-of"), WORKER_LEASE_S, "it would have been heard")
        assert not leases.gone("steady")
        assert seen[-1] == {"steady"}
        keeping.cancel()


async def test_nobody_is_taken_for_dead_while_nothing_can_be_heard(bus: Bus, nats: NatsServer) -> None:
    table: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
    await table.put("w", state("w"))
    async with following(bus) as (leases, _):
        nats.kill()
        await until(lambda: not bus.connected, 10, "cut off")
        away = time.monotonic()
        await until(lambda: time.monotonic() - away > WORKER_LEASE_S + 2, 20, "more than a lease")
        assert set(leases.alive) == {"w"}
        nats.start().wait_ready(10)
        await until(lambda: bus.connected, 20, "connected again")
        back = time.monotonic()
        await until(lambda: time.monotonic() - back > 3, 10, "a renewal's time")
        assert set(leases.alive) == {"w"}, "it gets a whole lease's time to say that it is there"
