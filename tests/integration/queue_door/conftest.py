"""One stack on the scripted engine for the tests of the queue door that leave it whole."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest

from tests.support.stack import Stack, scripted, stack

from .queue import Queue, queue_of

LIMITS = {"ROLLGRID_INGEST_MAX_N": "64", "ROLLGRID_INGEST_MAX_GROUPS": "256"}


@pytest.fixture(scope="package")
def pipe() -> Iterator[Stack]:
    env = {**LIMITS, "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.5"}
    env["ROLLGRID_INGEST_QUEUE_TENANTS"] = json.dumps(["local", "acme", "bolt"])
    env["ROLLGRID_INGEST_QUEUE_UNKNOWN_GRACE_S"] = "0.2"
    with stack(scripted(samplers=1, slots=64, eos_rate=0.0, env=env)) as running:
        yield running


@pytest.fixture
async def queue(pipe: Stack) -> AsyncIterator[Queue]:
    async with queue_of(pipe) as found:
        yield found


@pytest.fixture
def http(pipe: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pipe.url, timeout=60) as client:
        yield client
