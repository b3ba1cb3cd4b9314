"""I3, I8: S3 away, a full stream, early purges, rival archivers: each close is archived once and read back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.columns import MANIFEST_PREFIX
from rollgrid_runtime.archive import ArchiveReader, decode_manifest
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import provision
from rollgrid_runtime.settings import NatsSettings

from tests.support.servers import NatsServer, SeaweedServer, new_bucket, seaweed_server

from .driver import RUN, TENANT, Driver, logger_in_process, make_job, make_sample

TRAJECTORIES = topology.TRAJECTORIES.name


@pytest.fixture(scope="module")
def own_s3() -> Iterator[SeaweedServer]:
    """An S3 these tests may kill."""
    with seaweed_server() as server:
        yield server


@pytest.fixture
def frail_env(nats: NatsServer, own_s3: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    env = {**nats.env(), **own_s3.env(new_bucket()), "ROLLGRID_S3_TIMEOUT_S": "1"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return env


async def run_groups(driver: Driver, positions: range, *, run: str = RUN, tokens: int = 8) -> None:
    jobs = [make_job(position, n=2, run=run) for position in positions]
    sequences = await driver.submit(jobs)
    await asyncio.gather(
        *(
            driver.finish(j, s, [make_sample(i, tokens=tokens) for i in range(2)])
            for j, s in zip(jobs, sequences, strict=True)
        )
    )
    await driver.ack_lane()


async def eventually(condition: Any, within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not await condition():
            await asyncio.sleep(0.05)


async def test_s3_is_away_for_a_while(
    frail_env: dict[str, str], own_s3: SeaweedServer, nats_settings: NatsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    blobs = Blobs(own_s3.settings(frail_env["ROLLGRID_S3_BUCKET"]))
    await blobs.ensure_bucket()
    bus = await Bus.connect(nats_settings, "test", blobs)
    await provision(bus)
    driver = Driver(bus, blobs)
    await driver.open_lane()
    async with logger_in_process(frail_env, monkeypatch, archive_groups=16) as service:
        await run_groups(driver, range(20))
        await driver.wait_archived(20)
        own_s3.kill()
        await run_groups(driver, range(20, 120))
        assert len(await driver.wait_closed(120)) == 120, "the ledger goes on without S3"

        async def says_so() -> bool:
            return "archive" in await service.problems()

        await eventually(says_so)
        own_s3.start()
        await asyncio.to_thread(own_s3.wait_ready, 40)
        archived = await driver.wait_archived(120, 60)
        assert archived == await driver.closes()

        async def ready() -> bool:
            return await service.problems() == {}

        await eventually(ready)
    await bus.close()
    blobs.close()


@pytest.fixture
async def narrow(
    nats: NatsServer, own_s3: SeaweedServer, frail_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Driver]:
    """A driver on a stream of closes that holds about 300 small groups."""
    monkeypatch.setenv("ROLLGRID_NATS_TRAJECTORIES_MAX_BYTES", str(300 * 1024))
    blobs = Blobs(own_s3.settings(frail_env["ROLLGRID_S3_BUCKET"]))
    await blobs.ensure_bucket()
    bus = await Bus.connect(nats.settings(trajectories_max_bytes=300 * 1024), "test", blobs)
    await provision(bus)
    driver = Driver(bus, blobs)
    await driver.open_lane()
    yield driver
    await bus.close()
    blobs.close()


async def test_i8_a_full_stream_holds_closes_and_loses_none(
    narrow: Driver, own_s3: SeaweedServer, frail_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logger_in_process(frail_env, monkeypatch, archive_groups=32) as service:
        await run_groups(narrow, range(10), run="idle")
        await narrow.wait_archived(10)
        own_s3.kill()
        await run_groups(narrow, range(10, 700))

        async def is_full() -> bool:
            return "trajectories" in await service.problems()

        await eventually(is_full)
        own_s3.start()
        await asyncio.to_thread(own_s3.wait_ready, 40)
        archived = await narrow.wait_archived(700, 60)
        assert len({closed.group_id for _, closed in archived}) == 700
        assert [seq for seq, _ in archived] == list(range(1, 701))
        state = await narrow.state(TRAJECTORIES)
        assert state.messages < 600, "archived closes make room"
        assert await narrow.bus.last_stored(TRAJECTORIES, subjects.trajectories(TENANT, "idle")) is not None


async def test_a_close_purged_early_is_still_a_close(
    narrow: Driver, frail_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The take-over learns of it from the manifests: a retry of its job closes nothing again."""
    async with logger_in_process(frail_env, monkeypatch, archive_groups=32, retain_share=0.3):
        await run_groups(narrow, range(300))
        await narrow.wait_archived(300)

        async def purged() -> bool:
            return await narrow.bus.stored(TRAJECTORIES, 1) is None

        await eventually(purged)
    first = (await narrow.archived())[0][1]
    async with logger_in_process(frail_env, monkeypatch, archive_groups=32):
        answer = await narrow.ask(group_ids=(first.group_id,), batch_id=first.batch_id)
        assert answer.groups[0].closed_seq == 1
        assert answer.batch is not None
        assert (answer.batch.closed, answer.batch.samples) == (300, 600)
        job = make_job(first.position, n=2)
        assert job.group_id == first.group_id
        (seq,) = await narrow.submit([job])
        await narrow.finish(job, seq)
        await run_groups(narrow, range(300, 310))
        await narrow.wait_archived(310)
        await narrow.wait_stored(topology.JOBS.name, 0)
    groups = [closed.group_id for _, closed in await narrow.archived()]
    assert len(groups) == len(set(groups)) == 310


async def test_a_run_goes_on_from_its_last_message_after_everything_is_purged(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects.trajectories(TENANT, RUN)
    async with logger_in_process(stack_env, monkeypatch, retain_s=0.2):
        await run_groups(driver, range(30))
        await run_groups(driver, range(30, 50), run="other")
        await driver.wait_archived(50)
        await driver.wait_stored(TRAJECTORIES, 2)  # the last message of each run stays
        last = await driver.bus.last_stored(TRAJECTORIES, subject)
        assert last is not None
        assert last.seq == 30
        await run_groups(driver, range(50, 60))
        await driver.wait_archived(60)
    async with logger_in_process(stack_env, monkeypatch):
        await run_groups(driver, range(60, 70))
        archived = await driver.wait_archived(70)
    assert len({closed.group_id for _, closed in archived}) == 70


async def test_rival_archivers_cover_everything_once(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        logger_in_process(stack_env, monkeypatch, archive_groups=16),
        logger_in_process(stack_env, monkeypatch, archive_groups=10, ledger=False),
    ):
        for start in range(0, 300, 50):
            await run_groups(driver, range(start, start + 50))
        archived = await driver.wait_archived(300)
        assert archived == await driver.closes()
    writers = {
        decode_manifest(await driver.blobs.get(k) or b"").writer for k in await driver.blobs.keys(MANIFEST_PREFIX)
    }
    assert writers


async def test_i7_the_reader_gives_a_tenant_its_groups_under_the_streams_numbers(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with logger_in_process(stack_env, monkeypatch, archive_groups=7):
        await run_groups(driver, range(20))
        foreign = [make_job(position, tenant="globex", n=2) for position in range(20, 25)]
        for job, seq in zip(foreign, await driver.submit(foreign), strict=True):
            await driver.finish(job, seq)
        await driver.wait_archived(25)
        await run_groups(driver, range(30, 40), run="run-2")
        await driver.wait_archived(35)
        closes = await driver.closes(subjects.trajectories_of(TENANT))
    reader = ArchiveReader(driver.blobs)
    found, after = [], 0
    while (page := await reader.read(TENANT, after=after, limit=4)).groups or page.more:
        found += page.groups
        after = page.read_to
    assert found == closes
    assert [seq for seq, _ in (await reader.read(TENANT, "run-2", limit=100)).groups] == list(range(26, 36))
    assert await reader.get(TENANT, 3) == closes[2][1]
    assert await reader.get(TENANT, 22) is None
    assert (await reader.read("nobody")).groups == []


async def test_large_closes_travel_as_claim_checks(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(0, n=2, deadline=time.time() + 60)
    async with logger_in_process(stack_env, monkeypatch):
        (seq,) = await driver.submit([job])
        for index in range(2):
            await driver.finish(job, seq, [make_sample(index, tokens=20_000)])
        closes = await driver.wait_closed(1)
        assert len(closes[0][1].entries[1].sample.token_ids) == 20_000
        assert await driver.wait_archived(1) == closes
