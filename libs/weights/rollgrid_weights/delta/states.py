"""A state of the weights as raw bits: tensors by name, from safetensors files or from arrays in memory."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rollgrid_contracts.checkpoints import TensorInfo

from rollgrid_weights.errors import invalid
from rollgrid_weights.manifest import weights_digest
from rollgrid_weights.safetensors_header import read_header

from .blob import DeltaTensor
from .numbers import number_format

Bits = np.ndarray[tuple[int, ...], np.dtype[Any]]


class TensorBits(NamedTuple):
    """One tensor: safetensors' dtype name, shape, and its elements in a row as unsigned integers."""

    dtype: str
    shape: tuple[int, ...]
    bits: Bits


State = Mapping[str, TensorBits]


class Piece(NamedTuple):
    """Elements [begin, end) of one tensor."""

    name: str
    begin: int
    end: int


def tensor_bits(name: str, dtype: str, shape: Sequence[int], data: Any) -> TensorBits:
    """From anything with a buffer: bytes, a memory map, an array.  Nothing is copied.

    Raises WeightsError for a dtype that deltas do not know and for another number of bytes than it takes.
    """
    found = number_format(dtype, name)
    view = memoryview(data).cast("B") if math.prod(shape) else memoryview(b"")
    if len(view) != math.prod(shape) * found.item:
        raise invalid(f"tensor {name!r} has {len(view)} bytes, its shape and dtype need another number", name)
    return TensorBits(dtype, tuple(shape), np.frombuffer(view, found.kind))


def file_state(paths: Iterable[Path], *, writable: bool = False) -> dict[str, TensorBits]:
    """The tensors of safetensors files, memory-mapped; with `writable` what is written goes to the files.

    Raises WeightsError for malformed files, a tensor in two of them, a dtype that deltas do not know.
    """
    state: dict[str, TensorBits] = {}
    for path in paths:
        header = read_header(path)
        whole = np.memmap(path, np.uint8, "r+" if writable else "r")
        for entry in header.values():
            if entry.name in state:
                raise invalid(f"tensor {entry.name!r} is in more than one file", entry.name)
            kind = number_format(entry.dtype, entry.name).kind
            bits = np.asarray(whole[entry.start : entry.end]).view(kind)
            state[entry.name] = TensorBits(entry.dtype, entry.shape, bits)
    return state


def state_tensors(state: State, pool: Executor) -> tuple[TensorInfo, ...]:
    """The tensors with their digests, by name."""

    def one(name: str) -> TensorInfo:
        found = state[name]
        digest = hashlib.sha256(found.bits.data if found.bits.size else b"").hexdigest()
        return TensorInfo(name=name, dtype=found.dtype, shape=found.shape, sha256=digest)

    return tuple(pool.map(one, sorted(state)))


def state_digest(state: State, pool: Executor) -> str:
    """`weights_digest` of the state."""
    return weights_digest(state_tensors(state, pool))


def check_alike(wanted: Mapping[str, tuple[str, tuple[int, ...]]], state: State, what: str) -> None:
    """Raises WeightsError unless every wanted tensor is there in its dtype and shape."""
    for name, (dtype, shape) in wanted.items():
        found = state.get(name)
        if found is None:
            raise invalid(f"tensor {name!r} is missing in the {what}", name)
        if (found.dtype, found.shape) != (dtype, shape):
            there = f"{found.dtype} {list(found.shape)}"
            raise invalid(f"tensor {name!r} is {there} in the {what}, not {dtype} {list(shape)}", name)


def lanes(tensors: Iterable[DeltaTensor]) -> dict[str, list[DeltaTensor]]:
    """Tensors by dtype, in the order of names: each lane is one row of elements that segments divide."""
    found: dict[str, list[DeltaTensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.dtype, []).append(tensor)
    return {dtype: found[dtype] for dtype in sorted(found)}


def pieces(lane: Sequence[DeltaTensor], sizes: Iterable[int]) -> Iterator[list[Piece]]:
    """The pieces of tensors that consecutive segments of so many elements cover."""
    number, begin = 0, 0
    for size in sizes:
        found = []
        while size:
            left = lane[number].elements - begin
            if not left:
                number, begin = number + 1, 0
                continue
            taken = min(left, size)
            found.append(Piece(lane[number].name, begin, begin + taken))
            begin += taken
            size -= taken
        yield found


def piece_bits(state: State, piece: Piece) -> Bits:
    """Read only and aligned, so that the kernels are compiled once for a dtype."""
    found = state[piece.name].bits[piece.begin : piece.end]
    if not found.flags.aligned:
        found = found.copy()
    found = found.view()
    found.flags.writeable = False
    return found
