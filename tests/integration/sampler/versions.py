"""Versions as checkpoint-sync leaves them: bytes and manifests in S3, the state in `rg_policies`; and a checker.

The checker recomputes every token from the bytes that its version span names.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    AdoptedVersion,
    CheckpointKind,
    CheckpointManifest,
    FileInfo,
    PolicyState,
    TensorInfo,
    version_root,
)
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_sampler.engines.script import adapter_digest, combined, fingerprint, sample_key, script
from rollgrid_weights.manifest import encode_manifest, weights_digest

from .stage import POOL

KEY = "shared.default"
BASE = {"model.safetensors": b"base", "more.safetensors": b"base, too"}
Files = Mapping[str, bytes]


def make_base(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, data in BASE.items():
        (folder / name).write_bytes(data)
    return folder


def digest_of(files: Files) -> str:
    """As publishers compute it, over stand-ins for the tensors."""
    return weights_digest(
        TensorInfo(name=name, dtype="U8", shape=(len(data),), sha256=hashlib.sha256(data).hexdigest())
        for name, data in files.items()
    )


def full(number: int) -> dict[str, bytes]:
    """Two files: a stale one is not the whole version."""
    return {"model.safetensors": f"full {number}".encode(), "more.safetensors": f"more {number}".encode()}


def lora(number: int) -> dict[str, bytes]:
    return {"adapter_model.safetensors": f"lora {number}".encode(), "adapter_config.json": b"{}"}


class Versions:
    """Of policy `shared.default`; the base is `BASE`."""

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self.table: Table[PolicyState] = Table(bus, POLICIES, PolicyState)
        self._blobs = blobs
        self.files: dict[int, Files] = {0: BASE}
        self.adopted: dict[int, AdoptedVersion] = {}
        self.desired = 0
        self.history = [0]
        self.revision = 0

    async def put(self, version: int, files: Files, *, base: int | None = None) -> None:
        """Bytes and manifest into S3; with `base` it is a LoRA version on it."""
        kind = CheckpointKind.FULL if base is None else CheckpointKind.LORA
        root = version_root("shared", "default", version)
        for name, data in files.items():
            await self._blobs.put(f"{root}files/{name}", data)
        listed = tuple(
            FileInfo(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()
        )
        manifest = CheckpointManifest(
            tenant="shared",
            policy="default",
            version=version,
            kind=kind,
            base_version=base,
            files=listed,
            prefix=root + "files/",
            weights_digest=digest_of(files),
            created_at=time.time(),
        )
        await self._blobs.create(root + MANIFEST_NAME, encode_manifest(manifest))
        self.files[version] = files
        self.adopted[version] = AdoptedVersion(
            version=version,
            kind=kind,
            prefix=manifest.prefix,
            base_version=base or 0,
            weights_digest=manifest.weights_digest,
            committed_at=manifest.created_at,
        )

    def state(self, **changes: Any) -> PolicyState:
        fields: dict[str, Any] = {
            "tenant": "shared",
            "policy": "default",
            "pool": POOL,
            "base": "tiny",
            "base_digest": digest_of(BASE),
            "tokenizer_prefix": "",
            "tokenizer_digest": "",
            "max_model_len": 512,
            "vocab_size": 512,
            "dtype": "float32",
            "desired": self.desired,
            "history": tuple(self.history),
            "newest": max(self.adopted, default=0),
            "versions": tuple(self.adopted[version] for version in sorted(self.adopted)),
        }
        return PolicyState(**{**fields, **changes})

    async def desire(self, version: int, **changes: Any) -> int:
        """Make it what the fleet should run; the revision of the state."""
        self.desired = version
        if version not in self.history:
            self.history.append(version)
        self.revision = await self.table.put(KEY, self.state(**changes))
        return self.revision

    async def full(self, version: int) -> None:
        await self.put(version, full(version))

    async def lora(self, version: int, base: int = 0) -> None:
        await self.put(version, lora(version), base=base)

    # -- the checker --------------------------------------------------------------------------

    def digest(self, version: int) -> bytes:
        """What the tokens of a version derive from."""
        files = {
            name: hashlib.sha256(data).digest()
            for name, data in self.files[version].items()
            if name.endswith(".safetensors")
        }
        adopted = self.adopted.get(version)
        if adopted is None or adopted.kind is CheckpointKind.FULL:
            return combined(files)
        return adapter_digest(self.digest(adopted.base_version), files)

    def lies(self, group_id: str, samples: Iterable[Sample], eos_rate: float = 0.01) -> list[str]:
        """What of these samples is not what its version would have made."""
        found = []
        for sample in samples:
            plain = sample.node is None
            name = ids.sample_id(group_id, sample.index) if plain else ids.turn_id(group_id, sample.index, sample.turn)
            if sample.status is not SampleStatus.SUCCEEDED:
                found.append(f"{name} {sample.status}: {sample.error}")
                continue
            tokens = np.frombuffer(sample.token_ids.packed, "<u4")
            logprobs = np.frombuffer(sample.logprobs.packed, "<f4")
            ends = [0, *(span.end for span in sample.version_spans)]
            if ends[:-1] != [span.start for span in sample.version_spans] or ends[-1] != len(tokens):
                found.append(f"{name} has spans {sample.version_spans} over {len(tokens)} tokens")
            if sample.weight_fingerprint != fingerprint(self.digest(sample.version_spans[-1].version)):
                found.append(f"{name} has fingerprint {sample.weight_fingerprint}, ends in {sample.version_spans[-1]}")
            for span in sample.version_spans:
                key = sample_key(self.digest(span.version), name, sample.index, sample.seed)
                own = script(key, span.start, span.end, 512, 2, eos_rate)
                if not np.array_equal(own[0], tokens[span.start : span.end]):
                    found.append(f"{name} has other tokens in {span}")
                elif not np.array_equal(own[1], logprobs[span.start : span.end]):
                    found.append(f"{name} has other logprobs in {span}")
        return found
