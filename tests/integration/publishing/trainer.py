"""A trainer of the tiny model that publishes deltas, and knows what the fleet is to serve by its bytes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rollgrid import Client
from rollgrid.weights_live import PublishedVersion
from rollgrid_sampler.engines.script import weights_digest
from safetensors.numpy import save_file

from tests.support.stack import POLICY

if TYPE_CHECKING:
    from .conftest import Fleet

NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"
State = dict[str, Any]


class Trainer:
    """Steps that change a few elements each, published by a client that remembers what it published."""

    def __init__(self, client: Client, fleet: Fleet, tensors: State, folder: Path) -> None:
        self.client, self.fleet, self.folder = client, fleet, folder
        self.state = {name: tensor.copy() for name, tensor in tensors.items()}
        self._generator = np.random.default_rng(fleet.version)

    def step(self, elements: int = 5) -> None:
        flat = self.state[EMBEDDING].reshape(-1)
        places = self._generator.integers(0, flat.size, elements)
        flat[places] = np.nextafter(flat[places], np.float32(np.inf))
        self.state[NORM] = self.state[NORM] + np.float32(0.25)

    def publish(self, kind: str, **options: Any) -> str:
        """The kind that was made of it; live everywhere, and known to the checker."""
        return self.is_live(self.client.weights.publish(POLICY, self.state, kind=kind, **options))

    def is_live(self, published: PublishedVersion, min_workers: int | None = None) -> str:
        """The same of a version that was published as this trainer's state."""
        self.fleet.version = published.wait_live(timeout=60, min_workers=min_workers).version
        save_file(self.state, str(self.folder / "model.safetensors"))
        self.fleet.digest = weights_digest(self.folder)
        version = self.client.weights.version(POLICY, self.fleet.version)
        assert version.bytes is not None
        self.bytes = version.bytes
        assert version.kind is not None
        return version.kind
