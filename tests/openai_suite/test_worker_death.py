"""The worker that streams is killed: another goes on behind what was sent, and the client sees one answer."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from openai import OpenAI

from tests.support.services import ServiceProcess
from tests.support.stack import Stack

from .asking import FREE, Joined, complete, ids_of
from .endpoints import ROLLGRID, Endpoint, VllmMetrics
from .model import CONTEXT
from .records import samples_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]
ENDPOINTS = (ROLLGRID,)
LENGTH = CONTEXT - 300
TRIES = 5
"""A stream may have ended before the busy worker is known: then there was nothing to kill."""


@pytest.fixture
def own_stack(endpoint: Endpoint) -> Stack:
    if endpoint.stack is None:
        pytest.skip("the endpoint was not started by this suite, so its processes are not its to kill")
    return endpoint.stack


def interrupted(stream: Any, after: int, kill: Callable[[], None]) -> tuple[Joined, Joined]:
    """Read the stream to its end, with `kill` in between: what was read before it, and all."""
    chunks, before = [], 0
    for number, chunk in enumerate(stream):
        chunks.append(chunk)
        if number == after:
            before = len(chunks)
            kill()
    return Joined(chunks[:before], is_chat=False), Joined(chunks, is_chat=False)


def test_I2_a_worker_killed_in_mid_stream(endpoint: Endpoint, own_stack: Stack, client: OpenAI) -> None:
    endpoint.wait_idle()
    killed: list[ServiceProcess] = []
    records: list[dict[str, Any]] = []

    def kill() -> None:
        for each in own_stack.named("sampler"):
            if not killed and VllmMetrics(each.health_url).running():
                killed.append(each)
                each.kill()

    before = Joined([], is_chat=False)
    for _ in range(TRIES):
        run = f"run-{uuid.uuid4().hex[:12]}"
        stream = complete(
            client, FREE, stream=True, n=2, seed=7, logprobs=0, max_tokens=LENGTH, extra_headers={"X-Rollgrid-Run": run}
        )
        before, found = interrupted(stream, 2, kill)
        records = samples_of(endpoint, run, 2)
        assert found.finish == {0: "length", 1: "length"}
        for index, record in enumerate(records):
            assert record["token_ids"] == found.token_ids[index]
            assert record["text"] == found.text[index]
            assert record["logprobs"] == pytest.approx(found.logprobs[index], abs=1e-6)
        if killed:
            break
    assert killed, f"no stream of {TRIES} was met while it was generated"
    for index, record in enumerate(records):
        if record["worker"] == killed[0].name:
            assert record["attempt"] == 1, "only what had ended before the kill is the killed worker's"
        else:
            assert record["attempt"] > 1
            assert len(before.token_ids.get(index, [])) <= record.get("resumed_from", 0) < LENGTH
        check_whole(client, record)
    assert any(record.get("resumed_from", 0) > 0 for record in records), "the kill came after the last token"


def check_whole(client: OpenAI, record: dict[str, Any]) -> None:
    """The join is no seam: the model, asked for every token behind those before it, gives the same logprobs."""
    prompt = [1, 40, 41, 42, 43]
    body = complete(client, {"prompt_logprobs": 0}, prompt=prompt + record["token_ids"], max_tokens=1)
    scored = body.choices[0].model_extra["prompt_logprobs"][len(prompt) :]
    own = [entries[str(token)]["logprob"] for token, entries in zip(record["token_ids"], scored, strict=True)]
    assert own == pytest.approx(record["logprobs"], abs=1e-3)


def test_A49_the_one_that_is_left_serves_on(client: OpenAI) -> None:
    (choice,) = complete(client, FREE).choices
    assert len(ids_of(choice)) == 8
