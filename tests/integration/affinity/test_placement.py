"""Where sessions are bound, on a real Valkey: whatever workers and sessions do, nobody is bound beyond the bound."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rollgrid_contracts import keys
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_ingest import metrics
from rollgrid_ingest.affinity import Affinity, Need, Placed
from rollgrid_runtime.rendezvous import ranked
from rollgrid_runtime.state import State

from tests.support.servers import ValkeyServer, valkey_server

POOL, TENANT = "p1", "acme"
POLICY = PolicyState(
    tenant="shared",
    policy="tiny",
    pool=POOL,
    base="b",
    base_digest="00",
    tokenizer_prefix="t",
    tokenizer_digest="00",
    max_model_len=64,
    vocab_size=64,
    dtype="float32",
    desired=3,
    history=(0, 2, 3),
    newest=3,
)
ANY = Need(POLICY)


def worker(name: str, slots: int = 8, version: int = 3, **changes: Any) -> WorkerState:
    fields: dict[str, Any] = {
        "worker": name,
        "incarnation": name,
        "pool": POOL,
        "engine": "scripted",
        "device": "cpu",
        "slots": slots,
        "loaded": (LoadedVersion(policy="tiny", version=version),),
    }
    return WorkerState(**{**fields, **changes})


class Fleet(dict[str, WorkerState]):
    """Two replicas' view of the workers, and each replica's own way to Redis."""

    def __init__(self, valkey: ValkeyServer, *workers: WorkerState, factor: float = 1.25) -> None:
        super().__init__({one.worker: one for one in workers})
        self.states = [State(valkey.settings()) for _ in range(2)]
        self.replicas = [Affinity(lambda: self, state, factor=factor) for state in self.states]
        self.valkey, self.factor = valkey, factor
        self._turns = 0

    async def place(self, session: str, need: Need = ANY, **options: Any) -> Placed:
        """By one replica, then by the other."""
        self._turns += 1
        return await self.replicas[self._turns % 2].place(POOL, TENANT, session, need, **options)

    async def release(self, session: str) -> None:
        self._turns += 1
        await self.replicas[self._turns % 2].release(POOL, TENANT, session)

    def bound(self) -> Counter[str]:
        client = self.valkey.client()
        found = Counter({name: int(client.zcard(keys.bound(POOL, name))) for name in self})
        client.close()
        return found

    def most(self, name: str, sessions: int) -> int:
        return math.ceil(self.factor * sessions * self[name].slots / sum(one.slots for one in self.values()))

    async def close(self) -> None:
        for state in self.states:
            await state.close()


@pytest.fixture(scope="module")
def redis() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture
async def fleet(redis: ValkeyServer) -> AsyncIterator[Fleet]:
    redis.flush_all()
    made = Fleet(redis, *(worker(f"w{number}") for number in range(3)))
    yield made
    await made.close()


TURNS = [("turn", number) for number in range(40)]
OTHERS = [("end", number) for number in range(12)] + [
    (what, number) for what in ("come", "go", "drain") for number in range(5)
]
STEPS = st.lists(st.sampled_from(TURNS + OTHERS), min_size=40, max_size=80)


@given(steps=STEPS, slots=st.lists(st.integers(1, 16), min_size=5, max_size=5), factor=st.sampled_from([1.0, 1.25, 2]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_session_stays_while_it_may_and_never_goes_beyond_the_bound(
    redis: ValkeyServer, steps: list[tuple[str, int]], slots: list[int], factor: float
) -> None:
    redis.flush_all()

    async def play() -> None:
        all_workers = [worker(f"w{number}", count) for number, count in enumerate(slots)]
        fleet = Fleet(redis, *all_workers[:3], factor=factor)
        where: dict[int, str] = {}
        try:
            for what, number in steps:
                if what == "turn":
                    await turn(fleet, where, number)
                elif what == "end":
                    await fleet.release(f"s{number}")
                    where.pop(number, None)
                elif what == "come":
                    fleet[f"w{number}"] = all_workers[number]
                elif what == "go":
                    fleet.pop(f"w{number}", None)
                elif f"w{number}" in fleet:
                    fleet[f"w{number}"] = worker(f"w{number}", slots[number], draining=True)
        finally:
            await fleet.close()

    run(play())


async def turn(fleet: Fleet, where: dict[int, str], number: int) -> None:
    ready = {name: one for name, one in fleet.items() if not one.draining}
    before = fleet.bound()
    placed = (await fleet.place(f"s{number}")).worker
    if not ready:
        assert placed is None
        return
    assert placed in ready
    if where.get(number) in ready:
        assert placed == where[number], "nothing moves a session whose worker may have it"
    else:
        after = Counter({name: count for name, count in fleet.bound().items() if name in ready})
        assert after.total() == sum(before[name] for name in ready) + 1
        share = after.total() * ready[placed].slots / sum(one.slots for one in ready.values())
        assert after[placed] <= math.ceil(fleet.factor * share - 1e-9), "beyond the bound"
    where[number] = placed


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


async def test_turns_of_a_session_go_to_one_worker_from_both_replicas(fleet: Fleet) -> None:
    first = {number: await fleet.place(f"s{number}") for number in range(60)}
    for _ in range(3):
        for number, placed in first.items():
            assert await fleet.place(f"s{number}") == placed
    counts = fleet.bound()
    assert counts.total() == 60
    assert all(count <= fleet.most(name, 60) for name, count in counts.items())
    assert {placed.subject for placed in first.values()} == {f"rg.0.jobs.lane.{name}" for name in fleet}


async def test_a_worker_that_goes_moves_its_own_sessions_only(fleet: Fleet) -> None:
    first = {number: (await fleet.place(f"s{number}")).worker for number in range(60)}
    del fleet["w1"]
    for number, before in first.items():
        placed = (await fleet.place(f"s{number}")).worker
        assert (placed != before) == (before == "w1")
    fleet["w1"] = worker("w1")
    settled = {number: (await fleet.place(f"s{number}")).worker for number in range(60)}
    assert "w1" not in settled.values(), "who comes back gets new sessions, and takes nobody's cache"
    assert "w1" in {(await fleet.place(f"new{number}")).worker for number in range(10)}


async def test_workers_that_come_relieve_those_without_a_free_slot(fleet: Fleet) -> None:
    late = fleet.pop("w2")
    for number in range(60):
        await fleet.place(f"s{number}")
    for name in fleet:
        fleet[name] = worker(name, busy=8, waiting=1)
    fleet["w2"] = late
    moved = Counter([(await fleet.place(f"s{number}")).worker for number in range(60)])
    assert 0 < moved["w2"] <= fleet.most("w2", 60)
    assert all(count <= fleet.most(name, 60) for name, count in fleet.bound().items())


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"draining": True}, "draining"),
        ({"quarantined": "wrong weights"}, "quarantined"),
        ({"loaded": ()}, "version"),
    ],
)
async def test_a_worker_that_may_not_serve_loses_its_sessions(fleet: Fleet, change: dict[str, Any], cause: str) -> None:
    where = (await fleet.place("s")).worker
    assert where is not None
    before = metrics.REBINDS.labels(cause)._value.get()
    fleet[where] = worker(where, **change)
    assert (await fleet.place("s")).worker not in (where, None)
    assert metrics.REBINDS.labels(cause)._value.get() == before + 1
    assert fleet.bound()[where] == 0


async def test_the_version_a_turn_needs_decides(fleet: Fleet) -> None:
    fleet["w2"] = worker("w2", version=2)
    exact = Need(POLICY, WeightConstraint(rule=VersionRule.EXACT, value=2))
    fresh = Need(POLICY, WeightConstraint(rule=VersionRule.MAX_STALENESS, value=0))
    assert (await fleet.place("s", exact)).worker == "w2"
    moved = (await fleet.place("s", fresh)).worker
    assert moved in ("w0", "w1"), "w2 is one version behind"
    assert (await fleet.place("s")).worker == moved
    newer = Need(POLICY, WeightConstraint(rule=VersionRule.MIN, value=9))
    assert (await fleet.place("s", newer)) == Placed(None, "rg.0.jobs.pool.p1.interactive.acme")
    assert (await fleet.place("s")).worker == moved, "the binding is not lost over it"


async def test_a_saturated_worker_gives_sessions_to_idle_ones_within_their_bound(fleet: Fleet) -> None:
    where = {number: str((await fleet.place(f"s{number}")).worker) for number in range(30)}
    fleet["w0"] = worker("w0", busy=8, waiting=8)
    fleet["w1"] = worker("w1", busy=8, waiting=2)
    for number, before in where.items():
        placed = (await fleet.place(f"s{number}")).worker
        assert placed == before or (before == "w0" and placed == "w2"), "only from the saturated to the idle one"
    counts = fleet.bound()
    assert counts["w2"] == fleet.most("w2", 30) > Counter(where.values())["w2"], "as many as its bound lets it take"
    fleet["w2"] = worker("w2", busy=8)
    for number in range(30):
        await fleet.place(f"s{number}")
    assert fleet.bound() == counts, "no slot is free elsewhere: nobody moves"


async def test_a_session_that_ends_makes_room(fleet: Fleet) -> None:
    for number in range(12):
        await fleet.place(f"s{number}")
    for number in range(12):
        await fleet.release(f"s{number}")
    await fleet.release("never-there")
    assert await fleet.replicas[0].bound_to(POOL, TENANT, "s1") is None
    assert fleet.bound().total() == 0
    client = fleet.valkey.client()
    assert client.keys("rg:*") == []
    client.close()


async def test_bindings_live_as_long_as_turns_come(fleet: Fleet) -> None:
    placed = await fleet.place("s")
    assert await fleet.replicas[1].bound_to(POOL, TENANT, "s") == placed.worker
    client = fleet.valkey.client()
    for key in (keys.affinity(POOL, TENANT, "s"), keys.bound(POOL, str(placed.worker))):
        assert 0 < int(client.ttl(key)) <= keys.AFFINITY_TTL_S
    client.close()


async def test_redis_emptied_or_away_still_places_every_turn(fleet: Fleet) -> None:
    """A25: the pure hash, the same from every replica, and no error."""
    first = {number: (await fleet.place(f"s{number}")).worker for number in range(30)}
    fleet.valkey.flush_all()
    for number, before in first.items():
        assert (await fleet.place(f"s{number}", last=before)).worker == before, "who knows the last worker keeps it"
    with valkey_server() as gone:
        away = Fleet(gone, *fleet.values())
        gone.kill()
        for number in range(30):
            order = ranked(f"{TENANT}:s{number}", {name: one.slots for name, one in away.items()})
            assert [(await away.place(f"s{number}")).worker for _ in range(2)] == order[:1] * 2
        await away.release("s1")
        await away.close()


async def test_a_long_name_is_a_session_like_any_other(fleet: Fleet) -> None:
    names = ["x" * 5000 + str(number) for number in range(9)]
    first = [await fleet.place(name) for name in names]
    assert [await fleet.place(name) for name in names] == first
    assert fleet.bound().total() == 9
