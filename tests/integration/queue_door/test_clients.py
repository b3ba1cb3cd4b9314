"""Who reads and writes the queue from outside: plain nats-py (the examples) and the SDK's NatsClient."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid import AsyncClient, CursorFile, NatsClient
from rollgrid.errors import (
    DeadlineExceeded,
    IdempotencyConflict,
    InvalidRequest,
    LimitExceeded,
    NotFound,
    PayloadTooLarge,
    RollgridAPIError,
    Unauthenticated,
    Unreachable,
    Unsendable,
)
from rollgrid.nats_follower import NeedsHTTP
from rollgrid.results import Group
from rollgrid_contracts import ids, topology
from rollgrid_contracts.trajectories import CloseReason
from rollgrid_runtime.provision import ensure_consumer

from tests.support.stack import Stack

from .queue import PROMPT, Queue, body

EXAMPLES = Path(__file__).parents[3] / "examples"
FAST: dict[str, Any] = {"sampling": {"max_tokens": 4}, "n": 2}


@pytest.fixture
async def sdk(pipe: Stack, queue: Queue) -> AsyncIterator[NatsClient]:
    """As the tenant acme, by a follower that no other test has read from."""
    async with NatsClient(pipe.nats.url, tenant="acme", user=pipe.nats.user, password=pipe.nats.password) as client:
        yield client


@pytest.fixture
async def follower(queue: Queue, request: pytest.FixtureRequest) -> str:
    name = f"f{abs(hash(request.node.name)) % 10**8}"
    await ensure_consumer(queue.bus, topology.tenant_consumer("acme", name))
    return name


async def take(groups: Any, count: int) -> list[Group]:
    found: list[Group] = []
    async with contextlib.aclosing(groups) as stream:
        async for group in stream:
            found.append(group)
            if len(found) == count:
                return found
    return found


async def test_the_examples_publish_and_follow_with_plain_nats(pipe: Stack, queue: Queue) -> None:
    """About ten lines each, JSON, no code of ours."""
    env = {
        "NATS_URL": pipe.nats.url,
        "NATS_USER": pipe.nats.user,
        "NATS_PASSWORD": pipe.nats.password,
        "TENANT": "bolt",
    }
    first = await run(EXAMPLES / "queue_publish.py", env, "example", "step-1")
    again = await run(EXAMPLES / "queue_publish.py", env, "example", "step-1")
    assert json.loads(first)["stream"] == "RG_SUBMIT"
    assert json.loads(again)["sequence"] > json.loads(first)["sequence"]
    lines = [json.loads(line) for line in (await run(EXAMPLES / "queue_follow.py", env, "2")).splitlines()]
    await queue.drained()
    assert {line["group"] for line in lines} == {ids.group_id("bolt", "example", "step-1", at) for at in range(2)}
    assert all(len(tokens) == 16 for line in lines for tokens in line["tokens"])
    assert len(await queue.closes("example", tenant="bolt")) == 2


async def run(script: Path, env: dict[str, str], *words: str) -> str:
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, str(script), *words], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


async def test_a29_the_sdk_gets_the_same_groups_by_nats_as_by_http(pipe: Stack, sdk: NatsClient, follower: str) -> None:
    batch = await sdk.submit([PROMPT, PROMPT], run="same", idempotency_key="k", **FAST)
    groups = [group async for group in sdk.groups(batch, follower=follower, timeout=60)]
    assert {group.id for group in groups} == set(batch.group_ids)
    assert {group.batch_id for group in groups} == {batch.batch_id}
    for group in groups:
        assert group.reason is CloseReason.COMPLETE
        assert all(len(sample) == 4 and sample.ok for sample in group)
        assert [sample.token_ids.dtype for sample in group] == [np.dtype("uint32")] * 2
    again = await sdk.submit([PROMPT, PROMPT], run="same", idempotency_key="k", **FAST)
    assert again.group_ids == batch.group_ids


async def test_a_refused_batch_comes_back_under_the_ids_the_client_knows(sdk: NatsClient, follower: str) -> None:
    batch = await sdk.submit([PROMPT], run="unwanted", policy="nobody", **FAST)
    (group,) = [group async for group in sdk.groups(batch, follower=follower, timeout=60)]
    assert group.reason is CloseReason.REJECTED
    assert [sample.error.code for sample in group if sample.error] == ["model_not_found"] * 2


@pytest.mark.parametrize(
    ("wrong", "kind", "field"),
    [({"n": 0}, LimitExceeded, "n"), ({"n": 65}, LimitExceeded, "n"), ({"run": "a.b"}, InvalidRequest, "run")],
    ids=["no-sample", "too-many", "run"],
)
async def test_a_refused_batch_without_groups_of_its_own_is_an_error_not_a_wait(
    sdk: NatsClient, follower: str, wrong: dict[str, Any], kind: type[RollgridAPIError], field: str
) -> None:
    """It ends in the run `_rejected`: whoever waits for its groups is told there."""
    batch = await sdk.submit([PROMPT], **{**FAST, "run": "no-groups", **wrong})
    with pytest.raises(kind) as told:
        await take(sdk.groups(batch, follower=follower, timeout=60), 1)
    assert told.value.field == field


async def test_i2_whoever_reused_a_key_for_another_body_is_told(sdk: NatsClient, follower: str) -> None:
    first = await sdk.submit([PROMPT], run="reused", idempotency_key="reused", **FAST)
    assert len(await take(sdk.groups(first, follower=follower, timeout=60), 2)) == 1
    other = await sdk.submit([PROMPT, PROMPT], run="reused", idempotency_key="reused", **FAST)
    with pytest.raises(IdempotencyConflict):
        await take(sdk.groups(other, follower=follower, timeout=60), 2)


async def test_i2_a_reader_resumes_where_it_stopped(
    sdk: NatsClient, queue: Queue, follower: str, tmp_path: Path
) -> None:
    """What was consumed does not come again, what was in hand does: by the durable alone, and with a file."""
    batch = await sdk.submit([PROMPT] * 6, run="resumed", **FAST)
    await queue.closed("resumed", 6, tenant="acme")
    first = await take(sdk.trajectories("resumed", follower=follower, timeout=60), 2)  # the second stays in hand
    second = await take(sdk.trajectories("resumed", follower=follower, timeout=60), 2)
    assert first[0].id not in {group.id for group in second}
    file = CursorFile(tmp_path / "cursor")
    third = await take(sdk.trajectories("resumed", follower=follower, cursor=file, timeout=60), 3)
    consumed = {first[0].id, second[0].id}
    assert not consumed & {group.id for group in third}
    assert CursorFile(tmp_path / "cursor").read() == third[1].cursor
    consumed |= {group.id for group in third[:2]}
    rest = await take(sdk.trajectories("resumed", follower=follower, cursor=file, timeout=60), 2)
    assert consumed | {group.id for group in rest} == set(batch.group_ids)
    assert len(consumed) == 4


async def test_a_group_whose_acknowledgement_was_lost_does_not_come_twice(
    sdk: NatsClient, queue: Queue, follower: str, tmp_path: Path
) -> None:
    """The crash between the file's commit and the ack: the file says that the group was consumed."""
    batch = await sdk.submit([PROMPT] * 2, run="lost-ack", **FAST)
    (seen,) = await take(sdk.trajectories("lost-ack", follower=follower, timeout=60), 1)
    CursorFile(tmp_path / "cursor").commit(seen.cursor, f"follower:acme/{follower}")
    file = CursorFile(tmp_path / "cursor")
    (other,) = await take(sdk.trajectories("lost-ack", follower=follower, cursor=file, timeout=60), 1)
    assert {seen.id, other.id} == set(batch.group_ids)


async def test_following_goes_on_over_restarts_of_nats(pipe: Stack, sdk: NatsClient, follower: str) -> None:
    found: list[Group] = []

    async def follow() -> None:
        async for group in sdk.trajectories("restarted", follower=follower, timeout=120):
            found.append(group)
            if len(found) == 4:
                return

    reading = asyncio.create_task(follow())
    first = await sdk.submit([PROMPT] * 2, run="restarted", **FAST)
    pipe.nats.restart()
    second = await sdk.submit([PROMPT] * 2, run="restarted", **FAST)
    await asyncio.wait_for(reading, 120)
    assert {group.id for group in found} == {*first.group_ids, *second.group_ids}


async def test_a_group_over_the_inline_limit_is_fetched_by_http(
    pipe: Stack, queue: Queue, sdk: NatsClient, follower: str
) -> None:
    large = [{"prompt_token_ids": PROMPT, "metadata": {"text": "x" * 300_000}}]
    await sdk.submit(large, run="large", **FAST)
    with pytest.raises(NeedsHTTP, match="http client"):
        await take(sdk.trajectories("large", follower=follower, timeout=60), 1)
    async with AsyncClient(pipe.url, api_key="") as http:
        # without API keys ingest knows everybody as "local": so does the client here
        local = NatsClient(pipe.nats.url, tenant="local", user=pipe.nats.user, password=pipe.nats.password, http=http)
        async with local:
            batch = await local.submit(large, run="large", **FAST)
            (group,) = [group async for group in local.groups(batch, timeout=60)]
    assert len(group.metadata["text"]) == 300_000
    assert group.cursor == (await queue.closed("large", 1))[0].stored.sequence


async def test_what_cannot_be_is_told_by_type(pipe: Stack, sdk: NatsClient, follower: str) -> None:
    with pytest.raises(PayloadTooLarge, match="max_payload"):
        await sdk.submit([{"prompt": "x" * 2_000_000}], **FAST)
    with pytest.raises(Unsendable, match="tasks"):
        await sdk.submit([], **FAST)
    with pytest.raises(DeadlineExceeded):
        await take(sdk.trajectories("silent", follower=follower, timeout=0.3), 1)
    with pytest.raises(Unauthenticated):
        await NatsClient(pipe.nats.url, tenant="acme", user="acme", password="wrong").connect()
    with pytest.raises(Unreachable):
        await NatsClient("nats://127.0.0.1:1", tenant="acme", budget_s=1).connect()
    sdk.budget_s = 1
    with pytest.raises(NotFound, match="tenant_acme_missing"):
        await take(sdk.trajectories(follower="missing", timeout=60), 1)


async def test_the_json_form_reads_alike_through_the_sdks_http_client(pipe: Stack, queue: Queue) -> None:
    await queue.submit(body("alike", tasks=2, record_format="json"))
    await queue.submit(body("alike", tasks=2, record_format="msgpack"))
    await queue.closed("alike", 4)
    async with AsyncClient(pipe.url, api_key="") as http:
        groups = [group async for group in http.trajectories("alike", follow=False)]
        assert len(groups) == 4
        assert all(len(sample) == 4 for group in groups for sample in group)
        assert (await http.group(groups[0].id)).closed == groups[0].closed
