"""One stack on the scripted engine for the whole folder, its real checkpoint-sync, and a checker of what it serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid import Client, Retries
from rollgrid.results import Group
from rollgrid_contracts import ids
from rollgrid_sampler.engines.script import adapter_digest, file_digests, sample_key, script, weights_digest
from safetensors.numpy import load_file, save_file

from tests.support.stack import POLICY, Stack, scripted, stack
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import wait_until

from .trainer import Trainer

EOS_RATE = 0.01
SAMPLING = {"max_tokens": 12, "temperature": 1.0}


@pytest.fixture(scope="package")
def pipe() -> Iterator[Stack]:
    plan = scripted(samplers=2, slots=64, eos_rate=EOS_RATE, env={"ROLLGRID_SAMPLER_MAX_LORAS": "4"})
    with stack(plan) as running:
        yield running


@pytest.fixture
def client(pipe: Stack) -> Iterator[Client]:
    with Client(pipe.url, retries=Retries(budget_s=60, outage_budget_s=60)) as connected:
        yield connected


@pytest.fixture(scope="package")
def tensors() -> dict[str, Any]:
    """A state dict that fits the base."""
    return dict(load_file(tiny_model(TinyModel(seed=1)) / "model.safetensors"))


class Fleet:
    """What runs, as the test published it: the last good version and the digest its tokens derive from."""

    def __init__(self, client: Client, folder: Path) -> None:
        self.client, self._folder = client, folder
        self.version = 0
        self.digest = weights_digest(tiny_model(TinyModel()))

    def publish(self, tensors: dict[str, Any], **options: Any) -> int:
        """A good full version, live everywhere."""
        path = self._folder / "full"
        path.mkdir(exist_ok=True)
        save_file(tensors, str(path / "model.safetensors"))
        self.version = self.client.weights.publish(POLICY, path, **options).wait_live(timeout=60).version
        self.digest = weights_digest(path)
        return self.version

    def adapter(self, folder: Path, **options: Any) -> int:
        """A good adapter on the last full version, live everywhere."""
        self.version = self.client.weights.publish(POLICY, folder, **options).wait_live(timeout=60).version
        self.digest = adapter_digest(self.digest, file_digests(folder))
        return self.version

    def assert_truthful(self) -> None:
        """New samples name the last good version, and its bytes made their tokens."""
        policy = self.client.policy(POLICY)
        assert policy.desired == self.version
        assert [worker.quarantined for worker in policy.workers] == [None] * len(policy.workers)
        wait_until(self._is_current, 30, f"version {self.version} for new requests of every worker")
        groups = list(self.client.submit(["x", "y"], n=2, sampling=SAMPLING, run="truth").groups(timeout=60))
        assert len(groups) == 2
        for group in groups:
            self._check(group)

    def _is_current(self) -> bool:
        """A LoRA version is loaded a moment before it is what new requests get."""
        workers = self.client.policy(POLICY).workers
        return all([one.version for one in worker.loaded if one.current] == [self.version] for worker in workers)

    def _check(self, group: Group) -> None:
        for entry in group.closed.entries:
            sample = entry.sample
            assert {span.version for span in sample.version_spans} == {self.version}
            tokens = np.frombuffer(sample.token_ids.packed, "<u4")
            key = sample_key(self.digest, ids.sample_id(group.id, sample.index), sample.index, sample.seed)
            own, _ = script(key, 0, len(tokens), 512, 2, EOS_RATE)
            assert tokens.tolist() == own.tolist()


@pytest.fixture(scope="package")
def known(pipe: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Client(pipe.url, retries=Retries(budget_s=60, outage_budget_s=60)) as client:
        yield Fleet(client, tmp_path_factory.mktemp("good"))


@pytest.fixture
def fleet(known: Fleet, tensors: dict[str, Any]) -> Fleet:
    """With a good full version live; a new one where the test before left another."""
    policy = known.client.policy(POLICY)
    if policy.kind != "full" or known.version in (0, *range(policy.desired)):
        name = "model.norm.weight"
        known.publish({**tensors, name: tensors[name] + policy.newest})
    return known


@pytest.fixture
def trainer(client: Client, fleet: Fleet, tensors: dict[str, Any], tmp_path: Path) -> Trainer:
    """With a full version of its own live."""
    found = Trainer(client, fleet, tensors, tmp_path)
    found.step()
    assert found.publish("auto") == "full"
    return found
