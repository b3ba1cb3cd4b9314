"""How versions reach the workers: checkpoint-sync as a process, leases and states as they are in NATS."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rollgrid_contracts import ids, topology
from rollgrid_contracts.checkpoints import OnDeadline, PolicyState, Rollout, RolloutRequest
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table

from tests.integration.checkpoint_sync.leases import Leases, leases
from tests.integration.checkpoint_sync.severed import severed
from tests.integration.checkpoint_sync.test_checkpoint_sync_service import (
    KEY,
    current,
    desired,
    publish,
    refusal,
    weights_only,
)
from tests.support.servers import NatsServer, SeaweedServer, ValkeyServer
from tests.support.services import ServiceProcess, run_service
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until, wait_until

POOL = ids.pool_id(KEY, "float32", "cpu", "local")
ROLLOUT = {"canary": 1, "canary_s": 0.3, "at_once": 1, "deadline_s": 300}


@pytest.fixture
def env(stack_env: dict[str, str]) -> dict[str, str]:
    return settings(stack_env, rollout=ROLLOUT)


@pytest.fixture
def table(bus: Bus) -> Table[PolicyState]:
    return Table(bus, topology.POLICIES, PolicyState)


def settings(env: dict[str, str], **model: object) -> dict[str, str]:
    models = [{"name": "tiny", "path": str(tiny_model()), **model}]
    prefix = "ROLLGRID_CHECKPOINT_SYNC_"
    return {**env, f"{prefix}MODELS": json.dumps(models), f"{prefix}LIST_EVERY_S": "300"}


async def reached(table: Table[PolicyState], what: Callable[[PolicyState], bool], why: str) -> PolicyState:
    async def there() -> bool:
        return what((await current(table)).value)

    await until(there, 60, why, every_s=0.05)
    return (await current(table)).value


async def named(table: Table[PolicyState], count: int) -> Rollout:
    def enough(state: PolicyState) -> bool:
        return state.rollout is not None and len(state.rollout.workers) >= count

    found = (await reached(table, enough, f"{count} workers are named")).rollout
    assert found is not None
    assert len(found.workers) == count
    return found


def value(process: ServiceProcess, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(process.metrics())
        for sample in family.samples
        if sample.name == f"rollgrid_checkpoint_sync_{name}" and labels.items() <= sample.labels.items()
    )


async def test_a44_canary_then_one_by_one_and_killed_in_mid_plan(
    env: dict[str, str], bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    good = weights_only(tmp_path / "one", 1)
    async with leases(bus, POOL) as workers:
        for name in ("w-1", "w-2", "w-3"):
            await workers.put(name, 0)
        with run_service("checkpoint_sync", env) as sync:
            await publish(bus, blobs, good, 1)
            (canary,) = (await named(table, 1)).workers
            sync.kill()
            await workers.obey(canary, (await current(table)).value)
            sync.start().wait_ready(60)
            second = (await named(table, 2)).workers[1]
            state = (await current(table)).value
            assert (state.desired, state.history) == (1, (0, 1))
            await workers.put("w-9", 0)
            await _finish(workers, table, second)
            state = await reached(table, lambda state: state.rollout is None, "the rollout is over")
            assert (state.desired, state.history) == (1, (0, 1))
            assert set(workers.held) == {name for name in workers.held if workers.version(name) == 1}
            wait_until(lambda: value(sync, "live_lag_seconds_count") == 1, 30, "it was seen everywhere")
            assert value(sync, "rollouts_total", outcome="done") == 1
            assert value(sync, "workers", runs="desired") == 4
            await _goes_back(sync, bus, blobs, table, workers, good)
            await _is_overdue(sync, bus, blobs, table, good)


async def _finish(workers: Leases, table: Table[PolicyState], first: str) -> None:
    """Workers apply it when they are named; meanwhile never more than one of those named is without it."""
    waiting = first
    while True:
        await workers.obey(waiting, (await current(table)).value)
        left = {name for name in workers.held if workers.version(name) == 0}
        if not left:
            return
        (waiting,) = left & set((await reached(table, partial(_names, left), "the next")).rollout.workers)  # type: ignore[union-attr]


def _names(some: set[str], state: PolicyState) -> bool:
    return state.rollout is not None and not some.isdisjoint(state.rollout.workers)


async def _goes_back(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], workers: Leases, good: Path
) -> None:
    """A canary that refuses the version ends it for all, with the reason where its publisher looks."""
    await publish(bus, blobs, good, 2)
    (canary,) = (await named(table, 1)).workers
    await workers.change(canary, weights_problem="version 2: the engine refused it")
    info = await refusal(blobs, 2)
    assert (info.code, info.boundary, info.field) == (ErrorCode.ENGINE_ERROR, Boundary.WEIGHTS, "rollout")
    assert "the engine refused it" in info.message
    state = await reached(table, lambda state: state.rollout is None, "it went back")
    assert (state.desired, state.newest, state.history) == (1, 2, (0, 1, 2, 1))
    await workers.change(canary, weights_problem=None)
    wait_until(lambda: value(sync, "rollouts_total", outcome="failed") == 1, 30, "counted")


async def _is_overdue(sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], good: Path) -> None:
    """A60.  The publisher's own terms: everywhere at once, and the next one soon."""
    await publish(bus, blobs, good, 3, rollout=RolloutRequest(), next_within_s=0.01)
    state = await desired(table, 3)
    assert state.rollout is None
    assert state.refresh_due == pytest.approx(state.newest_at + 0.01)
    wait_until(lambda: value(sync, "refresh_overdue") == 1, 30, "the next one is overdue")
    assert sync.is_ready()
    await publish(bus, blobs, good, 4, rollout=RolloutRequest(), next_within_s=3600.0)
    await desired(table, 4)
    wait_until(lambda: value(sync, "refresh_overdue") == 0, 30, "it has come")
    assert sync.log_tail(2000).count("refresh_overdue") == 1


async def test_two_publishers_and_two_checkpoint_syncs(
    env: dict[str, str], bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    """Whatever the order: each version is adopted once or refused, never both, and what is adopted only grows."""
    good = weights_only(tmp_path / "one", 1)
    order = [1, 2, 3, 4, 5, 6]
    random.Random(7).shuffle(order)
    deadline = RolloutRequest(canary=1, deadline_s=1.0, on_deadline=OnDeadline.ROLL_BACK)
    with ExitStack() as stack:
        for name in ("sync-a", "sync-b"):
            stack.enter_context(run_service("checkpoint_sync", env, name=name))
        async with leases(bus, POOL) as workers:
            await workers.put("w-1", 0)
            await asyncio.gather(
                *(publish(bus, blobs, good, n, rollout=deadline if n == 6 else RolloutRequest()) for n in order)
            )

            async def decided() -> bool:
                keys = await blobs.keys("checkpoints/shared/tiny/")
                refused = {int(key.split("/")[3]) for key in keys if key.endswith("/refused.json")}
                return {*(await current(table)).value.history, *refused} >= set(order)

            await until(decided, 90, "all versions are decided", every_s=0.2)
            info = await refusal(blobs, 6)
            assert (info.code, info.limit) == (ErrorCode.EXPIRED, "deadline_s=1")
            state = await reached(table, lambda state: state.rollout is None, "the last has gone back")
            assert state.newest == 6
            assert state.history[-2] == 6, "two saw the deadline pass, and it went back once"
            assert state.desired == state.history[-3]
            rising = list(state.history[:-1])
            assert rising == sorted(set(rising))
            for version in order:
                key = f"checkpoints/shared/tiny/{version}/refused.json"
                assert (await blobs.get(key) is not None) == (version not in state.history or version == 6)


async def test_s3_goes_down_in_mid_verification(
    nats: NatsServer, valkey: ValkeyServer, s3_server: SeaweedServer, bus: Bus, blobs: Blobs, tmp_path: Path
) -> None:
    """The connection is lost while the weights are being read: nothing is refused, nothing runs, and then it does."""
    good = weights_only(tmp_path / "one", 1)
    table = Table(bus, topology.POLICIES, PolicyState)
    async with severed(s3_server.port, b"/1/") as link:
        env = {**nats.env(), **valkey.env(), **s3_server.env(blobs.bucket)}
        env["ROLLGRID_S3_ENDPOINT"] = f"http://127.0.0.1:{link.port}"
        with ServiceProcess("checkpoint_sync", tmp_path, settings(env)) as sync:
            await asyncio.to_thread(lambda: sync.start().wait_ready(60))  # its S3 passes through this loop
            link.armed = True
            await publish(bus, blobs, good, 1)
            await until(lambda: link.cut > 0, 60, "S3 is cut off while a file is read")
            problems: dict[str, str] = {}

            async def told() -> bool:
                problems.update((await asyncio.to_thread(sync.readiness))[1].get("problems", {}))
                return f"policy {KEY}" in problems

            await until(told, 60, "the policy is a problem", every_s=0.2)
            assert "S3" in problems[f"policy {KEY}"]
            assert (await current(table)).value.desired == 0
            link.armed = False
            await desired(table, 1)
            assert await blobs.get("checkpoints/shared/tiny/1/refused.json") is None
            await until(lambda: asyncio.to_thread(sync.is_ready), 60, "ready again", every_s=0.2)
