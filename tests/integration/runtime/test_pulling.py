"""The puller against a real server: standing credit, nothing beyond what was asked, restarts survived."""

from __future__ import annotations

import asyncio

import pytest
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime import pulling
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import ConsumerGone
from rollgrid_runtime.provision import ensure_consumer, provision
from rollgrid_runtime.pulling import Delivery, Puller

from tests.support.servers import NatsServer
from tests.support.waiting import until

LANE = PoolLane("ptest", Priority.NORMAL, "acme")
SUBJECT = subjects.jobs_pool(*LANE)
CONSUMER = topology.pool_consumer(LANE)


@pytest.fixture
async def puller(bus: Bus) -> Puller:
    await ensure_consumer(bus, CONSUMER)
    return bus.puller(CONSUMER)


async def publish(bus: Bus, count: int) -> None:
    for number in range(count):
        await bus.publish(SUBJECT, str(number).encode())


async def waiting(bus: Bus) -> int:
    """Messages the server has sent and nobody acknowledged."""
    return (await bus.js.consumer_info("RG_JOBS", CONSUMER.durable)).num_ack_pending or 0


async def test_messages_come_in_order_with_their_facts(bus: Bus, puller: Puller) -> None:
    await publish(bus, 3)
    got: list[Delivery] = []
    while len(got) < 3:
        got += await puller.fetch(3, 5)
    assert [d.data for d in got] == [b"0", b"1", b"2"]
    assert [d.sequence for d in got] == [1, 2, 3]
    assert [d.delivered for d in got] == [1, 1, 1]
    assert [d.pending for d in got] == [2, 1, 0]
    assert got[0].subject == SUBJECT
    assert got[0].timestamp <= got[2].timestamp


async def test_fetch_gives_what_is_there_without_waiting_for_the_rest(bus: Bus, puller: Puller) -> None:
    await publish(bus, 2)
    got: list[Delivery] = []
    async with asyncio.timeout(5):  # far below a request's life at the server
        while len(got) < 2:
            got += await puller.fetch(100, 20)
    assert len(got) == 2


async def test_an_empty_wait_gives_nothing_and_keeps_its_credit(bus: Bus, puller: Puller) -> None:
    assert await puller.fetch(4, 0.05) == []
    await publish(bus, 1)  # reaches the request that is still open
    assert [d.data for d in await puller.fetch(4, 5)] == [b"0"]


async def test_i8_the_server_never_sends_more_than_was_asked(bus: Bus, puller: Puller) -> None:
    await publish(bus, 50)
    taken = 0
    for limit in (1, 3, 2, 5, 1):
        got = await puller.fetch(limit, 5)
        assert 0 < len(got) <= limit
        taken += len(got)
        await bus.client.flush()
        assert await waiting(bus) <= taken + limit
    assert puller.held <= 5


async def test_concurrent_credit_does_not_add_up(bus: Bus, puller: Puller) -> None:
    for _ in range(20):
        assert await puller.fetch(5, 0.01) == []
    await publish(bus, 30)
    await puller.fetch(5, 5)
    await bus.client.flush()
    assert await waiting(bus) <= 10


async def test_expired_requests_are_made_again(bus: Bus, puller: Puller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulling, "REQUEST_EXPIRES_S", 0.3)
    assert await puller.fetch(4, 1.0) == []
    await publish(bus, 1)
    got: list[Delivery] = []
    async with asyncio.timeout(10):
        while not got:
            got = await puller.fetch(4, 0.5)
    assert got[0].data == b"0"


async def test_nak_delay_and_ack_wait_bring_a_message_back(nats: NatsServer, bus: Bus) -> None:
    quick = await Bus.connect(nats.settings(ack_wait_s=1.0), "quick")
    await ensure_consumer(quick, CONSUMER)
    puller = quick.puller(CONSUMER)
    await publish(bus, 1)
    (first,) = await puller.fetch(1, 5)
    await first.nak(0.2)
    (second,) = await puller.fetch(1, 5)
    assert (second.sequence, second.delivered) == (1, 2)
    (third,) = await puller.fetch(1, 10)  # nobody heartbeats
    assert third.delivered == 3
    for _ in range(20):
        await asyncio.sleep(0.1)
        await third.in_progress()
    assert await puller.fetch(1, 0.1) == []  # the heartbeat held it for twice the ack-wait
    await third.ack_sync()
    assert await puller.fetch(1, 2.0) == []
    await quick.close()


async def test_a_deleted_consumer_is_said_so(bus: Bus, puller: Puller) -> None:
    assert await puller.fetch(1, 0.05) == []
    await bus.delete_consumer("RG_JOBS", CONSUMER.durable)
    with pytest.raises(ConsumerGone):
        await puller.fetch(1, 5)


async def test_a_consumer_that_never_was_is_said_so(bus: Bus) -> None:
    with pytest.raises(ConsumerGone):
        await bus.puller(CONSUMER).fetch(1, 5)


async def test_a_message_deleted_by_sequence_leaves_every_lane(bus: Bus, puller: Puller) -> None:
    await publish(bus, 3)
    await bus.delete_message("RG_JOBS", 2)
    got: list[Delivery] = []
    while len(got) < 2:
        got += await puller.fetch(3, 5)
    assert [d.sequence for d in got] == [1, 3]


async def test_closing_gives_back_what_was_not_handed_over(bus: Bus, puller: Puller) -> None:
    await puller.fetch(10, 0.05)
    await publish(bus, 4)
    await until(lambda: puller.held >= 4, 30, "four deliveries")
    await puller.close()
    again = bus.puller(CONSUMER)
    got: list[Delivery] = []
    while len(got) < 4:
        got += await again.fetch(4, 5)
    assert sorted(d.sequence for d in got) == [1, 2, 3, 4]


async def test_reading_goes_on_over_server_kills(nats: NatsServer, blobs: Blobs) -> None:
    """Everything published is read and acknowledged once the server is back, whatever was in flight."""
    bus = await Bus.connect(nats.settings(ack_wait_s=1.0), "reader", blobs)
    await provision(bus)
    await ensure_consumer(bus, CONSUMER)
    writer = await Bus.connect(nats.settings(), "writer", blobs)
    puller = bus.puller(CONSUMER)
    seen: set[bytes] = set()
    total = 60

    async def write() -> None:
        for number in range(total):
            await writer.publish(SUBJECT, str(number).encode(), msg_id=str(number), timeout_s=60)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(write())
    kills = iter([10, 30, 50])
    kill_at = next(kills)
    async with asyncio.timeout(90):
        while len(seen) < total:
            for delivery in await puller.fetch(8, 0.5):
                seen.add(delivery.data)
                await delivery.ack()
            if len(seen) >= kill_at:
                nats.kill()
                nats.start().wait_ready(10)
                kill_at = next(kills, total + 1)
    await task
    await writer.close()
    await bus.close()
