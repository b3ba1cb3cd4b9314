"""A49: streamed answers are the plain ones in pieces."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI, OpenAI

from .asking import FREE, PROMPT, USER, Joined, assert_logprobs, chat, complete, extra_of, ids_of
from .endpoints import Endpoint
from .model import END_THINK, EOS, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
USAGE = {"include_usage": True}


def joined_chat(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Joined:
    return Joined(chat(client, extra, stream=True, **fields), is_chat=True)


def joined_completion(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Joined:
    return Joined(complete(client, extra, stream=True, **fields), is_chat=False)


def counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens


def test_A49_a_streamed_chat_is_the_plain_one_in_pieces(client: OpenAI) -> None:
    plain = chat(client, FREE, seed=5, max_tokens=24)
    found = joined_chat(client, FREE, seed=5, max_tokens=24, stream_options=USAGE)
    assert found.text[0] == plain.choices[0].message.content
    assert found.token_ids[0] == ids_of(plain.choices[0])
    assert found.finish == {0: "length"}
    assert counts(found.usage) == counts(plain.usage)
    assert len(found.chunks) > 3
    assert found.chunks[0].choices[0].delta.role == "assistant"
    assert {chunk.object for chunk in found.chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in found.chunks}) == 1


def test_A49_a_streamed_completion_is_the_plain_one_in_pieces(client: OpenAI) -> None:
    plain = complete(client, FREE, seed=5, max_tokens=24)
    found = joined_completion(client, FREE, seed=5, max_tokens=24, stream_options=USAGE)
    assert found.text[0] == plain.choices[0].text
    assert found.token_ids[0] == ids_of(plain.choices[0])
    assert found.finish == {0: "length"}
    assert counts(found.usage) == counts(plain.usage)
    assert {chunk.object for chunk in found.chunks} == {"text_completion"}


async def test_A49_the_async_client_streams(aclient: AsyncOpenAI) -> None:
    stream = await aclient.chat.completions.create(
        model=MODEL, messages=USER, max_tokens=16, stream=True, extra_body={"ignore_eos": True}
    )
    found = Joined([chunk async for chunk in stream], is_chat=True)
    assert found.text[0]
    assert found.finish == {0: "length"}


def test_A49_the_sdk_helper_accumulates_a_stream(client: OpenAI) -> None:
    one_word = {"structured_outputs": {"choice": ["certainly"]}}
    with client.chat.completions.stream(model=MODEL, messages=USER, max_tokens=40, extra_body=one_word) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == "certainly"
    assert final.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_A13_four_samples_are_interleaved_and_each_ends(client: OpenAI, kind: str) -> None:
    joined = joined_chat if kind == "chat" else joined_completion
    found = joined(client, FREE, n=4, max_tokens=48, stream_options=USAGE)
    assert found.finish == dict.fromkeys(range(4), "length")
    assert {index: len(ids) for index, ids in found.token_ids.items()} == dict.fromkeys(range(4), 48)
    firsts = [found.order.index(index) for index in range(4)]
    assert max(firsts) < len(found.order) - 8, "the last began when the others had ended"
    assert found.usage.completion_tokens == 4 * 48


def test_A49_streamed_prompts_times_n(client: OpenAI) -> None:
    found = joined_completion(client, FREE, prompt=[[1, 40], [1, 50]], n=2)
    assert set(found.finish) == {0, 1, 2, 3}
    assert {len(ids) for ids in found.token_ids.values()} == {8}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_A26_streamed_logprobs_are_those_of_the_plain_answer(client: OpenAI, kind: str) -> None:
    if kind == "chat":
        (plain,) = chat(client, FREE, logprobs=True, top_logprobs=2, temperature=0, max_tokens=16).choices
        want = [entry.logprob for entry in plain.logprobs.content]
        found = joined_chat(client, FREE, logprobs=True, top_logprobs=2, temperature=0, max_tokens=16)
    else:
        (plain,) = complete(client, FREE, logprobs=2, temperature=0, max_tokens=16).choices
        want = plain.logprobs.token_logprobs
        found = joined_completion(client, FREE, logprobs=2, temperature=0, max_tokens=16)
    assert_logprobs(found.logprobs[0])
    assert found.logprobs[0] == pytest.approx(want, abs=1e-4)
    assert len(found.logprobs[0]) == len(found.token_ids[0]) == 16


def test_A49_usage_comes_only_when_asked_for(client: OpenAI) -> None:
    assert all(chunk.usage is None for chunk in joined_chat(client).chunks)
    found = joined_chat(client, stream_options=USAGE)
    assert found.chunks[-1].choices == []
    assert found.chunks[-1].usage is found.usage is not None
    assert sum(chunk.usage is not None for chunk in found.chunks) == 1


def test_A49_usage_with_every_chunk_where_it_is_asked_for(client: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    counts = [chunk.usage.completion_tokens for chunk in joined_chat(client, FREE, stream_options=options).chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


def test_A26_a_stop_string_never_shows_in_a_stream(client: OpenAI) -> None:
    text = complete(client, FREE, temperature=0, max_tokens=40).choices[0].text
    stop = next(text[i : i + 3] for i in range(6, len(text) - 3) if text[i : i + 3].isascii())
    found = joined_completion(client, FREE, temperature=0, max_tokens=40, stop=stop)
    assert found.text[0] == text[: text.index(stop)]
    assert found.finish == {0: "stop"}


def test_A26_an_end_at_once_is_an_empty_text_with_one_token(client: OpenAI) -> None:
    found = joined_chat(client, {"return_token_ids": True}, logit_bias={str(EOS): 100}, stream_options=USAGE)
    assert (found.text[0], found.finish[0], found.token_ids[0]) == ("", "stop", [EOS])
    assert found.usage.completion_tokens == 1


def test_A49_streamed_reasoning_is_that_of_the_plain_answer(client: OpenAI) -> None:
    extra = {"chat_template_kwargs": {"thinking": True}, **FREE, "allowed_token_ids": [40, 41, 42, END_THINK]}
    fields: dict[str, Any] = {"temperature": 0, "frequency_penalty": 2, "max_tokens": 6}
    message = chat(client, extra, **fields).choices[0].message
    found = joined_chat(client, extra, **fields)
    assert found.reasoning[0] == message.model_extra["reasoning"]
    assert found.text[0] == message.content
    assert len(found.token_ids[0]) == 6


def test_A49_a_stream_gives_the_prompts_ids_once(client: OpenAI) -> None:
    first, *rest = joined_chat(client, FREE).chunks
    assert extra_of(first, "prompt_token_ids") == extra_of(chat(client, FREE), "prompt_token_ids")
    assert not any((chunk.model_extra or {}).get("prompt_token_ids") for chunk in rest)


@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": USER})],
)
def test_A49_on_the_wire_a_stream_is_events_that_end_with_done(endpoint: Endpoint, path: str, body: dict) -> None:
    asked = {"model": MODEL, "max_tokens": 4, "stream": True, **body}
    headers = {"authorization": f"Bearer {endpoint.key}"}
    answer = httpx2.post(endpoint.url + path, json=asked, headers=headers, timeout=60)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        assert "error" not in json.loads(line[6:])
