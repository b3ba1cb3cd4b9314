"""A49, A26: `/v1/completions`, prompt shapes, logprobs and ids."""

from __future__ import annotations

import pytest
from openai import OpenAI

from .asking import FREE, PROMPT, assert_logprobs, complete, extra_of, ids_of
from .model import CONTEXT, MODEL

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_A49_a_text_is_completed_with_usage_and_a_reason(client: OpenAI) -> None:
    body = complete(client, {"ignore_eos": True}, prompt="What is 12 plus 30?", max_tokens=9)
    assert body.object == "text_completion"
    assert body.id.startswith("cmpl-")
    (choice,) = body.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert body.usage.completion_tokens == 9
    assert body.usage.prompt_tokens > 0
    assert body.usage.total_tokens == body.usage.prompt_tokens + 9


def test_A13_four_samples_have_four_indexes(client: OpenAI) -> None:
    body = complete(client, FREE, n=4, max_tokens=24)
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    assert len({tuple(ids_of(choice)) for choice in body.choices}) == 4
    assert body.usage.completion_tokens == 96
    assert body.usage.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("prompts", [[[1, 40, 41], [1, 50, 51, 52]], ["one two", "three"]])
def test_A26_prompts_times_n_come_in_prompt_major_order(client: OpenAI, prompts: list) -> None:
    body = complete(client, FREE, prompt=prompts, n=2)
    assert [choice.index for choice in body.choices] == [0, 1, 2, 3]
    seen = [extra_of(choice, "prompt_token_ids") for choice in body.choices]
    assert seen[0] == seen[1] != seen[2] == seen[3]
    if isinstance(prompts[0], list):
        assert [seen[0], seen[2]] == prompts
    assert body.usage.prompt_tokens == len(seen[0]) + len(seen[2])


@pytest.mark.parametrize("asked", [0, 1, 5])
def test_A26_one_logprob_per_token_and_the_sampled_one_among_the_alternatives(client: OpenAI, asked: int) -> None:
    named = {**FREE, "return_tokens_as_token_ids": True}  # pieces of characters all look alike as text
    (choice,) = complete(client, named, logprobs=asked, max_tokens=12).choices
    found = choice.logprobs
    count = len(ids_of(choice))
    assert count == 12
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == len(found.text_offset) == count
    assert_logprobs(found.token_logprobs)
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert top[token] == value
        assert len(top) <= asked + 1
        assert_logprobs(top.values())
        if asked:
            assert max(top.values()) == max(value, *top.values())
    assert found.text_offset == sorted(found.text_offset)


def test_A26_no_logprobs_unless_asked_for(client: OpenAI) -> None:
    assert complete(client).choices[0].logprobs is None


def test_A26_tokens_may_be_named_by_id(client: OpenAI) -> None:
    (choice,) = complete(client, {**FREE, "return_tokens_as_token_ids": True}, logprobs=2).choices
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in ids_of(choice)]
    assert all(name.startswith("token_id:") for top in choice.logprobs.top_logprobs for name in top)


def test_A26_ids_given_back_as_a_prompt_continue_as_if_nothing_had_been_between(client: OpenAI) -> None:
    (whole,) = complete(client, FREE, temperature=0, max_tokens=24, logprobs=0).choices
    (first,) = complete(client, FREE, temperature=0, max_tokens=10, logprobs=0).choices
    assert ids_of(first) == ids_of(whole)[:10]
    prompt = extra_of(first, "prompt_token_ids") + ids_of(first)
    (second,) = complete(client, FREE, prompt=prompt, temperature=0, max_tokens=14, logprobs=0).choices
    assert ids_of(first) + ids_of(second) == ids_of(whole)
    joined = first.logprobs.token_logprobs + second.logprobs.token_logprobs
    assert joined == pytest.approx(whole.logprobs.token_logprobs, abs=1e-4)


def test_echo_repeats_the_prompt_before_the_completion(client: OpenAI) -> None:
    free = {"ignore_eos": True}
    (plain,) = complete(client, free, prompt="one two three", temperature=0).choices
    (echoed,) = complete(client, free, prompt="one two three", temperature=0, echo=True).choices
    assert echoed.text == "one two three" + plain.text


def test_echo_with_logprobs_scores_the_prompt(client: OpenAI) -> None:
    body = complete(client, {"return_token_ids": True}, echo=True, logprobs=1, max_tokens=4, temperature=0)
    found = body.choices[0].logprobs
    assert len(found.token_logprobs) == len(PROMPT) + body.usage.completion_tokens
    assert found.token_logprobs[0] is None
    assert_logprobs(found.token_logprobs[1:])


def test_prompt_logprobs_score_every_token_but_the_first(client: OpenAI) -> None:
    (choice,) = complete(client, {"prompt_logprobs": 1}, max_tokens=1, temperature=0).choices
    found = extra_of(choice, "prompt_logprobs")
    assert len(found) == len(PROMPT)
    assert found[0] is None
    for token, entries in zip(PROMPT[1:], found[1:], strict=True):
        own = entries[str(token)]
        assert next(iter(entries)) == str(token)
        assert_logprobs(entry["logprob"] for entry in entries.values())
        assert own["rank"] >= 1
        assert any(entry["rank"] == 1 for entry in entries.values())


def test_A49_without_max_tokens_sixteen_as_openai_says(client: OpenAI) -> None:
    prompt = [5] * (CONTEXT - 100)  # the context leaves room for more
    body = client.completions.create(model=MODEL, prompt=prompt, extra_body={"ignore_eos": True})
    assert body.usage is not None
    assert body.usage.completion_tokens == 16
