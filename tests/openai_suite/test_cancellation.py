"""A49: whoever leaves takes its work along, and whoever waits is not kept."""

from __future__ import annotations

import asyncio
import socket

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from .asking import PROMPT, USER, chat
from .endpoints import Endpoint
from .model import CONTEXT, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
LONG, SAMPLES = CONTEXT - 100, 32


def test_A49_closing_a_stream_ends_its_work(endpoint: Endpoint, client: OpenAI) -> None:
    endpoint.wait_idle()
    before = endpoint.engine.generated()
    stream = chat(client, {"ignore_eos": True}, stream=True, max_tokens=LONG, n=SAMPLES)
    for _ in zip(range(20), stream, strict=False):
        pass
    stream.close()
    endpoint.wait_idle()
    assert endpoint.engine.generated() - before < SAMPLES * LONG / 2


async def test_A49_cancelling_a_waiting_call_ends_its_work(endpoint: Endpoint, aclient: AsyncOpenAI) -> None:
    await asyncio.to_thread(endpoint.wait_idle)
    before = endpoint.engine.generated()
    call = asyncio.ensure_future(
        aclient.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=LONG, n=SAMPLES, extra_body={"ignore_eos": True}
        )
    )
    while endpoint.engine.running() == 0 and not call.done():
        await asyncio.sleep(0.05)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(endpoint.wait_idle)
    assert endpoint.engine.generated() - before < SAMPLES * LONG / 2


def test_A49_a_client_that_gives_up_in_time_gets_its_timeout(endpoint: Endpoint, client: OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=LONG, n=SAMPLES, extra_body={"ignore_eos": True}
        )
    endpoint.wait_idle()


def test_A49_an_address_where_nobody_listens_is_a_connection_error() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = OpenAI(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}/v1", api_key="x", max_retries=1)
        with pytest.raises(openai.APIConnectionError):
            nobody.chat.completions.create(model=MODEL, messages=USER)
