"""Flushes of the NATS server and operations of Redis per group, against the targets of the design.

Counted, not timed: the figures do not depend on how fast the machine is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rollgrid import Client

from tests.support.stack import POLICY, Stack, scripted, stack
from tests.support.syscalls import Flushes, counted_flushes, unavailable
from tests.support.waiting import wait_until

BATCHES, GROUPS, N, TOKENS = 4, 200, 8, 64
UNSCORED_TARGET, SCORED_TARGET = 2.5, 3.5
SWEEP = {"evalsha": 4, "script|load": 2, "zrangebyscore": 1, "zcard": 1}
"""One look for sessions that are due, every half a minute whatever the work; the first time with its scripts."""
OWN_COMMANDS = {"info", "hello", "client|setinfo", "auth", "select", "ping"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    if (why := unavailable()) is not None:
        pytest.skip(why)
    with stack(scripted(samplers=1, slots=64)) as running:
        yield running


@pytest.fixture
def flushes(pipe: Stack, tmp_path: Path) -> Iterator[Flushes]:
    with counted_flushes(pipe.nats, tmp_path) as counter:
        yield counter


def run_batches(pipe: Stack, run: str, scorers: list[str]) -> None:
    sampling: dict[str, Any] = {"max_tokens": TOKENS}
    task = {"prompt_token_ids": [5, 6, 7], "task": {"answer": "x"}}
    with Client(pipe.url, api_key="") as client:
        batches = [
            client.submit([task] * GROUPS, n=N, sampling=sampling, scorers=scorers, run=run, policy=POLICY)
            for _ in range(BATCHES)
        ]
        for batch in batches:
            assert sum(1 for _ in batch.groups(timeout=120)) == GROUPS


def per_group(pipe: Stack, flushes: Flushes, run: str, scorers: list[str]) -> float:
    run_batches(pipe, run + "-warm", scorers)
    before = flushes.count()
    run_batches(pipe, run, scorers)
    # the acks behind the closes cost flushes too
    wait_until(lambda: jobs_left(pipe) == 0, 30, "the jobs' acks")
    cost = (flushes.count() - before) / (BATCHES * GROUPS)
    print(f"{run}: {cost:.2f} fsyncs per group of {N}", file=sys.stderr)
    return cost


def jobs_left(pipe: Stack) -> int:
    fleet = httpx2.get(pipe.url + "/v1/fleet", timeout=10).json()
    return int(fleet["queues"]["RG_JOBS"]["messages"])


def test_an_unscored_group_costs_few_flushes(pipe: Stack, flushes: Flushes) -> None:
    assert per_group(pipe, flushes, "unscored", []) <= UNSCORED_TARGET


def test_a_scored_group_costs_few_flushes(pipe: Stack, flushes: Flushes) -> None:
    assert per_group(pipe, flushes, "scored", ["exact_match"]) <= SCORED_TARGET


def test_no_redis_operation_outside_sessions_and_quotas(pipe: Stack) -> None:
    before = pipe.valkey.commands()
    run_batches(pipe, "redis", ["exact_match"])
    used = {name: calls - before.get(name, 0) for name, calls in pipe.valkey.commands().items()}
    assert not {n for n, calls in used.items() if calls > SWEEP.get(n, 0) and n not in OWN_COMMANDS}, used
