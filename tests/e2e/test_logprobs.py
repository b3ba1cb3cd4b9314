"""A02, A26: what a trainer computes a ratio from equals its own forward, through every door."""

from __future__ import annotations

import random

import httpx2
import pytest

from tests.e2e.conftest import Door
from tests.e2e.doors import rollouts, samples
from tests.e2e.reference import worst_difference

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]
SAMPLES = 50
TOLERANCE = 1e-4
"""float32; the same bound at every temperature, since temperature 1/T only scales logits."""


def prompts(seed: int) -> list[list[int]]:
    """Ten prompts of 5 to 60 ids; five samples each."""
    draw = random.Random(seed)
    return [[1] + [draw.randrange(3, 512) for _ in range(draw.randrange(4, 60))] for _ in range(SAMPLES // 5)]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_A26_completions_logprobs_match_a_forward(http: httpx2.Client, vllm_door: Door, temperature: float) -> None:
    asked = prompts(1)
    answer = http.post(
        "/v1/completions",
        json={
            "model": vllm_door.policy,
            "prompt": asked,
            "n": 5,
            "max_tokens": 24,
            "temperature": temperature,
            "logprobs": 0,
            "return_token_ids": True,
        },
    )
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(SAMPLES))
    differences = []
    for choice in choices:
        prompt = asked[choice["index"] // 5]  # prompt-major
        assert choice["prompt_token_ids"] == prompt
        got = choice["logprobs"]["token_logprobs"]
        differences.append(worst_difference(vllm_door.model, prompt, choice["token_ids"], got, temperature))
    assert len(differences) == SAMPLES
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_A26_generate_logprobs_match_a_forward(http: httpx2.Client, vllm_door: Door, temperature: float) -> None:
    differences = []
    for prompt in prompts(2):
        answer = http.post(
            "/inference/v1/generate",
            json={
                "model": vllm_door.policy,
                "token_ids": prompt,
                "sampling_params": {"max_tokens": 24, "temperature": temperature, "n": 5, "logprobs": 1},
            },
        )
        assert answer.status_code == 200, answer.text
        for choice in answer.json()["choices"]:
            content = choice["logprobs"]["content"]
            assert [entry["token_id"] for entry in content] == choice["token_ids"]
            assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
            got = [entry["logprob"] for entry in content]
            differences.append(worst_difference(vllm_door.model, prompt, choice["token_ids"], got, temperature))
    assert len(differences) == SAMPLES
    assert max(differences) < TOLERANCE


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_A26_rollout_logprobs_match_a_forward(http: httpx2.Client, vllm_door: Door, temperature: float) -> None:
    asked = prompts(3)
    groups = rollouts(
        http,
        {
            "run": f"logprobs-{int(temperature * 10)}",
            "policy": vllm_door.policy,
            "n": 5,
            "sampling": {"max_tokens": 24, "temperature": temperature},
            "tasks": [{"prompt_token_ids": prompt} for prompt in asked],
        },
    )
    differences = []
    for prompt, group in zip(asked, groups, strict=True):
        assert group["prompt_token_ids"] == prompt
        for sample in samples(group):
            assert sample["status"] == "succeeded"
            got = sample["logprobs"]
            differences.append(worst_difference(vllm_door.model, prompt, sample["token_ids"], got, temperature))
    assert len(differences) == SAMPLES
    assert max(differences) < TOLERANCE
