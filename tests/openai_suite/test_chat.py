"""A49, A26: `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from .asking import FREE, USER, assert_logprobs, chat, complete, extra_of, ids_of
from .model import CONTEXT, END_THINK, EOS, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
E_FIRST, E_SECOND = 130, 105
"""The two bytes of an é, as pieces of the tokenizer."""


def test_A49_a_chat_is_answered(client: OpenAI) -> None:
    body = chat(client, {"ignore_eos": True}, max_tokens=9)
    assert body.object == "chat.completion"
    assert body.id.startswith("chatcmpl-")
    assert body.model == MODEL
    (choice,) = body.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert not choice.message.tool_calls
    assert choice.finish_reason == "length"
    assert body.usage.completion_tokens == 9
    assert body.usage.total_tokens == body.usage.prompt_tokens + 9


async def test_A49_the_async_client_too(aclient: AsyncOpenAI) -> None:
    body = await aclient.chat.completions.create(model=MODEL, messages=USER, max_tokens=5, n=2)
    assert [choice.index for choice in body.choices] == [0, 1]


def test_A13_four_samples_have_four_indexes(client: OpenAI) -> None:
    body = chat(client, FREE, n=4, max_tokens=24)
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    assert len({tuple(ids_of(choice)) for choice in body.choices}) == 4
    assert body.usage.completion_tokens == 96


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_A49_both_names_of_the_bound(client: OpenAI, field: str) -> None:
    asked: dict[str, Any] = {field: 5}
    body = client.chat.completions.create(model=MODEL, messages=USER, **asked, extra_body={"ignore_eos": True})
    assert (body.usage.completion_tokens, body.choices[0].finish_reason) == (5, "length")


def test_A49_without_a_bound_the_context_is_one(client: OpenAI) -> None:
    long: list[Any] = [{"role": "user", "content": "0" * 1800}]
    body = client.chat.completions.create(
        model=MODEL, messages=long, extra_body={"ignore_eos": True, "return_token_ids": True}
    )
    assert body.choices[0].finish_reason == "length"
    assert body.usage is not None
    assert body.usage.total_tokens == CONTEXT


def test_A26_stop_tokens_stay_in_the_ids_and_out_of_the_text(client: OpenAI) -> None:
    body = chat(client, {"return_token_ids": True}, max_tokens=64, logit_bias={str(EOS): 100})
    (choice,) = body.choices
    assert (choice.finish_reason, ids_of(choice), choice.message.content or "") == ("stop", [EOS], "")
    assert body.usage.completion_tokens == 1


def test_A26_logprobs_and_alternatives(client: OpenAI) -> None:
    (choice,) = chat(client, FREE, logprobs=True, top_logprobs=3, max_tokens=12).choices
    content = choice.logprobs.content
    assert len(content) == len(ids_of(choice)) == 12
    for entry in content:
        assert_logprobs([entry.logprob, *(top.logprob for top in entry.top_logprobs)])
        assert 3 <= len(entry.top_logprobs) <= 4
        assert isinstance(entry.token, str)
        assert entry.bytes is not None
        assert max(top.logprob for top in entry.top_logprobs) >= entry.logprob


def test_A26_the_bytes_of_tokens_that_are_parts_of_a_character(client: OpenAI) -> None:
    extra = {**FREE, "allowed_token_ids": [E_FIRST, E_SECOND]}
    (choice,) = chat(client, extra, logprobs=True, temperature=0, frequency_penalty=2, max_tokens=6).choices
    want = [{E_FIRST: [0xC3], E_SECOND: [0xA9]}[token] for token in ids_of(choice)]
    assert [entry.bytes for entry in choice.logprobs.content] == want


def test_A26_logprobs_without_alternatives(client: OpenAI) -> None:
    (choice,) = chat(client, FREE, logprobs=True).choices
    assert [entry.top_logprobs for entry in choice.logprobs.content] == [[]] * 8
    assert chat(client).choices[0].logprobs is None


def test_A26_tokens_may_be_named_by_id(client: OpenAI) -> None:
    extra = {**FREE, "return_tokens_as_token_ids": True}
    (choice,) = chat(client, extra, logprobs=True, top_logprobs=2).choices
    assert [entry.token for entry in choice.logprobs.content] == [f"token_id:{token}" for token in ids_of(choice)]


def test_A26_a_chat_in_ids_continues_as_a_completion(client: OpenAI) -> None:
    body = chat(client, FREE, temperature=0, max_tokens=24)
    prompt, whole = extra_of(body, "prompt_token_ids"), ids_of(body.choices[0])
    assert len(prompt) == body.usage.prompt_tokens
    (rest,) = complete(client, FREE, prompt=prompt + whole[:10], temperature=0, max_tokens=14).choices
    assert ids_of(rest) == whole[10:]


def test_prompt_logprobs_of_a_chat(client: OpenAI) -> None:
    body = chat(client, {"prompt_logprobs": 0, "return_token_ids": True}, max_tokens=1)
    found, prompt = extra_of(body, "prompt_logprobs"), extra_of(body, "prompt_token_ids")
    assert found[0] is None
    assert len(found) == len(prompt)
    assert_logprobs(entries[str(token)]["logprob"] for token, entries in zip(prompt[1:], found[1:], strict=True))


def test_A49_a_conversation_with_parts_tools_and_names(client: OpenAI) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        {"role": "system", "content": "Answer."},
        {"role": "user", "content": [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "3"},
        {"role": "user", "content": "and?"},
    ]
    assert chat(client, messages=messages).usage.completion_tokens > 0


def test_A49_variables_of_the_template_change_the_prompt(client: OpenAI) -> None:
    plain = chat(client, {"return_token_ids": True})
    thinking = chat(client, {"return_token_ids": True, "chat_template_kwargs": {"thinking": True}})
    longer = extra_of(thinking, "prompt_token_ids")
    assert longer[: plain.usage.prompt_tokens] == extra_of(plain, "prompt_token_ids")
    assert len(longer) > plain.usage.prompt_tokens


def test_A49_reasoning_is_told_from_content(client: OpenAI) -> None:
    """Four pieces allowed and each use punished: a greedy model walks through all of them, `</think>` too."""
    extra = {"chat_template_kwargs": {"thinking": True}, **FREE, "allowed_token_ids": [40, 41, 42, END_THINK]}
    body = chat(client, extra, temperature=0, frequency_penalty=2, max_tokens=12)
    message, ids = body.choices[0].message, ids_of(body.choices[0])
    cut = ids.index(END_THINK)
    assert message.model_extra["reasoning"] == "".join("FGH"[token - 40] for token in ids[:cut])
    assert message.content.replace("</think>", "") == "".join("FGH"[t - 40] for t in ids[cut:] if t != END_THINK)


def test_A49_fields_without_influence_are_accepted(client: OpenAI) -> None:
    body = chat(client, user="somebody", store=False, metadata={"row": "1"}, service_tier="auto")
    assert body.usage.completion_tokens > 0
