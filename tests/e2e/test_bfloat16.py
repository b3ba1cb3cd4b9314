"""A26 in bfloat16: what the engine returns against a float32 and a bfloat16 forward of the same weights."""

from __future__ import annotations

import httpx2
import pytest

from tests.e2e.doors import rollouts, samples
from tests.e2e.reference import worst_difference
from tests.e2e.test_logprobs import SAMPLES, prompts
from tests.support.stack import POLICY, stack, vllm
from tests.support.tiny_models import TinyModel, tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(420)]
MODEL = TinyModel(dtype="bfloat16")
TOLERANCE = 0.06
"""Stated bound; docs/reference/logprobs.md has what was measured."""


def test_A26_bfloat16_logprobs_stay_within_the_stated_bound() -> None:
    asked = prompts(4)
    with stack(vllm(model=MODEL)) as pipe, httpx2.Client(base_url=pipe.url, timeout=120) as http:
        groups = rollouts(
            http,
            {
                "run": "bfloat16",
                "policy": POLICY,
                "n": SAMPLES // len(asked),
                "sampling": {"max_tokens": 24},
                "tasks": [{"prompt_token_ids": prompt} for prompt in asked],
            },
        )
    differences = [
        worst_difference(tiny_model(MODEL), prompt, sample["token_ids"], sample["logprobs"], 1.0)
        for prompt, group in zip(asked, groups, strict=True)
        for sample in samples(group)
    ]
    assert len(differences) == SAMPLES
    print(f"largest |Δlogprob| {max(differences):.4f}, mean of the largest {sum(differences) / SAMPLES:.4f}")
    assert max(differences) < TOLERANCE
