"""Publishes new full versions through the SDK while everything else is killed, as a trainer would at each step."""

from __future__ import annotations

import threading
import time

import numpy as np
from rollgrid import Client
from rollgrid.errors import RollgridError
from rollgrid_contracts.checkpoints import MANIFEST_NAME, CheckpointKind, version_root
from rollgrid_runtime.blobs import Blobs
from rollgrid_sampler.engines.script import combined, weights_digest
from rollgrid_weights.manifest import decode_manifest
from rollgrid_weights.names import is_weights
from safetensors.numpy import load_file

from tests.support.stack import POLICY, Stack
from tests.support.tiny_models import tiny_model

PUBLISH_S = 30.0
"""One publication may take so long before the next is tried."""


class Refresher:
    """`play` is a thread's; `published` are the versions whose commit was acknowledged."""

    def __init__(self, pipe: Stack, every_s: float) -> None:
        self._url, self._every_s = pipe.url, every_s
        self._tensors = load_file(tiny_model(pipe.plan.model) / "model.safetensors")
        self.published: list[int] = []
        self.failures: list[str] = []

    def play(self, stop: threading.Event) -> None:
        with Client(self._url) as client:
            step = 0
            while not stop.wait(self._every_s):
                step += 1
                name = min(name for name, value in self._tensors.items() if value.ndim == 2)
                changed = {**self._tensors, name: self._tensors[name] + np.float32(1e-3 * step)}
                began = time.monotonic()
                try:
                    self.published.append(client.weights.publish(POLICY, changed, step=step, timeout=PUBLISH_S).version)
                except RollgridError as error:
                    self.failures.append(f"step {step} after {time.monotonic() - began:.1f} s: {error}")


async def digests(pipe: Stack, blobs: Blobs) -> dict[int, bytes]:
    """What the scripted engine's tokens derive from, by version: from the manifests, whoever published them."""
    found = {0: weights_digest(tiny_model(pipe.plan.model))}
    root = version_root("shared", POLICY, 0).removesuffix("0/")
    for key in await blobs.keys(root):
        if not key.endswith(f"/{MANIFEST_NAME}"):
            continue
        data = await blobs.get(key)
        if data is None:
            continue
        manifest = decode_manifest(data)
        if manifest.kind is CheckpointKind.FULL:
            files = {file.name: bytes.fromhex(file.sha256) for file in manifest.files if is_weights(file.name)}
            found[manifest.version] = combined(files)
    return found
