"""Checkpoint and adapter folders made for engine tests, and what transformers says of each.

A version is drifted away from the base it belongs to, in every tensor, far enough that the wrong one
is seen in any answer.
"""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

from rollgrid.weights_delta import delta_body, snapshot_of
from rollgrid.weights_source import read_source
from rollgrid_sampler.engines.base import Generated
from rollgrid_weights.manifest import weights_digest
from rollgrid_weights.rebuilding import rebuild

from tests.support.tiny_models import TinyModel, tiny_model

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 32


def model_of(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def full_version(base: TinyModel, number: int, root: Path, *, dtype: str = "float32") -> Path:
    """The folder of a full version: every tensor of the base, moved by random steps."""
    import torch

    model = model_of(tiny_model(base))
    generator = torch.Generator().manual_seed(1000 + number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    folder = root / f"full-{number}"
    shutil.copytree(tiny_model(base), folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def rebuilt_version(start: Path, target: Path) -> Path:
    """The state of `target` as nodes have it that were sent a delta: made of `start` and what has changed since."""
    old, new = (snapshot_of(read_source(str(folder), "full", None, copy=True)) for folder in (start, target))
    body = delta_body(old, new, sorted(new.state))
    assert body is not None
    folder = target.with_name(f"{target.name}-rebuilt")
    shutil.copytree(target, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    delta = target.with_name(f"{target.name}.rgdelta")
    delta.write_bytes(body)
    rebuild(start, [delta], folder, weights_digest(new.tensors.values()))
    return folder


def one_tensor_changed(folder: Path, name: str, target: Path) -> Path:
    """The same version but for one tensor, a hundredth larger."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = (tensors[name].float() * 1.01).to(tensors[name].dtype)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def lora_version(base: TinyModel, number: int, folder: Path) -> Path:
    """A PEFT adapter on all linear layers, written by hand."""
    import torch
    from safetensors.torch import save_file

    model = model_of(tiny_model(base))
    generator = torch.Generator().manual_seed(2000 + number)
    tensors = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] in TARGETS:
            out_size, in_size = module.weight.shape
            tensors[f"base_model.model.{name}.lora_A.weight"] = 0.1 * torch.randn(RANK, in_size, generator=generator)
            tensors[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(out_size, RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"target_modules": list(TARGETS), "base_model_name_or_path": "base", "inference_mode": True}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def merged(model: Any, adapter: Path) -> Any:
    """The model with the adapter added to its weights."""
    import torch
    from safetensors.torch import load_file

    found, tensors = copy.deepcopy(model), load_file(adapter / "adapter_model.safetensors")
    modules = dict(found.named_modules())
    with torch.no_grad():
        for name in [name for name in tensors if name.endswith("lora_A.weight")]:
            target = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            delta = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            modules[target].weight.add_(ALPHA / RANK * delta)
    return found


def logprobs_of(model: Any, context: list[int], tokens: list[int]) -> tuple[list[float], list[float]]:
    """Of `tokens` behind `context`: their log-probabilities, and those of the likeliest token in each place."""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
        values = logits.log_softmax(-1)
    chosen = values.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return [float(x) for x in chosen], [float(x) for x in values.max(-1).values]


def mismatch(model: Any, prompt: list[int], result: Generated, *, greedy: bool = True) -> float:
    """How far the result is from what the model says: in log-probability, and from being its greedy output."""
    chosen, best = logprobs_of(model, prompt, result.token_ids)
    far = max(abs(a - b) for a, b in zip(chosen, result.logprobs, strict=True))
    return max(far, *(b - a for a, b in zip(chosen, best, strict=True))) if greedy else far


def seams_mismatch(models: dict[int, Any], prompt: list[int], result: Generated) -> float:
    """Each span's tokens against the weights it names, on the full context before them."""
    far = 0.0
    for span in result.version_spans:
        context, tokens = prompt + result.token_ids[: span.start], result.token_ids[span.start : span.end]
        chosen, _ = logprobs_of(models[span.version], context, tokens)
        pairs = zip(chosen, result.logprobs[span.start : span.end], strict=True)
        far = max([far, *(abs(a - b) for a, b in pairs)])
    return far
