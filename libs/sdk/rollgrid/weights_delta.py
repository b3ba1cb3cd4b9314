"""Deltas of a publication: what the last versions were, which of them the fleet holds, and whether a delta is worth it.

A version published with `kind` delta or auto is kept in host memory until a newer one that the fleet is known
to hold can take its place as the base.  The codecs are those of `rollgrid_weights` (extra `deltas`).
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .answers import VersionList
from .errors import ConfigurationError
from .weights_source import DELTA, LORA, SHARD_BYTES, Source, is_torch

if TYPE_CHECKING:
    from rollgrid_contracts.checkpoints import TensorInfo
    from rollgrid_weights.delta.states import State

KEPT = 3
"""Versions of a policy in memory: those the fleet may not have adopted yet, and the one it surely holds."""
ANCHOR_EVERY = 32
"""So many deltas in a row, then a full version: what a joiner has to fetch and apply at most."""
THREADS = 4
_NAMES = {
    "torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32", "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2", "float16": "F16", "float32": "F32",
}  # fmt: skip


class Snapshot(NamedTuple):
    """A version's tensors in host memory that nobody changes, and their digests by name."""

    state: State
    tensors: Mapping[str, TensorInfo]

    @property
    def bytes(self) -> int:
        return sum(found.bits.nbytes for found in self.state.values())


class Base(NamedTuple):
    version: int
    snapshot: Snapshot


class DeltaFile(NamedTuple):
    name: str
    body: bytes


class Snapshots:
    """Of one policy, by version."""

    def __init__(self) -> None:
        self._held: dict[int, Snapshot] = {}

    def keep(self, version: int, snapshot: Snapshot) -> None:
        self._held[version] = snapshot
        for old in sorted(self._held)[:-KEPT]:
            del self._held[old]

    def after(self, version: int) -> list[int]:
        """Those published later: not verified yet, or refused."""
        return sorted(one for one in self._held if one > version)

    def base(self, versions: VersionList) -> Base | None:
        """The newest that the fleet holds; older ones are let go."""
        listed = {one.version for one in versions.data if one.kind != "lora"}
        newest = max(listed & self._held.keys(), default=None)
        if newest is None:
            return None
        for old in [version for version in self._held if version < newest]:
            del self._held[old]
        return Base(newest, self._held[newest])


class Anchors:
    """When the version after `base` is to be a full one: by the length of the chain to it, its bytes, the delta's own."""

    def __init__(self, versions: VersionList, base: int, full_bytes: int, every: int) -> None:
        codecs = _codecs()
        self._due, self._rule = codecs.chain.anchor_due, codecs.chain.AnchorRule(every=every)
        self._full_bytes = full_bytes
        links = [
            codecs.chain.Link(one.version, one.base_version if one.kind == DELTA else None, bytes=one.bytes or 0)
            for one in versions.data
            if one.kind != LORA and one.version
        ]
        try:
            self._since = codecs.chain.resolve(links, base)
        except codecs.WeightsError:  # what it goes on from is not listed any more
            self._since = None

    @property
    def most(self) -> int:
        """Bytes of a delta that is still worth it."""
        return int(self._rule.blob_share * self._full_bytes)

    def due(self, delta_bytes: int = 0) -> bool:
        return self._due(self._since, self._full_bytes, delta_bytes, self._rule) is not None


def snapshot_of(source: Source) -> Snapshot:
    """The tensors of a source; those in memory must be a snapshot already, those of files are copied.

    Raises ConfigurationError for a dtype that deltas do not know, and without the extra `deltas`.
    """
    codecs = _codecs()
    state = dict(_from_files(source.files)) if source.files else {n: bits(n, t) for n, t in source.tensors.items()}
    with codecs.pool(_threads()) as pool:
        tensors = codecs.state_tensors(state, pool)
    return Snapshot(state, {tensor.name: tensor for tensor in tensors})


def bits(name: str, tensor: Any) -> Any:
    """The elements of a contiguous host tensor as they are in memory.  Raises ConfigurationError."""
    dtype = _NAMES.get(str(tensor.dtype))
    if dtype is None:
        raise ConfigurationError(f"{name} is {tensor.dtype}; deltas know {', '.join(sorted(set(_NAMES.values())))}")
    flat: Any = tensor.reshape(-1)
    if is_torch(tensor):
        flat = flat.view(sys.modules["torch"].uint8).numpy()
    return _codecs().tensor_bits(name, dtype, tuple(tensor.shape), flat)


def _from_files(files: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, Any]]:
    codecs = _codecs()
    try:
        for name, found in codecs.file_state(files).items():
            yield name, found._replace(bits=np.array(found.bits))
    except codecs.WeightsError as error:
        raise ConfigurationError(f"{files[0].parent}: {error.message}") from error


def delta_files(base: Snapshot, target: Snapshot, *, most: int | None = None) -> list[DeltaFile] | None:
    """The files of a delta from `base` to `target`; None where they come to more than `most` bytes.

    Raises ConfigurationError when the two do not have the same tensors.
    """
    gone = sorted(base.state.keys() - target.state.keys())
    if gone:  # a delta has no word for a tensor that is there no more: its reader would keep it
        raise ConfigurationError(f"{gone[0]} is in the version that the delta goes on from, and not in this one")
    left = most
    found: list[DeltaFile] = []
    for number, names in enumerate(_shards(target.state), 1):
        body = delta_body(base, target, names, max_bytes=left)
        if body is None:
            return None
        left = None if left is None else left - len(body)
        found.append(DeltaFile(f"model-00000-{number:05d}.rgdelta", body))
    return found


def delta_body(base: Snapshot, target: Snapshot, names: list[str], *, max_bytes: int | None = None) -> bytes | None:
    """One file; None when it would have more than `max_bytes`.  Raises ConfigurationError."""
    codecs = _codecs()
    missing = [name for name in names if name not in base.state]
    if missing:
        raise ConfigurationError(f"{missing[0]} is not in the version that the delta goes on from")
    if max_bytes is not None and max_bytes < 1:
        return None
    try:
        body: bytes = codecs.encode_delta(
            {name: base.state[name] for name in names}, {name: target.state[name] for name in names},
            base_digest=codecs.weights_digest([base.tensors[name] for name in names]),
            target_digest=codecs.weights_digest([target.tensors[name] for name in names]),
            codec=codecs.codec, threads=_threads(), max_bytes=max_bytes,
        )  # fmt: skip
    except codecs.WeightsError as error:
        if error.field == "delta" and max_bytes is not None:
            return None
        raise ConfigurationError(f"no delta can be made: {error.message}") from error
    return body


def _shards(state: State) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name in sorted(state):
        bytes_ = state[name].bits.nbytes
        if names and size + bytes_ > SHARD_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += bytes_
    yield names


class _Codecs(NamedTuple):
    """What is needed of `rollgrid_weights`."""

    encode_delta: Any
    weights_digest: Any
    state_tensors: Any
    tensor_bits: Any
    file_state: Any
    WeightsError: Any
    codec: Any
    pool: Any
    chain: Any


def _codecs() -> _Codecs:
    try:
        from concurrent.futures import ThreadPoolExecutor

        from rollgrid_weights.delta import chain
        from rollgrid_weights.delta.blob import Codec
        from rollgrid_weights.delta.encode import encode_delta
        from rollgrid_weights.delta.states import file_state, state_tensors, tensor_bits
        from rollgrid_weights.errors import WeightsError
        from rollgrid_weights.manifest import weights_digest
    except ImportError as error:
        raise ConfigurationError(f"deltas are made by rollgrid's extra `deltas`: {error}") from error
    # without numba the other codec, which needs nothing compiled and two and a half times the bytes
    codec = Codec.EXPONENT if importlib.util.find_spec("numba") else Codec.GAPS
    return _Codecs(
        encode_delta,
        weights_digest,
        state_tensors,
        tensor_bits,
        file_state,
        WeightsError,
        codec,
        ThreadPoolExecutor,
        chain,
    )


def _threads() -> int:
    return min(THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
