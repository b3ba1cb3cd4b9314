"""A26: every sampling parameter does what it says, on `/v1/completions`; chats share the code behind it."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from .asking import FREE, PROMPT, chat, complete, ids_of
from .model import EOS

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def one(client: OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> list[int]:
    (choice,) = complete(client, {**FREE, **(extra or {})}, **{"max_tokens": 24, **fields}).choices
    return ids_of(choice)


def test_A26_a_seed_repeats_all_samples_and_another_does_not(client: OpenAI) -> None:
    def drawn(seed: int) -> list[list[int]]:
        return [ids_of(choice) for choice in complete(client, FREE, n=4, seed=seed, max_tokens=24).choices]

    first = drawn(7)
    assert len({tuple(ids) for ids in first}) == 4
    assert drawn(7) == first
    assert drawn(8) != first


def test_A26_a_seed_repeats_a_chat(client: OpenAI) -> None:
    first, second = (chat(client, FREE, seed=11, max_tokens=24).choices[0].message.content for _ in range(2))
    assert first == second


def test_A26_seeds_have_63_bits(client: OpenAI) -> None:
    high, low = one(client, seed=2**63 - 1), one(client, seed=2**31 - 1)
    assert high == one(client, seed=2**63 - 1)
    assert high != low


def test_A26_unseeded_samples_differ(client: OpenAI) -> None:
    assert one(client) != one(client)


def test_A26_temperature_zero_is_greedy(client: OpenAI) -> None:
    greedy = one(client, temperature=0)
    assert greedy == one(client, temperature=0)
    assert greedy == one(client, {"top_k": 1}, temperature=1)
    assert greedy == one(client, temperature=1, top_p=1e-6)
    assert greedy == one(client, {"min_p": 1.0}, temperature=1)


def test_A26_a_bias_forces_and_forbids(client: OpenAI) -> None:
    assert one(client, logit_bias={"77": 100}) == [77] * 24
    greedy = one(client, temperature=0)
    assert greedy[0] not in one(client, temperature=0, logit_bias={str(greedy[0]): -100})


def test_A26_only_allowed_tokens(client: OpenAI) -> None:
    assert set(one(client, {"allowed_token_ids": [40, 41]}, max_tokens=40)) == {40, 41}


@pytest.mark.parametrize("penalty", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_A26_penalties_keep_from_repeating(client: OpenAI, penalty: str) -> None:
    allowed = {"allowed_token_ids": [40, 41, 42, 43]}
    prompt = [1, 60, 61]  # none of the four: a penalty for repeating counts the prompt
    free = one(client, allowed, prompt=prompt, temperature=0, max_tokens=4)
    extra = {**allowed, "repetition_penalty": 5.0} if penalty == "repetition_penalty" else allowed
    fields: dict[str, Any] = {} if penalty == "repetition_penalty" else {penalty: 2.0}
    punished = one(client, extra, prompt=prompt, temperature=0, max_tokens=4, **fields)
    assert len(set(punished)) > len(set(free))


def test_A26_ignored_and_obeyed_end_of_text(client: OpenAI) -> None:
    biased: dict[str, Any] = {"logit_bias": {str(EOS): 100}, "max_tokens": 6}
    assert one(client, {"ignore_eos": False}, **biased) == [EOS]
    assert one(client, {"ignore_eos": True}, **biased) == [EOS] * 6


def test_A26_min_tokens_holds_the_end_back(client: OpenAI) -> None:
    ids = one(client, {"ignore_eos": False, "min_tokens": 5}, logit_bias={str(EOS): 50}, max_tokens=12)
    assert ids.index(EOS) == 5 == len(ids) - 1


def test_A26_bad_words_do_not_come(client: OpenAI) -> None:
    extra = {**FREE, "allowed_token_ids": [40, 41]}
    assert set(complete(client, extra, max_tokens=40).choices[0].text) == {"F", "G"}
    assert set(complete(client, {**extra, "bad_words": ["F"]}, max_tokens=40).choices[0].text) == {"G"}


def test_A26_stop_ids_end_and_stay(client: OpenAI) -> None:
    free = one(client, temperature=0)
    (choice,) = complete(client, {**FREE, "stop_token_ids": [free[5]]}, temperature=0, max_tokens=24).choices
    assert ids_of(choice) == free[: free.index(free[5]) + 1]
    assert choice.finish_reason == "stop"
    assert choice.model_extra["stop_reason"] == free[5]


def a_stop(client: OpenAI) -> tuple[str, str]:
    """Greedy text, and two characters of its middle."""
    text = complete(client, FREE, temperature=0, max_tokens=40).choices[0].text
    middle = range(6, len(text) - 2)
    return text, next(text[i : i + 2] for i in middle if text[i : i + 2].isascii() and text[i : i + 2].isprintable())


@pytest.mark.parametrize("included", [False, True])
def test_A26_a_stop_string_ends_before_or_behind_it(client: OpenAI, included: bool) -> None:
    text, stop = a_stop(client)
    extra = {**FREE, "include_stop_str_in_output": included}
    (choice,) = complete(client, extra, temperature=0, max_tokens=40, stop=["<never>", stop]).choices
    assert choice.text == text[: text.index(stop) + (len(stop) if included else 0)]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)


def test_A26_the_bound_ends_what_nothing_else_does(client: OpenAI) -> None:
    (choice,) = complete(client, FREE, max_tokens=3, stop="<never>").choices
    assert (choice.finish_reason, len(ids_of(choice))) == ("length", 3)
    assert choice.model_extra.get("stop_reason") is None


def test_A26_many_at_once_stay_apart(client: OpenAI) -> None:
    prompts = [[*PROMPT, 100 + i] for i in range(16)]
    whole = complete(client, FREE, prompt=prompts, temperature=0).choices
    alone = [complete(client, FREE, prompt=prompt, temperature=0).choices[0] for prompt in prompts[::5]]
    assert [ids_of(choice) for choice in whole[::5]] == [ids_of(choice) for choice in alone]
