"""A49: what is wrong is a typed error of the SDK, with OpenAI's envelope, and harms nobody else."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from .asking import PROMPT, USER, chat, complete
from .endpoints import Endpoint
from .model import CONTEXT, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

BAD: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 2},
    "n is zero": {"n": 0},
    "max_tokens below": {"max_tokens": -1},
    "logit_bias of no token": {"logit_bias": {"100000": 1}},
    "logit_bias of no number": {"logit_bias": {"x": 1}},
    "presence_penalty": {"presence_penalty": 9},
    "frequency_penalty": {"frequency_penalty": -9},
    "seed beyond 64 bits": {"seed": 2**70},
    "type": {"max_tokens": "many"},
}
BAD_CHAT: dict[str, dict[str, Any]] = {
    "top_logprobs alone": {"top_logprobs": 3},
    "top_logprobs too many": {"logprobs": True, "top_logprobs": 1000},
    "messages is a text": {"messages": "hi"},
    "no role": {"messages": [{"content": "hi"}]},
    "stream_options without stream": {"stream_options": {"include_usage": True}},
}
BAD_COMPLETION: dict[str, dict[str, Any]] = {
    "logprobs too many": {"logprobs": 1000},
    "prompt is an object": {"prompt": {"a": 1}},
    "token out of range": {"prompt": [5, 100_000]},
    "empty prompt": {"prompt": []},
    "stop ids": {"extra": {"stop_token_ids": ["x"]}},
    "min over max": {"extra": {"min_tokens": 100}, "max_tokens": 4},
    "suffix": {"suffix": "end"},
}


def check_envelope(caught: openai.APIStatusError) -> None:
    assert isinstance(caught.body, dict)
    assert caught.body["message"]
    assert set(caught.body) >= {"message", "type", "param", "code"}


@pytest.mark.parametrize("fields", (BAD | BAD_CHAT).values(), ids=list(BAD | BAD_CHAT))
def test_A49_bad_values_in_a_chat(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    check_envelope(caught.value)


@pytest.mark.parametrize("fields", (BAD | BAD_COMPLETION).values(), ids=list(BAD | BAD_COMPLETION))
def test_A49_bad_values_in_a_completion(client: OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, **fields)
    check_envelope(caught.value)


def test_A49_a_field_that_nobody_knows_is_refused_by_name(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temprature"):
        chat(client, {"temprature": 0.5})


def test_A49_a_prompt_longer_than_the_context(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        complete(client, prompt=[5] * (CONTEXT + 1))
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        chat(client, messages=[{"role": "user", "content": "0" * (CONTEXT + 1)}])


def test_A49_a_prompt_that_leaves_less_than_was_asked_for(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
        complete(client, prompt=[5] * (CONTEXT - 10), max_tokens=11)


def test_A49_errors_before_a_stream_are_statuses_not_events(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        chat(client, stream=True, temperature=-1)
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=USER, stream=True)


def test_A49_images_are_refused(client: OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError):
        chat(client, messages=[{"role": "user", "content": [image]}])


def test_A49_bodies_that_are_no_json(endpoint: Endpoint) -> None:
    headers = {"authorization": f"Bearer {endpoint.key}", "content-type": "application/json"}
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in (b"{", b"[]", b"\xff\xfe", b""):
            answer = httpx2.post(endpoint.url + path, content=body, headers=headers, timeout=30)
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["error"]["message"]


def test_A49_nothing_of_this_harmed_the_engine(client: OpenAI) -> None:
    assert complete(client, model=MODEL, prompt=PROMPT).usage.completion_tokens > 0
