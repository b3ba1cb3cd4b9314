"""Single faults that the storm meets by chance only, each by itself."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

import pytest
from rollgrid_contracts import topology
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.trajectories import CloseReason

from tests.support.stack import Stack, scripted, stack
from tests.support.waiting import until

from .checker import Evidence, Expectation, check
from .client import Load, StormClient
from .evidence import gather
from .storm import connect, wait_closed

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(240)]

EXPECT = Expectation(iterated=False, archived=False)


def client_of(pipe: Stack, run: str, **load: float) -> StormClient:
    return StormClient(pipe.url, run, pipe.folder / f"{run}.jsonl", 0, Load(**{"deadline_s": 60.0, **load}))  # type: ignore[arg-type]


async def settled(pipe: Stack, client: StormClient) -> Evidence:
    """Evidence once RG_JOBS is empty: the queue is clean afterwards."""
    bus, blobs = await connect(pipe)
    try:

        async def clean() -> bool:
            return (await bus.stream_info(topology.JOBS.name)).state.messages == 0

        await until(clean, 30, "an empty RG_JOBS", every_s=0.2)
        return await gather(bus, blobs, [client.path])
    finally:
        await bus.close()
        blobs.close()


def statuses(evidence: Evidence) -> Counter[str]:
    return Counter(entry.sample.status.value for close in evidence.closes for entry in close.record.entries)


def test_no_sampler_until_the_deadline_expires_every_sample_once() -> None:
    with stack(scripted(samplers=1, ack_wait_s=2.0)) as pipe:
        sampler = pipe["sampler-0"]
        sampler.kill()
        client = client_of(pipe, "nobody")
        assert client.submit("k-plain", 5, 4, deadline_s=4.0)
        assert client.submit("k-scored", 5, 4, deadline_s=4.0, scorers=[{"type": "exact_match", "name": "exact"}])
        asyncio.run(wait_closed(pipe, client, 30))
        sampler.start().wait_ready(60)  # late: what has expired is not begun any more
        assert client.submit("k-after", 2, 2)
        asyncio.run(wait_closed(pipe, client, 30))
        evidence = asyncio.run(settled(pipe, client))
        client.close()
        assert not check(evidence, EXPECT), pipe.logs()
        assert statuses(evidence) == {"expired": 40, "succeeded": 4}


def test_a_deadline_in_the_middle_keeps_what_was_finished() -> None:
    """Some samples are through when the sampler dies for good: they close succeeded beside the expired ones."""
    with stack(scripted(samplers=1, slots=4, ack_wait_s=2.0, token_rate=100)) as pipe:
        client = client_of(pipe, "middle", max_tokens=100)
        assert client.submit("k", 1, 16, deadline_s=12.0)

        async def some_finished() -> None:
            bus, blobs = await connect(pipe)

            async def there() -> bool:
                return (await bus.stream_info(topology.SAMPLES.name)).state.messages > 0

            await until(there, 30, "a first finish")
            await bus.close()
            blobs.close()

        asyncio.run(some_finished())
        pipe["sampler-0"].kill()
        asyncio.run(wait_closed(pipe, client, 40))
        evidence = asyncio.run(settled(pipe, client))
        client.close()
        assert not check(evidence, EXPECT), pipe.logs()
        found = statuses(evidence)
        assert found["succeeded"] >= 1
        assert found["expired"] >= 1
        assert sum(found.values()) == 16


def test_cancel_racing_completion_ends_each_sample_once() -> None:
    """Cancels at every moment of a group's short life: first in stream order wins, the queue is clean afterwards."""
    with stack(scripted(samplers=1, ack_wait_s=2.0, token_rate=200)) as pipe:
        client = client_of(pipe, "race", max_tokens=20)
        for number in range(25):
            accepted = client.submit(f"k-{number}", 3, 4)
            assert accepted
            time.sleep(number * 0.012)  # from before the first token to after the close
            client.cancel(*accepted)
        asyncio.run(wait_closed(pipe, client, 40))
        evidence = asyncio.run(settled(pipe, client))
        client.close()
        assert not check(evidence, EXPECT), pipe.logs()
        reasons = Counter(close.record.reason for close in evidence.closes)
        assert reasons[CloseReason.CANCELLED], reasons
        assert reasons[CloseReason.COMPLETE], reasons
        for close in evidence.closes:
            ended = {entry.sample.status for entry in close.record.entries}
            assert ended <= {SampleStatus.SUCCEEDED, SampleStatus.CANCELLED}


def test_two_loggers_of_which_one_wakes_from_a_long_sleep_close_nothing_twice() -> None:
    """The sleeper still believes in its lease when it goes on: compare-and-set is what stops it."""
    with stack(scripted(samplers=1, loggers=2, ack_wait_s=2.0, token_rate=200)) as pipe:
        client = client_of(pipe, "zombie", max_tokens=40)
        active = pipe.named("trajectory_logger")
        for round_number in range(2):
            for logger in active:
                assert client.submit(f"k-{round_number}-{logger.name}", 6, 4)
                logger.pause()
                time.sleep(topology.LEDGER_LEASE_S * 1.5)  # its lease runs out and the other takes over
                assert client.submit(f"l-{round_number}-{logger.name}", 6, 4)
                logger.resume()
        asyncio.run(wait_closed(pipe, client, 60))
        evidence = asyncio.run(settled(pipe, client))
        client.close()
        assert not check(evidence, EXPECT), pipe.logs()
        assert statuses(evidence) == {"succeeded": 2 * 2 * 2 * 6 * 4}
        assert len({close.record.ledger_epoch for close in evidence.closes}) > 1, "nobody took over"


def test_a_poison_job_is_quarantined_and_its_neighbours_finish() -> None:
    """I9: a job that kills its sampler ends as failed(poison) after N starts; the sampler comes back each time."""
    poison = 499
    env = {"ROLLGRID_SAMPLER_SCRIPTED_FAULTS": f'{{"{poison}": "crash"}}', "ROLLGRID_SAMPLER_MAX_STARTS": "3"}
    with stack(scripted(samplers=2, ack_wait_s=2.0, token_rate=100, env=env)) as pipe:
        client = client_of(pipe, "poison", max_tokens=30)
        tasks = [{"prompt_token_ids": [5, poison if position == 3 else 6, 7]} for position in range(8)]
        assert client.submit("k", 8, 4, tasks=tasks)

        async def supervised() -> None:
            waiting = asyncio.create_task(wait_closed(pipe, client, 120))
            while not waiting.done():
                for sampler in pipe.named("sampler"):
                    if not sampler.running:
                        sampler.start()
                await asyncio.sleep(0.2)

        asyncio.run(supervised())
        evidence = asyncio.run(settled(pipe, client))
        client.close()
        assert not check(evidence, EXPECT._replace(failures=True)), pipe.logs()
        assert statuses(evidence) == {"failed": 4, "succeeded": 28}
        (bad,) = [close.record for close in evidence.closes if close.record.position == 3]
        assert {entry.sample.error.code.value for entry in bad.entries if entry.sample.error} == {"poison"}
        assert 3 <= sum(process.starts - 1 for process in pipe.named("sampler")) <= 6
