"""I8: a part that sleeps leads to 429 with Retry-After at the door, never to loss, never to unbounded memory.

Streams are given bounds so small that minutes of sleep fit into a test; then the sleeper wakes and
everything that was accepted must end as if nothing had been.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from rollgrid import Client

from tests.support.stack import Stack, scripted, stack

from .checker import Evidence, Expectation, check
from .client import Load, StormClient
from .evidence import gather_archived
from .journal import Delivered, Refused, now
from .storm import connect, wait_closed

KIB = 1024
GROUPS, N, PROMPT, TOKENS = 40, 4, 200, 128
MOST_REQUESTS = 200
MORE_MEMORY = 200 * 2**20
DEADLINE_S = 600.0


class Sleeper(NamedTuple):
    """What sleeps, the bounds of the streams meanwhile, and whether the batches are scored."""

    names: Callable[[Stack], list[str]]
    bounds: dict[str, int]
    scored: bool = False


def of(service: str) -> Callable[[Stack], list[str]]:
    return lambda pipe: [process.name for process in pipe.named(service)]


SLEEPERS = {
    "sampler": Sleeper(of("sampler"), {"JOBS": 300 * KIB}),
    "scorer": Sleeper(of("scorer"), {"JOBS": 300 * KIB, "SAMPLES": 600 * KIB}, scored=True),
    "logger": Sleeper(of("trajectory_logger"), {"JOBS": 300 * KIB, "SAMPLES": 600 * KIB}),
    "S3": Sleeper(lambda _: ["weed"], {"JOBS": 300 * KIB, "SAMPLES": 600 * KIB, "TRAJECTORIES": 600 * KIB}),
}


def bounded(bounds: dict[str, int], **more: str) -> dict[str, str]:
    return {
        **{f"ROLLGRID_NATS_{stream}_MAX_BYTES": str(limit) for stream, limit in bounds.items()},
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "1",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "1",
        "ROLLGRID_TRAJECTORY_LOGGER_PURGE_EVERY_S": "1",
        "ROLLGRID_TRAJECTORY_LOGGER_PURGE_MIN_BYTES": "0",
        "ROLLGRID_TRAJECTORY_LOGGER_PURGE_GRACE_S": "2",
        "ROLLGRID_S3_TIMEOUT_S": "3",
        **more,
    }


def memory(pipe: Stack) -> dict[str, int]:
    return {name: process.rss_bytes() for name, process in pipe.services.items()}


def storm_client(pipe: Stack, run: str) -> StormClient:
    load = Load(deadline_s=DEADLINE_S, max_tokens=TOKENS)
    return StormClient(pipe.url, run, pipe.folder / f"{run}.jsonl", 0, load)


def flood(client: StormClient, options: dict[str, Any]) -> list[str]:
    """Submit until three requests in a row are refused; the refused keys."""
    refused: list[str] = []
    row = 0
    for number in range(MOST_REQUESTS):
        if client.submit(f"k-{number}", GROUPS, N, give_up_s=0.01, prompt=PROMPT, **options):
            row = 0
            continue
        refused.append(f"k-{number}")
        row += 1
        if row == 3:
            return refused
    raise AssertionError(f"{MOST_REQUESTS} requests and the queue never filled; refused {refused}")


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SLEEPERS)
def test_i8_a_sleeper_leads_to_429_and_loses_nothing(name: str) -> None:
    sleeper = SLEEPERS[name]
    with stack(scripted(samplers=1, ack_wait_s=5.0, env=bounded(sleeper.bounds))) as pipe:
        client = storm_client(pipe, "full")
        options: dict[str, Any] = {"scorers": [{"type": "exact_match", "name": "exact"}]} if sleeper.scored else {}
        client.submit("before", GROUPS, N, prompt=PROMPT, **options)
        asyncio.run(wait_closed(pipe, client, 60, by_archive=True))
        before = memory(pipe)
        try:
            for victim in sleeper.names(pipe):
                pipe.processes()[victim].pause()
            refused = flood(client, options)
            grown = {part: size - before[part] for part, size in memory(pipe).items()}
            assert max(grown.values()) < MORE_MEMORY, grown
        finally:
            for victim in sleeper.names(pipe):
                pipe.processes()[victim].resume()
        for key in refused[:3]:  # what was refused is let in once there is room
            assert client.submit(key, GROUPS, N, prompt=PROMPT, **options), pipe.logs()
        asyncio.run(wait_closed(pipe, client, 90, by_archive=True))
        evidence = asyncio.run(gathered(pipe, client))
        client.close()
        refusals = [line for line in evidence.journal if isinstance(line, Refused)]
        full = [line for line in refusals if line.status == 429]
        assert full
        assert all(line.code == "queue_full" and line.retry_after for line in full)
        assert not check(evidence, Expectation(all_let_in=False, iterated=False)), pipe.logs()


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_i8_a_sleeping_trainer_only_has_a_longer_way_to_read() -> None:
    """Far more closes than the stream may hold: they go to S3 and are read from there under the same cursors."""
    bounds = {"JOBS": 300 * KIB, "SAMPLES": 600 * KIB, "TRAJECTORIES": 600 * KIB}
    with stack(scripted(samplers=1, ack_wait_s=5.0, env=bounded(bounds))) as pipe:
        client = storm_client(pipe, "slow")
        for number in range(12):
            assert client.submit(f"k-{number}", GROUPS, N, prompt=PROMPT), pipe.logs()
        asyncio.run(wait_closed(pipe, client, 60, by_archive=True))
        with Client(pipe.url, api_key="") as trainer:
            for group in trainer.trajectories("slow", follow=False):
                client.note(Delivered(at=now(), reader="late", run="slow", cursor=group.cursor, group_id=group.id))
        evidence = asyncio.run(gathered(pipe, client))
        client.close()
        assert evidence.first_sequence > 1, "nothing was purged: the bound was not reached"
        delivered = [line.group_id for line in evidence.journal if isinstance(line, Delivered)]
        assert sorted(delivered) == sorted(client.accepted_groups)
        assert not check(evidence, Expectation(all_let_in=False, iterated=False)), pipe.logs()


async def gathered(pipe: Stack, client: StormClient) -> Evidence:
    bus, blobs = await connect(pipe)
    try:
        return await gather_archived(bus, blobs, [client.path])
    finally:
        await bus.close()
        blobs.close()
