"""Publishes that share their flushes: each is stored once and gets its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from rollgrid_contracts import subjects
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.topology import SAMPLES
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.group_commit import GroupCommit

SUBJECT = subjects.samples(ScorerKind.DONE, "acme")


@pytest.fixture
async def commit(bus: Bus) -> AsyncIterator[GroupCommit]:
    made = GroupCommit(bus)
    task = asyncio.create_task(made.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_each_message_is_stored_once_under_the_sequence_it_was_told(bus: Bus, commit: GroupCommit) -> None:
    payloads = [b"m%d" % number for number in range(300)]
    acks = await asyncio.gather(*(commit.publish(SUBJECT, p, msg_id=p.decode()) for p in payloads))
    assert sorted(ack.sequence for ack in acks) == list(range(1, 301))
    for payload, ack in zip(payloads, acks, strict=True):
        stored = await bus.stored(SAMPLES.name, ack.sequence)
        assert stored is not None
        assert (stored.data, ack.duplicate) == (payload, False)


async def test_a_duplicate_in_a_round_harms_no_neighbour(bus: Bus, commit: GroupCommit) -> None:
    first = await asyncio.gather(*(commit.publish(SUBJECT, b"x", msg_id=f"a{n}") for n in range(20)))
    again = await asyncio.gather(*(commit.publish(SUBJECT, b"x", msg_id=f"a{n}") for n in range(10, 40)))
    assert [ack.duplicate for ack in again] == [True] * 10 + [False] * 20
    assert [ack.sequence for ack in again[:10]] == [ack.sequence for ack in first[10:]]
    assert (await bus.stream_info(SAMPLES.name)).state.messages == 40


async def test_large_messages_are_split_over_rounds(bus: Bus, commit: GroupCommit) -> None:
    large = bytes(200_000)
    await asyncio.gather(*(commit.publish(SUBJECT, large, msg_id=f"l{n}") for n in range(40)))
    assert (await bus.stream_info(SAMPLES.name)).state.messages == 40


async def test_whoever_gives_up_takes_nobody_along(commit: GroupCommit) -> None:
    tasks = [asyncio.create_task(commit.publish(SUBJECT, b"x", msg_id=f"g{n}")) for n in range(30)]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[::3])
    assert not any(isinstance(outcome, BaseException) for n, outcome in enumerate(outcomes) if n % 3)


async def test_its_end_ends_those_who_wait(bus: Bus) -> None:
    made = GroupCommit(bus)
    runner = asyncio.create_task(made.run())
    waiting = asyncio.create_task(made.publish("rg.0.nobody.listens", b"x", msg_id="n"))
    await asyncio.sleep(0)
    runner.cancel()
    with pytest.raises((asyncio.CancelledError, BusError)):
        async with asyncio.timeout(30):
            await waiting
