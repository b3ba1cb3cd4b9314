"""The sampler as a process: killed, frozen, cut off, and fed a job that kills it."""

from __future__ import annotations

import asyncio
import json
import signal
from collections import Counter
from pathlib import Path

from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import Suspect
from rollgrid_contracts.jobs import Priority, SamplingParams
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import SUSPECTS
from rollgrid_runtime.kv import Table

from tests.support.servers import NatsServer, scratch
from tests.support.services import ServiceProcess

from .stage import POOL, Stage, make_job

SCRIPTED = {
    "ROLLGRID_SAMPLER_ENGINE": "scripted",
    "ROLLGRID_SAMPLER_POLICY_WAIT_S": "0",
    "ROLLGRID_SAMPLER_REFUSE_DELAY_S": "0.2",
}
SHORT_ACK_WAIT = {"ROLLGRID_NATS_ACK_WAIT_S": "1.5"}
SLOW = SamplingParams(max_tokens=40, ignore_eos=True, seed=5)


def process(folder: Path, stack_env: dict[str, str], **extra: str) -> ServiceProcess:
    return ServiceProcess("sampler", folder, {**stack_env, **SCRIPTED, **SHORT_ACK_WAIT, **extra})


async def test_a_job_that_kills_its_sampler_is_quarantined_and_neighbours_finish(
    stage: Stage, stack_env: dict[str, str]
) -> None:
    """I9: N recorded starts, then failed(poison); the suspects' entries are gone or expire."""
    stage.bus.settings.ack_wait_s = 1.5
    poison = make_job("poison", n=2, prompt=[5, 13])
    neighbours = [make_job(f"n{i}", n=2, sampling=SLOW) for i in range(6)]
    for job in (*neighbours[:3], poison, *neighbours[3:]):
        await stage.submit(job)
    faults = {
        "ROLLGRID_SAMPLER_SCRIPTED_FAULTS": json.dumps({"13": "crash"}),
        "ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "400",
    }
    with scratch("sampler") as folder, process(folder, stack_env, **faults) as sampler:
        sampler.start()
        async with stage.ledger(), asyncio.timeout(80):
            while set(await stage.samples(poison.group_id)) != {0, 1}:
                if not sampler.running:
                    sampler.start()
                await asyncio.sleep(0.05)
            for job in neighbours:
                found = await stage.finished(job)
                assert {s.status for s in found.values()} == {SampleStatus.SUCCEEDED}
            await stage.clean()
    failed = await stage.samples(poison.group_id)
    assert {s.error.code for s in failed.values() if s.error} == {ErrorCode.POISON}
    assert 4 <= sampler.starts <= 5, "one start nobody recorded, three recorded ones"
    table: Table[Suspect] = Table(stage.bus, SUSPECTS, Suspect)
    entries = await table.items()
    assert set(entries) == {poison.group_id}
    assert entries[poison.group_id].value.starts == 3


async def test_killed_while_generating_everything_still_ends_once(stage: Stage, stack_env: dict[str, str]) -> None:
    stage.bus.settings.ack_wait_s = 1.5
    jobs = [make_job(f"k{i}", n=4, sampling=SLOW) for i in range(12)]
    for job in jobs:
        await stage.submit(job)
    rate = {"ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "200"}
    with scratch("sampler") as folder, process(folder, stack_env, **rate) as sampler:
        sampler.start().wait_ready(20)
        async with stage.ledger():
            async with asyncio.timeout(10):
                while not await stage.read():
                    await asyncio.sleep(0.01)
            sampler.kill()
            sampler.start().wait_ready(20)
            for job in jobs:
                await stage.finished(job, 55)
            await stage.clean()
    seen = Counter((e.group_id, s.index) for e in await stage.read() for s in e.samples)
    twice = sum(count > 1 for count in seen.values())
    assert twice <= 16, "only what was in the engine at the kill may have been recorded twice"
    for job in jobs:  # seeded: the same samples whoever generated them
        assert {s.seed is not None for s in (await stage.samples(job.group_id)).values()} == {True}


async def test_frozen_for_twice_the_ack_wait_then_continued(stage: Stage, stack_env: dict[str, str]) -> None:
    """Another sampler takes over; the frozen one comes back and harms nothing."""
    stage.bus.settings.ack_wait_s = 1.5
    jobs = [make_job(f"z{i}", n=4, sampling=SLOW) for i in range(6)]
    rate = {"ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "100"}
    with scratch("one") as one, scratch("two") as two:
        with process(one, stack_env, **rate) as frozen, process(two, stack_env, **rate) as other:
            frozen.start().wait_ready(20)
            for job in jobs:
                await stage.submit(job)
            async with stage.ledger():
                async with asyncio.timeout(10):
                    while frozen.readiness()[1].get("busy", 0) < 8:
                        await asyncio.sleep(0.01)
                frozen.pause()
                other.start().wait_ready(20)
                for job in jobs:
                    await stage.finished(job, 55)
                frozen.resume()
                await stage.clean()
            assert frozen.running


async def test_heartbeats_stop_with_the_engine_and_held_work_goes_back(stage: Stage, stack_env: dict[str, str]) -> None:
    """The engine dies: exit code 1 and immediate negative acks, so the next sampler need not wait."""
    job, neighbour = make_job("dies", prompt=[14], n=1), make_job("neighbour", n=4, sampling=SLOW)
    faults = {
        "ROLLGRID_SAMPLER_SCRIPTED_FAULTS": json.dumps({"14": "die"}),
        "ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "20",
        "ROLLGRID_NATS_ACK_WAIT_S": "30",
    }
    with scratch("sampler") as folder, process(folder, stack_env, **faults) as sampler:
        sampler.start().wait_ready(20)
        await stage.submit(neighbour)
        async with asyncio.timeout(10):
            while sampler.readiness()[1].get("busy", 0) < 4:
                await asyncio.sleep(0.01)
        await stage.submit(job)
        async with asyncio.timeout(10):
            while sampler.running:
                await asyncio.sleep(0.02)
        assert sampler.returncode == 1
        async with asyncio.timeout(5):
            while sum(await stage.pending(PoolLane(POOL, Priority.NORMAL, "acme"))) < 2:
                await asyncio.sleep(0.02)
    healthy = {"ROLLGRID_NATS_ACK_WAIT_S": "30"}
    with scratch("sampler") as folder, process(folder, stack_env, **healthy) as sampler:
        sampler.start().wait_ready(20)
        async with stage.ledger():
            await stage.finished(neighbour)
            await stage.finished(job)


async def test_a_restart_of_the_server_makes_old_jobs_doubtful(
    stage: Stage, stack_env: dict[str, str], nats: NatsServer
) -> None:
    """Delivery counts undercount across a kill of the server: the record is asked before generating."""
    stage.bus.settings.ack_wait_s = 1.5
    jobs = [make_job(f"r{i}", n=4, sampling=SLOW) for i in range(24)]  # far more than are in hand at once
    for job in jobs:
        await stage.submit(job)
    rate = {"ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "100", "ROLLGRID_SAMPLER_SLOTS": "8"}
    with scratch("sampler") as folder, process(folder, stack_env, **rate) as sampler:
        async with stage.ledger() as asked:
            sampler.start().wait_ready(20)
            async with asyncio.timeout(10):
                while not await stage.read():
                    await asyncio.sleep(0.01)
            before = set(asked)
            nats.restart()
            for job in jobs:
                await stage.finished(job, 55)
            await stage.clean()
            assert set(asked) - before, "asked about behind the restart for the first time"
    seen = Counter((e.group_id, s.index) for e in await stage.read() for s in e.samples)
    assert set(seen) == {(job.group_id, index) for job in jobs for index in range(4)}


async def test_sigterm_drains_and_exits_well(stage: Stage, stack_env: dict[str, str]) -> None:
    jobs = [make_job(f"t{i}", n=4, sampling=SLOW) for i in range(6)]
    rate = {"ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "50", "ROLLGRID_SAMPLER_SLOTS": "8"}
    with scratch("sampler") as folder, process(folder, stack_env, **rate) as sampler:
        sampler.start().wait_ready(20)
        for job in jobs:
            await stage.submit(job)
        async with asyncio.timeout(10):
            while sampler.readiness()[1].get("busy", 0) < 8:
                await asyncio.sleep(0.01)
        sampler.send(signal.SIGTERM)
        async with asyncio.timeout(15):
            while sampler.running:
                await asyncio.sleep(0.02)
        assert sampler.returncode == 0
    ended = {e.group_id for e in await stage.read()}
    assert len(ended) >= 2
    for event in await stage.read():
        assert {s.status for s in event.samples} == {SampleStatus.SUCCEEDED}
    assert await stage.workers() == {}
