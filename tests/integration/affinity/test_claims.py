"""Who reads a private lane, on a real nats-server: one holder, the owner before all others, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.fleet import LaneClaim, WorkerState
from rollgrid_contracts.topology import JOBS, LANES, WORKERS, lane_consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.rendezvous import ranked
from rollgrid_sampler.lane_claims import LaneClaims

from tests.integration.sampler.stage import POOL, make_job
from tests.support.waiting import until


class Peers:
    """Workers as others see them: their leases and their claims."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.leases: Table[WorkerState] = Table(bus, WORKERS, WorkerState)
        self.table: Table[LaneClaim] = Table(bus, LANES, LaneClaim)
        self.claims: dict[str, LaneClaims] = {}
        self._tasks: dict[str, list[asyncio.Task[None]]] = {}

    async def come(self, name: str, pool: str = POOL, **options: Any) -> LaneClaims:
        incarnation = f"{name}/{time.monotonic_ns()}"
        claims = LaneClaims(
            self.bus, name, incarnation, pool, lambda: None, **{"kept_s": 600.0, "sweep_s": 600.0, **options}
        )
        self.claims[name] = claims
        self._tasks[name] = [
            asyncio.create_task(self._renew(name, incarnation, pool)),
            asyncio.create_task(claims.run()),
        ]
        await until(lambda: name in claims.held, 10, f"{name} has its own lane")
        return claims

    async def _renew(self, name: str, incarnation: str, pool: str) -> None:
        while True:
            await self.leases.put(name, lease(name, incarnation, pool))
            await asyncio.sleep(1)

    async def end(self, name: str) -> None:
        """As a kill: nothing is written any more."""
        del self.claims[name]
        for task in self._tasks.pop(name):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def leave(self, name: str) -> None:
        """As a drain: the lanes are given up, then the lease."""
        await self.claims[name].leave(own=True)
        await self.end(name)
        await self.leases.delete(name)

    def readers(self, lane: str) -> list[str]:
        return [name for name, claims in self.claims.items() if lane in claims.held]

    async def read_by(self, lane: str, *names: str, timeout_s: float = 20) -> None:
        await until(lambda: self.readers(lane) == list(names), timeout_s, f"{lane} is read by {names}")

    async def close(self) -> None:
        for name in list(self.claims):
            await self.end(name)


def lease(name: str, incarnation: str, pool: str = POOL) -> WorkerState:
    return WorkerState(
        worker=name,
        incarnation=incarnation,
        pool=pool,
        engine="scripted",
        device="cpu",
        slots=8,
        renewed_at=time.time(),
    )


@pytest.fixture
async def peers(bus: Bus) -> AsyncIterator[Peers]:
    made = Peers(bus)
    yield made
    await made.close()


async def test_a_lane_given_up_goes_to_one_peer_of_the_pool_and_back_to_its_owner(peers: Peers) -> None:
    for name in ("a", "b", "c"):
        await peers.come(name)
    await peers.come("stranger", pool="p-other")
    await peers.leave("a")
    first = next(name for name in ranked("a", {"b": 8, "c": 8}))
    await peers.read_by("a", first, timeout_s=5)
    assert (await held(peers, "a")).holder == first
    assert all(peers.readers(name) == [name] for name in ("b", "c", "stranger"))

    await peers.come("a")
    await peers.read_by("a", "a", timeout_s=5)
    assert (await held(peers, "a")).holder == "a"


async def test_a_holder_that_leaves_passes_the_lanes_on(peers: Peers) -> None:
    for name in ("a", "b", "c"):
        await peers.come(name)
    await peers.leave("a")
    first, second = ranked("a", {"b": 8, "c": 8})
    await peers.read_by("a", first, timeout_s=5)
    await peers.leave(first)
    for lane in ("a", first):
        await peers.read_by(lane, second, timeout_s=5)


async def test_a_killed_worker_loses_its_lane_with_its_lease_and_one_peer_has_it(peers: Peers) -> None:
    """A13: nobody gave it up; the next start under the same name is another process and gets it back."""
    for name in ("a", "b", "c"):
        await peers.come(name)
    began = time.monotonic()
    await peers.end("a")
    counts: set[int] = set()

    def one_reader() -> bool:
        counts.add(len(peers.readers("a")))
        return bool(peers.readers("a"))

    await until(one_reader, 25, "the lane is read")
    assert time.monotonic() - began > topology.WORKER_LEASE_S / 2, "a lease in force is respected"
    await until(lambda: time.monotonic() - began > topology.WORKER_LEASE_S + 4, 30, "all had their chance")
    assert counts == {0, 1}
    assert len(peers.readers("a")) == 1
    await peers.come("a")
    await peers.read_by("a", "a", timeout_s=5)


async def test_an_empty_lane_of_a_worker_that_is_gone_is_removed_and_a_late_job_brings_it_back(peers: Peers) -> None:
    """Safe: who publishes without looking is found by the subject, which the ledger's consumer keeps."""
    await peers.come("a")
    await peers.come("b", kept_s=0.5, sweep_s=0.5)
    durable = lane_consumer("a").durable
    await ensure_consumer(peers.bus, lane_consumer("a"))
    await peers.bus.publish(subjects.jobs_worker("a"), make_job("waits"))
    await peers.leave("a")
    await peers.read_by("a", "b", timeout_s=5)
    puller = peers.bus.puller(lane_consumer("a"))
    (delivery,) = await puller.fetch(1, 2)
    await delivery.ack_sync()
    await puller.close()
    await asyncio.sleep(2.5)  # several looks
    assert durable in await peers.bus.consumer_names(JOBS.name), "not while the ledger holds a job of it"

    await peers.bus.purge_below(JOBS.name, delivery.sequence + 1)
    await until(lambda: "a" not in peers.claims["b"].held, 10, "the lane is removed")
    assert durable not in await peers.bus.consumer_names(JOBS.name)
    assert await peers.table.get("a") is None

    await peers.bus.publish(subjects.jobs_worker("a"), make_job("late"))
    await peers.read_by("a", "b", timeout_s=10)


async def held(peers: Peers, lane: str) -> LaneClaim:
    found = await peers.table.get(lane)
    assert found is not None
    return found.value
