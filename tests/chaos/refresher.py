"""Publishes new versions through the SDK while everything else is killed, as a trainer would at each step: deltas and anchors."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from rollgrid import Client
from rollgrid.errors import RollgridError
from rollgrid_contracts.checkpoints import MANIFEST_NAME, CheckpointKind, CheckpointManifest, version_root
from rollgrid_runtime.blobs import Blobs
from rollgrid_sampler.engines.script import weights_digest
from rollgrid_weights.manifest import decode_manifest
from rollgrid_weights.names import is_delta, is_weights
from rollgrid_weights.rebuilding import rebuild
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
                tensor = self._tensors[name].copy()
                tensor.reshape(-1)[:16] += np.float32(1e-3 * step)
                changed = {**self._tensors, name: tensor}
                began = time.monotonic()
                try:
                    self.published.append(
                        client.weights.publish(
                            POLICY, changed, kind="auto", anchor_every=3, step=step, timeout=PUBLISH_S
                        ).version
                    )
                except RollgridError as error:
                    self.failures.append(f"step {step} after {time.monotonic() - began:.1f} s: {error}")


async def digests(pipe: Stack, blobs: Blobs) -> dict[int, bytes]:
    """What the scripted engine's tokens derive from, by version: from S3, whoever published them."""
    found = {0: weights_digest(tiny_model(pipe.plan.model))}
    root = version_root("shared", POLICY, 0).removesuffix("0/")
    manifests: dict[int, CheckpointManifest] = {}
    for key in await blobs.keys(root):
        if key.endswith(f"/{MANIFEST_NAME}") and (data := await blobs.get(key)) is not None:
            manifest = decode_manifest(data)
            manifests[manifest.version] = manifest
    with tempfile.TemporaryDirectory() as folder:
        for version in sorted(manifests):  # a delta goes on from an earlier one
            if await _whole(manifests[version], blobs, Path(folder)):
                found[version] = weights_digest(Path(folder) / str(version))
    return found


async def _whole(manifest: CheckpointManifest, blobs: Blobs, folder: Path) -> bool:
    """Its safetensors files in a folder of its number; False where what it goes on from is gone."""
    place, start = folder / str(manifest.version), folder / str(manifest.base_version)
    deltas = []
    if manifest.kind is CheckpointKind.DELTA and not start.is_dir():
        return False
    place.mkdir()
    for file in manifest.files:
        if is_weights(file.name):
            await blobs.download(manifest.prefix + file.name, place / file.name)
        elif is_delta(file.name):
            deltas.append(folder / f"{manifest.version}-{file.name}")
            await blobs.download(manifest.prefix + file.name, deltas[-1])
    if deltas:
        rebuild(start, deltas, place, manifest.weights_digest)
    return True
