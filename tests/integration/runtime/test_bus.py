"""The bus against a real server: durable publishing, compare-and-set, bounds, claim checks."""

from __future__ import annotations

import asyncio
import hashlib

import pytest
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.fleet import CancelWork, LedgerAnswer, LedgerQuery
from rollgrid_contracts.jobs import Priority, SampleGroup, SamplingParams
from rollgrid_contracts.samples import BlobRef, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import Header
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import ATOMIC_BATCH_MIN, Bus, Outgoing
from rollgrid_runtime.errors import BusError, Conflict, QueueFull, StorageError
from rollgrid_runtime.provision import ensure_consumer, ensure_stream, provision
from rollgrid_runtime.settings import NatsSettings

from tests.support.servers import NatsServer
from tests.support.waiting import until

LANE = PoolLane("ptest", Priority.NORMAL, "acme")
JOBS = subjects.jobs_pool(*LANE)
RUN = subjects.trajectories("acme", "run-1")


def job(position: int = 0, prompt: int = 4) -> SampleGroup:
    return SampleGroup(
        tenant="acme",
        run="run-1",
        batch_id="b1",
        group_id=f"g{position}",
        position=position,
        n=1,
        indexes=(0,),
        policy="p",
        pool=LANE.pool,
        prompt_token_ids=TokenIds.of(range(prompt)),
        sampling=SamplingParams(max_tokens=1),
        created_at=0.0,
        deadline=1.0,
    )


def outgoing(subject: str, count: int, start: int = 0) -> list[Outgoing]:
    return [Outgoing(subject, job(start + i), {Header.GROUP.value: f"g{start + i}"}) for i in range(count)]


async def count(bus: Bus, stream: str) -> int:
    return (await bus.stream_info(stream)).state.messages


async def test_a_publish_is_stored_with_its_headers(bus: Bus) -> None:
    ack = await bus.publish(JOBS, job(), headers={Header.GROUP.value: "g0"})
    stored = await bus.stored("RG_JOBS", ack.sequence)
    assert stored is not None
    assert stored.headers == {"Rg-Schema": "1", "Content-Type": codec.MSGPACK, "Rg-Group": "g0"}
    assert codec.decode(stored.data or b"", SampleGroup) == job()


async def test_i2_the_same_msg_id_is_stored_once_and_names_the_first(bus: Bus) -> None:
    first = await bus.publish(JOBS, job(), msg_id="m")
    second = await bus.publish(JOBS, job(1), msg_id="m")
    assert second == (first.sequence, True)
    assert await count(bus, "RG_JOBS") == 1


async def test_compare_and_set_lets_one_writer_through(bus: Bus) -> None:
    await bus.publish(RUN, b"first", expected_last=0)

    async def contend(name: int) -> bool:
        try:
            await bus.publish(RUN, str(name).encode(), expected_last=1)
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*map(contend, range(16)))) == 1
    assert await count(bus, "RG_TRAJECTORIES") == 2


async def test_expected_last_is_of_the_subject_not_of_the_stream(bus: Bus) -> None:
    other = subjects.trajectories("acme", "run-2")
    first = await bus.publish(RUN, b"a", expected_last=0)
    await bus.publish(other, b"b", expected_last=0)
    await bus.publish(RUN, b"c", expected_last=first.sequence)


@pytest.mark.parametrize("size", [1, ATOMIC_BATCH_MIN - 1, ATOMIC_BATCH_MIN, 64, 501, 1004])
async def test_a_batch_keeps_order_and_gives_each_sequence(bus: Bus, size: int) -> None:
    sequences = await bus.publish_batch(outgoing(JOBS, size))
    assert sequences == list(range(1, size + 1))
    for position in (0, size - 1):
        stored = await bus.stored("RG_JOBS", sequences[position])
        assert stored is not None
        assert codec.decode(stored.data or b"", SampleGroup).position == position


@pytest.mark.parametrize("size", [2, ATOMIC_BATCH_MIN, 501])
async def test_a_batch_is_guarded_by_its_first_message(bus: Bus, size: int) -> None:
    sequences = await bus.publish_batch(outgoing(RUN, size), expected_last=0)
    with pytest.raises(Conflict):
        await bus.publish_batch(outgoing(RUN, size), expected_last=sequences[-1] - 1)
    assert await count(bus, "RG_TRAJECTORIES") == size
    assert (await bus.publish_batch(outgoing(RUN, size), expected_last=sequences[-1]))[0] == size + 1


async def test_i8_a_full_stream_refuses_and_stores_nothing(nats: NatsServer, blobs: Blobs) -> None:
    bus = await Bus.connect(nats.settings(jobs_max_bytes=20_000), "full", blobs)
    await provision(bus)
    accepted = 0

    async def fill() -> None:
        nonlocal accepted
        for position in range(1000):
            await bus.publish(JOBS, job(position, prompt=500))
            accepted += 1

    with pytest.raises(QueueFull) as refusal:
        await fill()
    assert refusal.value.http_status == 429
    assert refusal.value.retry_after_s
    assert await count(bus, "RG_JOBS") == accepted > 0
    with pytest.raises(QueueFull):
        await bus.publish_batch(outgoing(JOBS, 8))
    assert await count(bus, "RG_JOBS") <= accepted + 8
    await bus.close()


async def test_i8_a_full_stream_takes_no_part_of_an_atomic_batch(nats: NatsServer, blobs: Blobs) -> None:
    bus = await Bus.connect(nats.settings(jobs_max_bytes=20_000), "full", blobs)
    await provision(bus)
    items = [Outgoing(JOBS, job(i, prompt=500), {}) for i in range(32)]
    with pytest.raises(QueueFull):
        await bus.publish_batch(items)
    assert await count(bus, "RG_JOBS") == 0
    await bus.close()


async def test_a_large_payload_travels_as_a_claim_check(bus: Bus, blobs: Blobs) -> None:
    await ensure_consumer(bus, topology.pool_consumer(LANE))
    large = job(prompt=100_000)
    ack = await bus.publish(JOBS, large)
    stored = await bus.stored("RG_JOBS", ack.sequence)
    assert stored is not None
    reference = codec.decode(stored.data or b"", BlobRef)
    assert reference.sha256 == hashlib.sha256(codec.encode(large)).hexdigest()
    assert (stored.headers or {})["Rg-Claim"] == reference.sha256
    (delivery,) = await bus.puller(topology.pool_consumer(LANE)).fetch(1, 5)
    assert await delivery.message(SampleGroup) == large
    await blobs.put(reference.key, b"altered")
    with pytest.raises(StorageError, match="digest"):
        await delivery.message(SampleGroup)
    await blobs.delete(reference.key)
    with pytest.raises(StorageError, match="gone"):
        await delivery.message(SampleGroup)


async def test_large_payloads_in_a_batch(bus: Bus) -> None:
    await ensure_consumer(bus, topology.pool_consumer(LANE))
    items = [Outgoing(JOBS, job(i, prompt=80_000 if i % 2 else 4), {}) for i in range(8)]
    await bus.publish_batch(items)
    puller = bus.puller(topology.pool_consumer(LANE))
    got: list[SampleGroup] = []
    while len(got) < 8:
        got += [await d.message(SampleGroup) for d in await puller.fetch(8, 5)]
    assert got == [item.message for item in items]


async def test_a_client_without_s3_says_what_it_needs(nats: NatsServer, bus: Bus) -> None:
    bare = await Bus.connect(nats.settings(), "bare")
    with pytest.raises(BusError, match="S3"):
        await bare.publish(JOBS, job(prompt=100_000))
    await bare.close()


async def test_core_request_and_subscription(bus: Bus) -> None:
    async def answer(query: LedgerQuery, reply: str) -> None:
        await bus.respond(reply, LedgerAnswer(epoch=len(query.group_ids)))

    await bus.subscribe(subjects.LEDGER_QUERY, LedgerQuery, answer)
    await bus.publish_raw(subjects.LEDGER_QUERY, b"\xc1 not msgpack")  # must not end the subscription
    asked = LedgerQuery(group_ids=("g1", "g2"))
    assert (await bus.request(subjects.LEDGER_QUERY, asked, LedgerAnswer, 5)).epoch == 2


async def test_nobody_answering_is_a_bus_error(bus: Bus) -> None:
    with pytest.raises(BusError):
        await bus.request("rg.nobody", CancelWork(group_ids=()), LedgerAnswer, 1)


async def test_a_publish_rides_out_a_server_restart(nats: NatsServer, bus: Bus) -> None:
    """Accepted means acked: whatever was acknowledged is there after kill -9, and nothing raises."""
    acked: list[int] = []
    stop = asyncio.Event()

    async def keep_publishing() -> None:
        while not stop.is_set():
            position = len(acked)
            acked.append((await bus.publish(JOBS, job(position), msg_id=f"m{position}", timeout_s=30)).sequence)

    writer = asyncio.create_task(keep_publishing())
    for _ in range(2):
        before = len(acked)
        await until(lambda: len(acked) >= before + 20, 30, "20 more publishes")  # noqa: B023
        nats.kill()
        nats.start().wait_ready(10)
    before = len(acked)
    await until(lambda: len(acked) >= before + 20, 30, "20 more publishes")
    stop.set()
    await writer
    for position, sequence in enumerate(acked):
        stored = await bus.stored("RG_JOBS", sequence)
        assert stored is not None
        assert codec.decode(stored.data or b"", SampleGroup).position == position
    assert await count(bus, "RG_JOBS") == len(acked)


async def test_a_compare_and_set_is_never_retried_blindly(nats: NatsServer, bus: Bus) -> None:
    nats.kill()
    with pytest.raises(BusError):
        await bus.publish(RUN, b"x", expected_last=0, timeout_s=2)
    nats.start().wait_ready(10)
    await until(lambda: bus.connected, 20, "the client's reconnection")
    assert await count(bus, "RG_TRAJECTORIES") == 0


async def test_connecting_to_nothing_is_a_bus_error() -> None:
    with pytest.raises(BusError):
        await Bus.connect(NatsSettings(url="nats://127.0.0.1:9"), "nobody")


async def test_reading_what_is_gone_gives_none(bus: Bus) -> None:
    ack = await bus.publish(JOBS, job())
    assert await bus.delete_message("RG_JOBS", ack.sequence)
    assert not await bus.delete_message("RG_JOBS", ack.sequence)
    assert await bus.stored("RG_JOBS", ack.sequence) is None
    assert await bus.last_stored("RG_JOBS", JOBS) is None
    await bus.delete_consumer("RG_JOBS", "never-was")


async def test_purge_below_keeps_the_rest(bus: Bus) -> None:
    event = SamplesFinished(
        tenant="acme",
        run="run-1",
        batch_id="b1",
        group_id="g1",
        n=1,
        policy="p",
        job_seq=1,
        samples=(Sample(index=0, status=SampleStatus.SUCCEEDED),),
    )
    for _ in range(10):
        await bus.publish(subjects.samples(ScorerKind.DONE, "acme"), event)
    await bus.purge_below("RG_SAMPLES", 8)
    assert (await bus.stream_info("RG_SAMPLES")).state.first_seq == 8
    assert await bus.stored("RG_SAMPLES", 7) is None
    assert await bus.stored("RG_SAMPLES", 8) is not None


# -- provisioning ---------------------------------------------------------------------------------------


async def test_provisioning_again_changes_nothing(bus: Bus) -> None:
    await bus.publish(JOBS, job())
    before = {s.name: (await bus.stream_info(s.name)).config for s in topology.STREAMS}
    await asyncio.gather(*(provision(bus) for _ in range(4)))
    assert {s.name: (await bus.stream_info(s.name)).config for s in topology.STREAMS} == before
    assert await bus.consumer_names("RG_JOBS") == ["ledger-0"]
    assert await count(bus, "RG_JOBS") == 1


async def test_jobs_are_never_without_a_ledger_consumer(bus: Bus) -> None:
    """An interest stream without a consumer acknowledges a publish and drops it (measured)."""
    assert await bus.consumer_names("RG_JOBS") == ["ledger-0"]
    await bus.publish(JOBS, job())
    assert await count(bus, "RG_JOBS") == 1
    await ensure_consumer(bus, topology.ledger_consumer(1))
    await bus.delete_consumer("RG_JOBS", "ledger-0")
    await provision(bus)  # an epoch is there: the first one is not brought back
    assert await bus.consumer_names("RG_JOBS") == ["ledger-1"]
    assert await count(bus, "RG_JOBS") == 1
    (held,) = await bus.puller(topology.ledger_consumer(1)).fetch(1, 5)
    assert held.sequence == 1


async def test_a_job_leaves_when_the_ledger_and_its_pool_have_acked(bus: Bus) -> None:
    ledger, pool = topology.ledger_consumer(0), topology.pool_consumer(LANE)
    await ensure_consumer(bus, pool)
    await bus.publish(JOBS, job())
    (mine,) = await bus.puller(ledger).fetch(1, 5)
    (work,) = await bus.puller(pool).fetch(1, 5)
    await work.ack_sync()
    assert await count(bus, "RG_JOBS") == 1
    await mine.ack_sync()
    assert await count(bus, "RG_JOBS") == 0


async def test_a_bound_can_be_moved_while_messages_lie_there(bus: Bus, nats: NatsServer) -> None:
    await bus.publish(JOBS, job())
    tight = await Bus.connect(nats.settings(jobs_max_bytes=1_000_000), "tight")
    await ensure_stream(tight, topology.JOBS)
    assert (await bus.stream_info("RG_JOBS")).config.max_bytes == 1_000_000
    assert await count(bus, "RG_JOBS") == 1
    await tight.close()


async def test_all_durables_are_listed_over_pages(bus: Bus) -> None:
    lanes = [PoolLane("ptest", Priority.BULK, f"t{i}") for i in range(300)]
    for lane in lanes:
        await ensure_consumer(bus, topology.pool_consumer(lane))
    names = await bus.consumer_names("RG_JOBS")
    assert {topology.pool_consumer(lane).durable for lane in lanes} | {"ledger-0"} == set(names)
    assert len(names) == 301
