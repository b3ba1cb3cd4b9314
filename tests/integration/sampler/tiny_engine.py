"""One real vLLM engine on a tiny model for a module's tests, requests for it, and what transformers says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import pytest_asyncio
from rollgrid_contracts.jobs import SamplingParams
from rollgrid_sampler.engines.base import Generated, GenerationRequest
from rollgrid_sampler.settings import SamplerSettings

from tests.support.tiny_models import TinyModel, tiny_model

MIB = 1024 * 1024
OLD, NEW = TinyModel(), TinyModel(seed=1)
numbers = iter(range(1_000_000))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine() -> AsyncIterator[Any]:
    from rollgrid_sampler.engines.vllm import VllmEngine

    # weights in place, as on a GPU; the other tests of versions have them double-buffered
    made = VllmEngine(SamplerSettings(model=tiny_model(OLD), slots=128, kv_cache_bytes=64 * MIB, double_buffer=False))
    await made.start(0, tiny_model(OLD))
    yield made
    await made.close()


def request(prompt: list[int] | None = None, seed: int | None = None, **sampling: Any) -> GenerationRequest:
    number = next(numbers)
    return GenerationRequest(
        request_id=f"r{number}",
        sample=f"s{number}",
        index=0,
        prompt_token_ids=prompt or [5, 6, 7, 8],
        sampling=SamplingParams(**{"max_tokens": 16, **sampling}),
        seed=seed,
        cache_salt="test",
    )


@cache
def loaded(spec: TinyModel) -> Any:
    """The model in transformers, float32."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model(spec), dtype=torch.float32)


def reference(spec: TinyModel, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Log-probabilities of `tokens` after `prompt` by a transformers forward in float32."""
    import torch

    with torch.no_grad():
        logits = loaded(spec)(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] / temperature
        return [float(x) for x in logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]]


def difference(spec: TinyModel, prompt: list[int], result: Generated, temperature: float = 1.0) -> float:
    expected = reference(spec, prompt, result.token_ids, temperature)
    return max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True))
