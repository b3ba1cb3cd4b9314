"""One stack with two policies: `tiny` whose versions are adapters, on two workers, and `second` with full versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rollgrid import Client, Retries
from safetensors.numpy import load_file

from tests.support.stack import POLICY, Stack, scripted, stack
from tests.support.tiny_models import TinyModel, tiny_model

SECOND = "second"
RATE = 400.0
"""Tokens a second and sample: a slow task takes most of a second, a fast one none."""

CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


@pytest.fixture(scope="package")
def pipe() -> Iterator[Stack]:
    folder = str(tiny_model(TinyModel()))
    models = [{"name": name, "path": folder, "dtype": "float32"} for name in (POLICY, SECOND)]
    env = {"ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps(models), "ROLLGRID_SAMPLER_REFUSE_DELAY_S": "0.2"}
    adapters = {"ROLLGRID_SAMPLER_MAX_LORAS": "8"}
    own = {"sampler-0": adapters, "sampler-1": adapters, "sampler-2": {"ROLLGRID_SAMPLER_POLICY": SECOND}}
    with stack(scripted(samplers=3, slots=128, token_rate=RATE, eos_rate=0.0, env=env, service_env=own)) as running:
        yield running


@pytest.fixture
def client(pipe: Stack) -> Iterator[Client]:
    with Client(pipe.url, retries=Retries(budget_s=60, outage_budget_s=60)) as connected:
        yield connected


@pytest.fixture(scope="package")
def tensors() -> dict[str, Any]:
    """The weights of the base of both policies."""
    return dict(load_file(tiny_model(TinyModel()) / "model.safetensors"))


class Trainer:
    """Publishes versions that differ from all before."""

    def __init__(self, client: Client, tensors: dict[str, Any]) -> None:
        self.client, self._tensors = client, tensors

    def full(self, policy: str = SECOND) -> int:
        """Committed; the fleet is on its way to it."""
        step, name = self.client.policy(policy).newest + 1, "model.norm.weight"
        changed = {**self._tensors, name: self._tensors[name] + step}
        return self.client.weights.publish(policy, changed, step=step).version

    def adapter(self, policy: str = POLICY) -> int:
        """Live everywhere."""
        step = self.client.policy(policy).newest + 1
        found: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            if name.endswith("q_proj.weight"):
                rows, columns = tensor.shape
                part = f"base_model.model.{name.removesuffix('.weight')}"
                found[f"{part}.lora_A.weight"] = tensor[:2, :columns] + step
                found[f"{part}.lora_B.weight"] = tensor[:rows, :2] - step
        options: Any = {"kind": "lora", "adapter_config": CONFIG, "step": step}
        return self.client.weights.publish(policy, found, **options).wait_live(timeout=60).version


@pytest.fixture
def trainer(client: Client, tensors: dict[str, Any]) -> Trainer:
    return Trainer(client, tensors)
