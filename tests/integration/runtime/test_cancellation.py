"""A cancelled loop of requests ends, whenever the cancel comes: without that no service stops reliably."""

from __future__ import annotations

import asyncio
import random

from rollgrid_contracts.topology import JOBS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.state import State

from tests.support.servers import ValkeyServer


async def test_no_request_swallows_a_cancellation(bus: Bus) -> None:
    async def ask_for_ever() -> None:
        while True:
            await bus.stream_info(JOBS.name)

    for _ in range(200):
        task = asyncio.create_task(ask_for_ever())
        await asyncio.sleep(random.random() * 0.004)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=10)
        assert done
        assert task.cancelled()


async def test_no_script_swallows_a_cancellation(valkey: ValkeyServer) -> None:
    state = State(valkey.settings())
    script = state.script("return redis.call('SET', KEYS[1], ARGV[1])")

    async def write_for_ever(name: str) -> None:
        while True:
            await script([name], b"x" * 2000)

    for _ in range(20):
        tasks = {asyncio.create_task(write_for_ever(f"k{number}")) for number in range(16)}
        await asyncio.sleep(random.random() * 0.02)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.wait(tasks, timeout=10)
        assert len(done) == len(tasks)
        assert all(task.cancelled() for task in tasks)
    await state.close()


async def test_requests_work_behind_a_failed_task_group(bus: Bus) -> None:
    """Such a group leaves its parent task with a pending count of cancels (Python 3.11)."""

    async def fail() -> None:
        raise LookupError

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())
    except* LookupError:
        pass
    assert (await bus.stream_info(JOBS.name)).config.name == JOBS.name
