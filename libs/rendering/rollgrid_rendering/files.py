"""Which files of a model folder make its tokenizer, and the digest that pins them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

TOKENIZER_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
"""Everything that decides how text becomes ids (and which ids end a text); weights are not among them."""


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """The tokenizer files present in `folder`, by name."""
    return {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}


def digest_of(contents: Mapping[str, bytes]) -> str:
    """sha256 over the sorted names and the sha256 of each file's bytes: the tokenizer's identity."""
    total = hashlib.sha256()
    for name in sorted(contents):
        total.update(f"{name}\0{hashlib.sha256(contents[name]).hexdigest()}\n".encode())
    return total.hexdigest()


def folder_digest(folder: Path) -> str:
    """`digest_of` the tokenizer files in `folder`."""
    return digest_of({name: path.read_bytes() for name, path in tokenizer_files(folder).items()})
