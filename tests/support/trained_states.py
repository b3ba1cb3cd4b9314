"""The weights of a small model after each of several real AdamW steps: what deltas are measured and tested on.

A policy-gradient loss on completions with a group-normalised synthetic reward, gradients clipped to 1,
float32 masters, AdamW (0.9, 0.999, 1e-8, no decay), cast to the model's dtype by rounding to nearest.
`settled` masters begin uniformly inside the rounding cell of their weight, as after many steps; without
it they begin on the grid, as in the first steps from a checkpoint, where fewer weights move.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np


class Batch(NamedTuple):
    """What each step learns from; tokens of a prompt and of a completion."""

    prompts: int = 2
    group: int = 4
    prompt: int = 40
    completion: int = 32


SMALL = Batch(prompts=1, group=2, prompt=8, completion=8)
"""For tests: the step of the optimizer is what takes the time."""


def adamw_states(
    folder: Path,
    rates: list[float],
    *,
    dtype: str = "bfloat16",
    settled: bool = True,
    batch: Batch = Batch(),  # noqa: B008
    sample_every: int = 1,
    seed: int = 0,
    threads: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """The state before the first step and after each; one step per learning rate.

    Arrays are the raw bits (unsigned integers) of every tensor once, by name, and share the model's
    memory: they hold until the next state is asked for.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    model.train()
    weights = dict(model.named_parameters())
    masters = {name: weight.detach().float().clone() for name, weight in weights.items()}
    if settled:
        for name, weight in weights.items():
            masters[name] += _inside_the_cell(weight.detach())
    optimizer = torch.optim.AdamW(masters.values(), lr=0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    vocabulary = int(model.config.vocab_size)
    prompts = torch.randint(3, vocabulary, (batch.prompts, batch.prompt)).repeat_interleave(batch.group, 0)
    yield _bits(weights)
    tokens = None
    for number, rate in enumerate(rates):
        if tokens is None or number % sample_every == 0:
            tokens = _sample(model, prompts, batch.completion)
        _loss(model, tokens, batch).backward()
        _step(optimizer, rate, weights, masters)
        yield _bits(weights)


def _inside_the_cell(weight: Any) -> Any:
    """Uniform in ± half the distance to the next number of the weight's dtype."""
    import torch

    if weight.dtype == torch.float32:
        return torch.zeros_like(weight)
    above = torch.nextafter(weight, torch.full_like(weight, float("inf")))
    distance = (above.float() - weight.float()).abs()
    return (torch.rand_like(distance) - 0.5) * distance * 0.98


def _sample(model: Any, prompts: Any, count: int) -> Any:
    import torch

    with torch.no_grad():
        tokens, cache, asked = prompts, None, prompts
        for _ in range(count):
            output = model(input_ids=asked, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            asked = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1)
            tokens = torch.cat([tokens, asked], 1)
    return tokens


def _loss(model: Any, tokens: Any, batch: Batch) -> Any:
    import torch

    rewards = torch.rand(batch.prompts, batch.group)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    logits = model(input_ids=tokens).logits[:, batch.prompt - 1 : -1].float()
    chosen = tokens[:, batch.prompt :]
    logprobs = logits.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
    return -(advantages.reshape(-1, 1) * logprobs).mean()


def _step(optimizer: Any, rate: float, weights: dict[str, Any], masters: dict[str, Any]) -> None:
    import torch

    with torch.no_grad():
        for name, weight in weights.items():
            masters[name].grad = weight.grad.float()
            weight.grad = None
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        for name, weight in weights.items():
            weight.copy_(masters[name])
            masters[name].grad = None


def _bits(weights: dict[str, Any]) -> dict[str, np.ndarray]:
    import torch

    views = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}
    found = {}
    for name, weight in weights.items():
        through, kind = views[weight.element_size()]
        found[name] = weight.detach().view(through).numpy().view(kind)
    return found
