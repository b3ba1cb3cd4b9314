"""Which files a checkpoint may consist of.  Everything else is refused: pickles and code above all."""

from __future__ import annotations

import re

from rollgrid_contracts.failures import ErrorCode

from .errors import WeightsError

SAFETENSORS = ".safetensors"
DELTA = ".rgdelta"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)
CONFIG_FILES = ("config.json", "generation_config.json")
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SIDE_FILES = frozenset({INDEX, ADAPTER_CONFIG, *CONFIG_FILES, *TOKENIZER_FILES})
"""Files that may come with the tensors.  The fleet runs the base's own; these are kept, not used."""

_WEIGHTS_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,120}\.(safetensors|rgdelta)")


def check_file_name(name: str) -> None:
    """Raises WeightsError unless `name` is a plain safetensors or delta name, or a known side file."""
    if name in SIDE_FILES or (_WEIGHTS_NAME.fullmatch(name) and ".." not in name):
        return
    raise WeightsError(
        ErrorCode.UNSUPPORTED,
        f"a checkpoint may not contain {name[:150]!r}: only *.safetensors, *.rgdelta and {', '.join(sorted(SIDE_FILES))}",
        field=name[:150],
    )


def is_weights(name: str) -> bool:
    return name.endswith(SAFETENSORS)


def is_delta(name: str) -> bool:
    return name.endswith(DELTA)
