"""Sessions over two replicas of ingest and three samplers: bound, rebound when workers come and go, and never lost."""

from __future__ import annotations

import asyncio
import itertools
import math
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import cast

import httpx2
import pytest
from rollgrid import AsyncClient, Retries
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened
from rollgrid_contracts.fleet import LaneClaim
from rollgrid_contracts.ids import NO_SESSION
from rollgrid_contracts.samples import SamplesFinished
from rollgrid_contracts.topology import JOBS, LANES, SAMPLES, lane_consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_runtime.reading import read_after

from tests.support.stack import POLICY, TENANT, Stack
from tests.support.waiting import until

from .conftest import NAMES

PATIENT = Retries(budget_s=120, outage_budget_s=120)
PROCESSES = {name: process for process, name in NAMES.items()}
Event = SamplesFinished | SessionOpened | SessionForked | SessionEnded
ANY_EVENT = cast(type[Event], Event)


class Player:
    """Plays sessions, each turn through the other replica than the one before."""

    def __init__(self, *clients: AsyncClient) -> None:
        self.clients = clients
        self.sent: Counter[str] = Counter()

    async def open(self, run: str, count: int) -> list[str]:
        return [
            (await self.clients[number % 2].sessions.open(run=run, group=f"g{number}")).id for number in range(count)
        ]

    async def turn(self, name: str, max_tokens: int = 8) -> None:
        session = await self.clients[self.sent[name] % 2].sessions.get(name)
        ids = {"observation_token_ids": [5, 6]} if self.sent[name] else {"token_ids": [5, 6, 7]}
        await session.sample(**ids, max_tokens=max_tokens, ignore_eos=True)  # type: ignore[arg-type]
        self.sent[name] += 1

    async def play(self, names: Sequence[str], turns: int, max_tokens: int = 8) -> None:
        """All at once, `turns` turns each."""

        async def one(name: str) -> None:
            for _ in range(turns):
                await self.turn(name, max_tokens)

        async with asyncio.TaskGroup() as group:
            for name in names:
                group.create_task(one(name))

    async def workers(self, names: Sequence[str]) -> dict[str, list[str]]:
        """Who sampled each turn.  Every turn that was sent is in the tree once, behind the one before it."""
        found = {}
        for name in names:
            state = await self.clients[0].sessions.state(name)
            turns = [node.turn for node in state.nodes]
            assert len(turns) == self.sent[name]
            assert [node.parent for node in state.nodes] == [None, *turns[:-1]]
            assert not state.lost_turns
            assert not state.open_turns
            found[name] = [node.worker for node in state.nodes]
        return found


def kept(workers: dict[str, list[str]]) -> float:
    """The share of turns that were sampled where the turn before was."""
    pairs = [pair for turns in workers.values() for pair in itertools.pairwise(turns)]
    return sum(one == other for one, other in pairs) / len(pairs)


async def finishes(bus: Bus, session: str) -> Counter[int]:
    """How many finishes of each turn are in the record."""
    found: Counter[int] = Counter()
    for stored in (await read_after(bus, SAMPLES.name, subjects.samples_of(TENANT, session), 0, 10_000)).messages:
        event = codec.decode(stored.data, ANY_EVENT)
        if isinstance(event, SamplesFinished):
            found[event.samples[0].turn] += 1
    return found


@pytest.fixture
async def player(pipe: Stack) -> AsyncIterator[Player]:
    async with (
        AsyncClient(pipe["ingest"].health_url, retries=PATIENT) as one,
        AsyncClient(pipe["ingest-1"].health_url, retries=PATIENT) as other,
    ):
        yield Player(one, other)


@pytest.fixture
async def wire(pipe: Stack) -> AsyncIterator[Bus]:
    """A connection to the stack's server."""
    connection = await Bus.connect(pipe.nats.settings(), "test")
    yield connection
    await connection.close()


async def holder(bus: Bus, lane: str) -> str:
    found = await Table(bus, LANES, LaneClaim).get(lane)
    return found.value.holder if found is not None else ""


async def test_turns_land_on_one_worker_and_nobody_carries_more_than_the_bound(
    pipe: Stack, player: Player, wire: Bus
) -> None:
    """A25: over both replicas, and after Redis has lost everything."""
    names = await player.open("steady", 24)
    for few in zip(*[iter(names)] * 4, strict=True):
        await player.play(few, 12)  # no worker is ever out of slots, so nobody is moved to relieve it
    first = await player.workers(names)
    assert kept(first) > 0.99
    carried = Counter(turns[0] for turns in first.values())
    assert set(carried) == set(PROCESSES)
    assert max(carried.values()) <= math.ceil(1.25 * 24 / 3)
    pipe.valkey.flush_all()
    for few in zip(*[iter(names)] * 4, strict=True):
        await player.play(few, 2)
    assert kept(await player.workers(names)) > 0.99
    assert all([await holder(wire, worker) == worker for worker in PROCESSES])


@pytest.mark.slow
async def test_workers_that_drain_die_and_come_back_under_load_lose_no_turn(
    pipe: Stack, player: Player, wire: Bus
) -> None:
    """A13, I11: sessions are rebound; each turn is in the tree once."""
    names = await player.open("stormy", 12)
    await player.play(names, 1)
    load = asyncio.create_task(player.play(names, 24, max_tokens=40))
    drained, killed = pipe[PROCESSES["w0"]], pipe[PROCESSES["w1"]]

    drained.send(signal.SIGTERM)
    await until(lambda: not drained.running, 60, "w0 has drained")
    assert drained.returncode == 0
    await until(lambda: taken_over(wire, "w0", by={"w1", "w2"}), 20, "a peer has w0's lane")
    drained.start()
    await until(drained.is_ready, 60, "w0 is back")
    await until(lambda: taken_over(wire, "w0", by={"w0"}), 20, "w0 has its lane again")

    killed.kill()
    await until(lambda: taken_over(wire, "w1", by={"w0", "w2"}), 60, "a peer has w1's lane")
    killed.start()
    await until(killed.is_ready, 60, "w1 is back")
    await until(lambda: taken_over(wire, "w1", by={"w1"}), 20, "w1 has its lane again")
    await load

    workers = await player.workers(names)
    assert Counter(worker for turns in workers.values() for worker in turns).keys() == set(PROCESSES)
    assert kept(workers) > 0.8, "only what had to move moved"
    for name in names:
        assert list((await finishes(wire, name)).values()) == [1] * 25


async def taken_over(bus: Bus, lane: str, *, by: set[str]) -> bool:
    return await holder(bus, lane) in by


@pytest.mark.slow
async def test_a_frozen_workers_lane_is_drained_by_a_peer_and_its_return_doubles_nothing(
    pipe: Stack, player: Player, wire: Bus
) -> None:
    """I6: the first finish of a turn stands; there is no second one."""
    names = await player.open("frozen", 9)
    await player.play(names, 1)
    before = await player.workers(names)
    frozen = pipe[PROCESSES["w2"]]
    there = [name for name, turns in before.items() if turns == ["w2"]]
    assert there
    turns = asyncio.create_task(player.play(there, 1, max_tokens=1000))

    async def in_hand() -> bool:
        info = await wire.consumer_info(JOBS.name, lane_consumer("w2").durable)
        return info is not None and info.num_ack_pending == len(there)

    await until(in_hand, 20, "w2 has the turns")
    frozen.pause()
    await turns
    assert await holder(wire, "w2") in {"w0", "w1"}
    after = await player.workers(there)
    assert all(turns[1] in {"w0", "w1"} for turns in after.values())

    frozen.resume()
    await until(lambda: taken_over(wire, "w2", by={"w2"}), 40, "w2 has its lane again")
    await until(frozen.is_ready, 40, "w2 is ready")
    await player.play(names, 1)
    await player.workers(names)
    for name in there:
        assert list((await finishes(wire, name)).values()) == [1, 1, 1]


async def test_calls_of_one_x_session_id_go_to_one_worker(pipe: Stack, wire: Bus) -> None:
    """A25: the header alone gives affinity, and no session."""
    async with httpx2.AsyncClient(timeout=60) as client:
        for number in range(24):
            url = pipe["ingest" if number % 2 else "ingest-1"].health_url
            run = f"calls-{number % 5}"
            headers = {"X-Session-Id": f"mine/{number % 5}", "X-Rollgrid-Run": run}
            body = {"model": POLICY, "prompt": [5, 6, 7], "max_tokens": 4}
            answer = await client.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200, answer.text
    workers: dict[str, list[str]] = {}
    page = await read_after(wire, SAMPLES.name, subjects.samples_of(TENANT, NO_SESSION), 0, 10_000)
    for stored in page.messages:
        event = codec.decode(stored.data, SamplesFinished)
        workers.setdefault(event.run, []).append(event.samples[0].worker)
    calls = [found for run, found in workers.items() if run.startswith("calls-")]
    assert sum(map(len, calls)) == 24
    assert [len(set(found)) for found in calls] == [1] * 5
    assert len({found[0] for found in calls}) > 1
