"""The trainer's own forward: transformers over prompt and completion, the judge of returned logprobs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any


@cache
def model(folder: Path, dtype: str = "float32") -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def logits(folder: Path, ids: list[int]) -> Any:
    """Of one forward over `ids`; float32, shape (len(ids), vocabulary)."""
    import torch

    with torch.no_grad():
        return model(folder)(torch.tensor([ids])).logits[0].float()


def logprobs(folder: Path, prompt: list[int], completion: list[int], temperature: float) -> list[float]:
    """log softmax(logits / temperature) of each completion token; float32, shape (len(completion),)."""
    import torch

    before = logits(folder, prompt + completion)[len(prompt) - 1 : -1] / temperature
    chosen = torch.log_softmax(before, -1).gather(-1, torch.tensor(completion)[:, None])
    return [float(value) for value in chosen[:, 0]]


def worst_difference(
    folder: Path, prompt: list[int], completion: list[int], got: list[float], temperature: float
) -> float:
    """Largest |Δlogprob| over the completion; lengths must agree."""
    assert len(got) == len(completion) > 0
    want = logprobs(folder, prompt, completion, temperature)
    return max(abs(a - b) for a, b in zip(got, want, strict=True))
