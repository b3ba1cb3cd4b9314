"""What is checked in a version's folder before vLLM sees it, and what a loaded LoRA version is to vLLM.

vLLM only warns of a tensor that a checkpoint lacks and keeps the old one, and it changes tensors one
by one: whatever can be known from the headers is known before the first one is touched.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rollgrid_weights.errors import WeightsError
from rollgrid_weights.safetensors_header import read_header

from .base import WeightsRefused

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
TIED_HEAD = "lm_head.weight"

Shapes = dict[str, tuple[int, ...]]


class Adapter(NamedTuple):
    """A loaded LoRA version.  Name, id and path are never used for other bytes."""

    name: str
    number: int
    folder: Path
    fingerprint: str | None = None
    retiring: bool = False

    def request(self) -> Any:
        """What vLLM takes with each generation request."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(lora_name=self.name, lora_int_id=self.number, lora_path=str(self.folder))


def shapes(folder: Path) -> Shapes:
    """All tensors of the folder's safetensors files.  Raises WeightsRefused (intact)."""
    found: Shapes = {}
    try:
        for path in sorted(folder.glob("*.safetensors")):
            found |= {name: entry.shape for name, entry in read_header(path).items()}
    except (WeightsError, OSError) as error:
        raise WeightsRefused(f"{folder.name}: {error}", intact=True) from error
    return found


def check_full(version: int, folder: Path, expected: Shapes) -> None:
    """The folder has exactly the tensors the engine was started with.  Raises WeightsRefused (intact)."""
    found = shapes(folder)
    if not found:
        raise WeightsRefused(f"version {version}: no safetensors in its folder", intact=True)
    if not expected:
        return
    optional = {TIED_HEAD} if _tied(folder) else set()
    missing, strange = (
        sorted(expected.keys() - found.keys() - optional),
        sorted(found.keys() - expected.keys() - optional),
    )
    if missing or strange:
        raise WeightsRefused(f"version {version}: lacks {missing[:3]}, has unknown {strange[:3]}", intact=True)
    for name in expected.keys() & found.keys():
        if expected[name] != found[name]:
            message = f"version {version}: {name} is {list(found[name])}, the engine has {list(expected[name])}"
            raise WeightsRefused(message, intact=True)


def _tied(folder: Path) -> bool:
    """Whether the output head is the embedding: a checkpoint may then carry it or not."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return bool(config.get("tie_word_embeddings", False))


def check_adapter(version: int, folder: Path, max_rank: int) -> None:
    """The folder is a PEFT adapter that fits.  Raises WeightsRefused (intact)."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text())
        rank = int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsRefused(f"LoRA version {version}: {ADAPTER_CONFIG}: {error!r}", intact=True) from error
    if not 1 <= rank <= max_rank:
        raise WeightsRefused(f"LoRA version {version}: rank {rank}, the engine takes 1 .. {max_rank}", intact=True)
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise WeightsRefused(f"LoRA version {version}: no {ADAPTER_WEIGHTS}", intact=True)
    shapes(folder)
