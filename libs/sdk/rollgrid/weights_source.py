"""What is published: files of a folder, or tensors, as the files of a version.

torch is never imported for anybody's sake: where tensors are torch's, it has been.  A snapshot is a
copy in host memory, so that the trainer may step on while it is written and sent.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from .errors import ConfigurationError

SHARD_BYTES = 256 * 1024 * 1024
"""Tensors of one file; a larger one has a file of its own."""

FULL, LORA, DELTA, AUTO = "full", "lora", "delta", "auto"
KINDS = (FULL, LORA, DELTA, AUTO)
"""`auto`: a delta where one is possible and worth it, else full."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_HEADS = ("lm_head.weight", "embed_out.weight")
"""Of two names for one tensor the base has the other one: heads are tied to embeddings, not embeddings to heads."""

_ADAPTERS_OWN_NAME = re.compile(r"(\.lora_[AB])\.[^.]+(\.weight)")
"""A PEFT model's own state dict says `lora_A.default.weight`; what PEFT saves says `lora_A.weight`."""

Tensors = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Source:
    """One publication: `files` to send as they are, `tensors` to write, `config` of an adapter."""

    kind: str
    files: tuple[pathlib.Path, ...] = ()
    tensors: Tensors = dataclasses.field(default_factory=dict)
    config: bytes | None = None

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files) + sum(map(nbytes, self.tensors.values()))


def read_source(
    source: Tensors | str | os.PathLike[str], kind: str | None, adapter_config: Any, *, copy: bool
) -> Source:
    """What `source` means, with `copy` its tensors as a snapshot in host memory.

    Without a `kind`, a folder as PEFT saves it is lora, and so is anything with an adapter_config.

    Raises:
        ConfigurationError: there is nothing to publish, or it is not tensors.
    """
    if kind not in (None, *KINDS):
        raise ConfigurationError(f"kind is {kind!r}; {', '.join(KINDS)} are offered")
    if isinstance(source, Mapping):
        kind = kind or (LORA if adapter_config is not None else FULL)
        if kind == LORA and adapter_config is None:
            raise ConfigurationError("the tensors of an adapter need adapter_config: PEFT's LoraConfig or its dict")
        config = config_bytes(adapter_config) if kind == LORA else None
        tensors = {adapter_tensor_name(name) if kind == LORA else name: t for name, t in distinct(source).items()}
        if not tensors:
            raise ConfigurationError("there are no tensors to publish")
        if copy:
            tensors = {name: host_tensor(name, tensor, copy=True) for name, tensor in tensors.items()}
        return Source(kind, tensors=tensors, config=config)
    path = pathlib.Path(source)
    folder = path.parent if path.is_file() else path
    if kind is None:
        is_adapter = path.name == ADAPTER_WEIGHTS if path.is_file() else (path / ADAPTER_WEIGHTS).is_file()
        kind = LORA if is_adapter or adapter_config is not None else FULL
    if kind != LORA:
        return Source(kind, files=weight_files(path))
    weights = path if path.is_file() else path / ADAPTER_WEIGHTS
    given = adapter_config if adapter_config is not None else folder / ADAPTER_CONFIG
    if weights.name != ADAPTER_WEIGHTS or not weights.is_file():
        raise ConfigurationError(f"{path} holds no {ADAPTER_WEIGHTS} to publish")
    return Source(LORA, files=(weights,), config=config_bytes(given))


def weight_files(source: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """The safetensors files of a full version: of a folder, or one file; sorted by name.

    Raises:
        ConfigurationError: there are none.
    """
    path = pathlib.Path(source)
    found = (path,) if path.is_file() else tuple(sorted(path.glob("*.safetensors")))
    files = tuple(file for file in found if path.is_file() or file.name != ADAPTER_WEIGHTS)
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ConfigurationError(f"{path} holds no *.safetensors file to publish (nothing else is ever sent)")
    return files


def config_bytes(config: Any) -> bytes:
    """`adapter_config.json` from a dict, PEFT's LoraConfig, or a file.  Raises ConfigurationError."""
    if isinstance(config, str | os.PathLike):
        path = pathlib.Path(config)
        if not path.is_file():
            raise ConfigurationError(f"there is no {path}")
        return path.read_bytes()
    plain = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(plain, Mapping):
        raise ConfigurationError("adapter_config is a dict, PEFT's LoraConfig or a file")
    try:
        return json.dumps(plain, default=_as_json, sort_keys=True).encode()
    except TypeError as error:
        raise ConfigurationError(f"adapter_config cannot be written as JSON: {error}") from error


def _as_json(value: object) -> object:
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    if isinstance(value, enum.Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} {value!r}")


def adapter_tensor_name(name: str) -> str:
    return _ADAPTERS_OWN_NAME.sub(r"\1\2", name)


def distinct(tensors: Tensors) -> dict[str, Any]:
    """Without the second names of shared tensors."""
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        place = _place(tensor) or (name,)
        known = owners.get(place)
        if known is None or (known.endswith(_HEADS) and not name.endswith(_HEADS)):
            owners[place] = name
    kept = set(owners.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept}


def _place(tensor: Any) -> tuple[Any, ...] | None:
    """Where a tensor's elements are; None for what owns no memory (or is no tensor)."""
    if is_torch(tensor):
        if not tensor.numel() or tensor.device.type == "meta" or hasattr(tensor, "full_tensor"):
            return None
        return (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype))
    if isinstance(tensor, np.ndarray) and tensor.size:
        interface = tensor.__array_interface__
        return (interface["data"][0], tensor.shape, tensor.strides, str(tensor.dtype))
    return None


def is_torch(tensor: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(tensor, torch.Tensor)


def host_tensor(name: str, tensor: Any, *, copy: bool) -> Any:
    """The tensor contiguous in host memory; with `copy` memory of its own.  Raises ConfigurationError."""
    if isinstance(tensor, np.ndarray):
        return np.array(tensor, order="C") if copy else np.ascontiguousarray(tensor)
    if not is_torch(tensor):
        raise ConfigurationError(f"{name} is a {type(tensor).__name__}, not a torch tensor or a numpy array")
    if hasattr(tensor, "full_tensor"):
        raise ConfigurationError(f"{name} is distributed over ranks: gather it, as with tensor.full_tensor()")
    if tensor.device.type == "meta" or tensor.is_sparse or tensor.is_quantized:
        raise ConfigurationError(f"{name} has no plain elements ({tensor.device.type}, {tensor.layout})")
    found = tensor.detach()
    if copy or found.device.type != "cpu" or not found.is_contiguous():
        torch = sys.modules["torch"]
        found = torch.empty(tuple(found.shape), dtype=found.dtype, device="cpu").copy_(found)
    return found


def nbytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size()) if is_torch(tensor) else int(tensor.nbytes)


def serialised(tensors: Tensors) -> bytes:
    """A safetensors file.  Raises ConfigurationError for a dtype it has no name for."""
    try:
        from safetensors import SafetensorError
    except ImportError as error:
        raise ConfigurationError(f"tensors are written by rollgrid's extra `weights`: {error}") from error
    try:
        if not any(map(is_torch, tensors.values())):
            from safetensors.numpy import save as save_numpy

            return bytes(save_numpy(dict(tensors)))
        from safetensors.torch import save as save_torch

        torch = sys.modules["torch"]
        return bytes(save_torch({name: t if is_torch(t) else torch.from_numpy(t) for name, t in tensors.items()}))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"safetensors cannot write {', '.join(list(tensors)[:3])}…: {error}") from error
