"""Safetensors files as bytes: well-formed by the real library, malformed by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file


def write(path: Path, tensors: Mapping[str, Any]) -> Path:
    """Written by the safetensors library from numpy arrays."""
    save_file({name: np.asarray(value, order="C") for name, value in tensors.items()}, str(path))
    return path


def raw(header: Any, data: bytes = b"") -> bytes:
    """A file from any header (a JSON value, or bytes taken as they are) and the bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
