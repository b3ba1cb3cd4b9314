"""A14: the SDK's own retries get through what passes: full quotas, a silent fleet, an ingest that starts again."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx2
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.support.stack import Stack

from .asking import PROMPT, USER, Joined, chat, complete
from .endpoints import ROLLGRID, SAMPLES_AT_ONCE, Endpoint
from .model import CONTEXT, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ENDPOINTS = (ROLLGRID,)
LONG = CONTEXT - 100


@pytest.fixture
def own_stack(endpoint: Endpoint) -> Stack:
    if endpoint.stack is None:
        pytest.skip("the endpoint was not started by this suite, so its processes are not its to stop")
    return endpoint.stack


def test_A14_a_full_quota_is_a_rate_limit_and_retries_outlast_it(client: OpenAI) -> None:
    whole = chat(client, {"ignore_eos": True}, stream=True, n=SAMPLES_AT_ONCE, max_tokens=LONG)
    next(whole)
    with pytest.raises(openai.RateLimitError) as caught:
        complete(client)
    assert int(caught.value.response.headers["retry-after"]) >= 1
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    closing = threading.Timer(0.5, whole.close)  # while the next call waits for its turn
    closing.start()
    answer = client.with_options(max_retries=20).completions.with_raw_response.create(**asked)
    closing.join()
    assert answer.retries_taken > 0
    assert answer.parse().choices


async def test_A14_a_flood_over_the_quota_is_served_to_the_last(endpoint: Endpoint, aclient: AsyncOpenAI) -> None:
    """As an asynchronous trainer floods: hundreds of calls at once, each with the SDK's patience."""
    patient = aclient.with_options(max_retries=40)

    async def one(number: int) -> int:
        body = await patient.completions.create(model=MODEL, prompt=[1, 40 + number % 400], max_tokens=8)
        assert body.usage is not None
        return body.usage.completion_tokens

    counts = await asyncio.gather(*(one(number) for number in range(150)))
    assert len(counts) == 150
    assert all(1 <= count <= 8 for count in counts)
    await asyncio.to_thread(endpoint.wait_idle)


def test_A49_an_ingest_that_starts_again_is_outlasted(own_stack: Stack, client: OpenAI) -> None:
    ingest = own_stack["ingest"]
    ingest.stop()
    ingest.start()  # and nobody waits until it is ready
    answer = client.with_options(max_retries=20).chat.completions.with_raw_response.create(
        model=MODEL, messages=USER, max_tokens=4
    )
    assert answer.retries_taken > 0
    assert answer.parse().choices
    ingest.wait_ready(60)


def test_A49_silence_is_filled_with_comments_that_the_sdk_does_not_see(own_stack: Stack, client: OpenAI) -> None:
    endpoint_url = own_stack.url
    samplers = own_stack.named("sampler")
    asked = {"model": MODEL, "messages": USER, "max_tokens": 4, "stream": True}
    for sampler in samplers:
        sampler.pause()
    try:
        with httpx2.stream("POST", f"{endpoint_url}/v1/chat/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(line for line in lines if line).startswith(":")
            for sampler in samplers:
                sampler.resume()
            rest = [line for line in lines if line and not line.startswith(":")]
        assert rest[-1] == "data: [DONE]"
    finally:
        for sampler in samplers:
            sampler.resume()
    assert Joined(chat(client, stream=True), is_chat=True).finish
