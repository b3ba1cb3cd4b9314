"""A13, A26: indexes, seeds and every way a generation ends, on the real engine through the doors."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import Door
from tests.e2e.doors import completion, rollouts, samples

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]
EOS = 2
PROMPT = [1, 40, 41, 42, 43]


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 512) for _ in range(length)]


def test_A13_eight_samples_have_eight_indexes_and_seeds_no_neighbour_repeats(
    http: httpx2.Client, vllm_door: Door
) -> None:
    tasks = [{"prompt_token_ids": PROMPT, "sampling": {"max_tokens": 4, "seed": 100 + k}} for k in range(12)]
    groups = rollouts(http, {"run": "seeds", "policy": vllm_door.policy, "n": 8, "tasks": tasks})
    seeds = []
    for group in groups:
        found = samples(group)
        assert [sample["index"] for sample in found] == list(range(8))
        seeds += [sample["seed"] for sample in found]
    assert len(set(seeds)) == 12 * 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_A26_unseeded_says_so(http: httpx2.Client, vllm_door: Door) -> None:
    tasks = [{"prompt_token_ids": PROMPT}]
    (group,) = rollouts(
        http, {"run": "unseeded", "policy": vllm_door.policy, "n": 8, "sampling": {"max_tokens": 12}, "tasks": tasks}
    )
    assert all(sample.get("seed") is None for sample in samples(group))
    assert len({tuple(sample["token_ids"]) for sample in samples(group)}) > 1


def test_A26_the_same_seed_repeats_the_same_tokens(http: httpx2.Client, vllm_door: Door) -> None:
    def once() -> list[list[int]]:
        body = completion(http, model=vllm_door.policy, prompt=PROMPT, n=8, max_tokens=32, seed=7)
        return [choice["token_ids"] for choice in body["choices"]]

    first = once()
    assert len({tuple(ids) for ids in first}) > 1
    assert once() == first


async def test_A26_128_seeded_requests_of_256_tokens_at_once(vllm_door: Door) -> None:
    async with httpx2.AsyncClient(base_url=vllm_door.stack.url, timeout=180) as http:

        async def one(number: int) -> httpx2.Response:
            return await http.post(
                "/v1/completions",
                json={
                    "model": vllm_door.policy,
                    "prompt": prompt(number, 256),
                    "max_tokens": 16,
                    "seed": number,
                    "logprobs": 0,
                    "return_token_ids": True,
                },
            )

        answers = await asyncio.gather(*(one(number) for number in range(128)))
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    assert vllm_door.stack["sampler-0"].is_ready()


def ended(choice: dict[str, Any]) -> tuple[str, Any]:
    assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) > 0
    return choice["finish_reason"], choice.get("stop_reason")


def test_A26_length(http: httpx2.Client, vllm_door: Door) -> None:
    body = completion(http, model=vllm_door.policy, prompt=PROMPT, max_tokens=9, ignore_eos=True)
    assert ended(body["choices"][0]) == ("length", None)
    assert len(body["choices"][0]["token_ids"]) == 9


def test_A26_stop_id_is_reported_and_stays_in_the_ids(http: httpx2.Client, vllm_door: Door) -> None:
    free = completion(http, model=vllm_door.policy, prompt=PROMPT, max_tokens=24, temperature=0, ignore_eos=True)
    ids = free["choices"][0]["token_ids"]
    body = completion(
        http, model=vllm_door.policy, prompt=PROMPT, max_tokens=24, temperature=0, ignore_eos=True,
        stop_token_ids=[ids[5]],
    )  # fmt: skip
    expected = ids[: ids.index(ids[5]) + 1]
    assert ended(body["choices"][0]) == ("stop", ids[5])
    assert body["choices"][0]["token_ids"] == expected


def test_A26_eos_stays_in_the_ids(http: httpx2.Client, vllm_door: Door) -> None:
    body = completion(
        http, model=vllm_door.policy, prompt=PROMPT, n=4, max_tokens=64, seed=3, logit_bias={str(EOS): 6.0}
    )
    stopped = [choice for choice in body["choices"] if choice["finish_reason"] == "stop"]
    assert stopped
    for choice in stopped:
        assert ended(choice)[0] == "stop"
        assert choice["token_ids"][-1] == EOS
        assert EOS not in choice["token_ids"][:-1]


def test_A26_immediate_eos_is_one_token_not_none(http: httpx2.Client, vllm_door: Door) -> None:
    body = completion(http, model=vllm_door.policy, prompt=PROMPT, max_tokens=8, logit_bias={str(EOS): 100.0})
    assert ended(body["choices"][0])[0] == "stop"
    assert body["choices"][0]["token_ids"] == [EOS]
    assert body["choices"][0]["text"] == ""


def test_A26_stop_string(http: httpx2.Client, vllm_door: Door) -> None:
    free = completion(http, model=vllm_door.policy, prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)
    text = free["choices"][0]["text"]
    stop = next(
        text[i : i + 2] for i in range(8, len(text) - 2) if text[i : i + 2].isascii() and text[i : i + 2].strip()
    )
    body = completion(
        http, model=vllm_door.policy, prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True, stop=[stop]
    )
    choice = body["choices"][0]
    assert ended(choice) == ("stop", stop)
    assert choice["text"] == text[: text.index(stop)]
    assert choice["token_ids"] == free["choices"][0]["token_ids"][: len(choice["token_ids"])]
