"""What affinity is for, on real vLLM: later turns find their prompts in the KV cache of the worker they go to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families
from rollgrid import Client, Retries

from tests.support.stack import POLICY, Stack

from .conftest import BLOCK

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(540)]

SESSIONS, TURNS, ADDED, SAMPLED = 6, 5, 40, 8
PROMPTS = sum(turn * (ADDED + SAMPLED) + ADDED for turn in range(TURNS)) * SESSIONS
WHOLE_BLOCKS = sum((turn * (ADDED + SAMPLED) - 1) // BLOCK * BLOCK for turn in range(1, TURNS)) * SESSIONS
"""Prompt tokens, and those of them that the turn before left in whole blocks (its last token has no KV yet)."""
GREEDY: dict[str, Any] = {"max_tokens": SAMPLED, "ignore_eos": True, "temperature": 0.0}


def counted(pipe: Stack) -> tuple[int, int]:
    """Prompt tokens so far, and those that came from a prefix cache."""
    totals = {"rollgrid_sampler_prompt_tokens": 0.0, "rollgrid_sampler_cached_tokens": 0.0}
    for process in pipe.named("sampler"):
        for family in text_string_to_metric_families(process.metrics()):
            if family.name in totals:
                totals[family.name] += sum(sample.value for sample in family.samples)
    prompt, cached = totals.values()
    return int(prompt), int(cached)


def played(pipe: Stack, turn: Callable[[int, list[int]], list[int]], seed: int) -> int:
    """Conversations in step, each turn with new random ids; the prompt tokens that were cached.  `turn` gives what was sampled."""
    draw, before = random.Random(seed), counted(pipe)
    histories: list[list[int]] = [[] for _ in range(SESSIONS)]
    for _ in range(TURNS):
        for number, history in enumerate(histories):
            history += [draw.randrange(10, 200) for _ in range(ADDED)]
            history += turn(number, history)
    prompt, cached = (now - then for now, then in zip(counted(pipe), before, strict=True))
    assert prompt == PROMPTS
    return cached


def test_bound_turns_find_more_of_their_prompts_cached_than_turns_of_the_pool(engines: Stack) -> None:
    """A25, as counts of tokens: what a session's turns left is there, and of a pool's some by luck."""
    with Client(engines.url, retries=Retries(budget_s=120)) as client, httpx2.Client(timeout=120) as http:
        sessions = [client.sessions.open(run="bound", group=f"g{number}") for number in range(SESSIONS)]

        def of_a_session(number: int, history: list[int]) -> list[int]:
            return sessions[number].sample(token_ids=history, **GREEDY).token_ids.tolist()

        def of_the_pool(number: int, history: list[int]) -> list[int]:
            body = {"model": POLICY, "token_ids": history, "sampling_params": GREEDY}
            answer = http.post(f"{engines.url}/inference/v1/generate", json=body)
            assert answer.status_code == 200, answer.text
            found: list[int] = answer.json()["choices"][0]["token_ids"]
            return found

        bound = played(engines, of_a_session, 1)
        workers = {node.worker for session in sessions for node in session.state().nodes}
        random_ = played(engines, of_the_pool, 2)
    assert len(workers) == 2
    assert bound >= WHOLE_BLOCKS
    assert random_ < bound
