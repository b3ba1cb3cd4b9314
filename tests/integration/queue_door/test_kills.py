"""I1, I2: ingest killed between storing jobs and acknowledging the submission; the messages come again."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.trajectories import CloseReason

from tests.support.stack import TENANT, scripted, stack

from .queue import Queue, body, queue_of
from .test_every_message_ends import settled

MESSAGES, KILLS = 120, 4


@pytest.mark.slow
async def test_i1_killed_ingests_close_every_group_exactly_once() -> None:
    """Many small submissions, keyed and not, right and refused, and ingest killed again and again meanwhile."""
    with stack(scripted(samplers=1, slots=64, ack_wait_s=3.0)) as pipe:
        async with queue_of(pipe) as queue:
            rng = random.Random(7)
            publishing = asyncio.create_task(publish(queue))
            for _ in range(KILLS):
                seen = await queue.waiting()
                await moved(queue, seen)
                await asyncio.sleep(rng.uniform(0.0, 0.05))
                pipe["ingest"].kill()
                pipe["ingest"].start()  # by this thread: the process dies with the one that starts it
                await asyncio.to_thread(pipe["ingest"].wait_ready, 60)
            await publishing
            await queue.drained(120)
            closes = await settled(queue)
        right = Counter(close.record.group_id for close in closes if close.record.run == "right")
        keyed = Counter(close.record.group_id for close in closes if close.record.run == "keyed")
        wrong = Counter(close.record.group_id for close in closes if close.record.run == "wrong")
        assert set((right + keyed + wrong).values()) == {1}
        assert len(right) == 2 * MESSAGES
        assert set(keyed) == {ids.group_id(TENANT, "keyed", f"k{number}", 0) for number in range(MESSAGES)}
        assert len(wrong) == MESSAGES // 4
        reasons = {(close.record.run, close.record.reason) for close in closes}
        assert reasons == {
            ("right", CloseReason.COMPLETE), ("keyed", CloseReason.COMPLETE), ("wrong", CloseReason.REJECTED),
        }  # fmt: skip


async def publish(queue: Queue) -> None:
    for number in range(MESSAGES):
        await queue.submit(body("right", tasks=2))
        await queue.submit(body("keyed"), Idempotency_Key=f"k{number}")
        if number % 4 == 0:
            await queue.submit(body("wrong", model="nobody"))


async def moved(queue: Queue, seen: int) -> None:
    """Ingest is at work: the queue has changed since."""
    for _ in range(400):
        if await queue.waiting() != seen:
            return
        await asyncio.sleep(0.005)
