"""How few tokens a text can have, without tokenizing it: so a hopelessly long prompt is refused at once.

Certain or silent: where a tokenizer may drop, merge or rewrite text, nothing is claimed.  Byte-level
BPE keeps every byte, so a text has at least as many tokens as its bytes divided by the longest token's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_KEEPS_ALL = frozenset({"Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"})
"""How a `Split` treats what it splits at; `Removed` drops it."""

_ASCII_STAYS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
"""Normalizers that leave ASCII as it is (others change lengths both ways)."""


class LeastTokens:
    """`of(text)` never exceeds the real number of tokens; 0 where nothing is certain."""

    def __init__(self, longest: int, *, ascii_only: bool) -> None:
        """`longest` token in bytes, 0 = unknown; `ascii_only` when other text may be rewritten first."""
        self.longest, self._ascii_only = longest, ascii_only

    @classmethod
    def from_backend(cls, backend: Any) -> LeastTokens:
        """From a `tokenizers.Tokenizer`, None for a tokenizer without one."""
        return cls(0, ascii_only=False) if backend is None else cls.from_description(json.loads(backend.to_str()))

    @classmethod
    def from_description(cls, found: Mapping[str, Any]) -> LeastTokens:
        """From the content of a `tokenizer.json`."""
        normalizer = (found.get("normalizer") or {}).get("type")
        ascii_only = normalizer is not None
        certain = (
            normalizer in (None, *_ASCII_STAYS)
            and _keeps_bytes(found.get("pre_tokenizer") or {})
            and _covers_bytes(found.get("model") or {})
            and not any(token.get("lstrip") or token.get("rstrip") for token in found.get("added_tokens", ()))
        )
        if not certain:
            return cls(0, ascii_only=ascii_only)
        added = (len(token["content"].encode()) for token in found.get("added_tokens", ()))
        # in a byte-level vocabulary each character stands for one byte
        return cls(max([*map(len, found["model"]["vocab"]), *added]), ascii_only=ascii_only)

    def of(self, text: str) -> int:
        if not self.longest or (self._ascii_only and not text.isascii()):
            return 0
        size = len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
        return -(-size // self.longest)


def _keeps_bytes(pre_tokenizer: Mapping[str, Any]) -> bool:
    """Whether the pre-tokenizer splits without dropping anything and ends in bytes."""
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    kinds = [step.get("type") for step in steps]
    splits = [step for step in steps if step.get("type") == "Split"]
    return (
        kinds[-1:] == ["ByteLevel"]
        and set(kinds) <= {"ByteLevel", "Digits", "Split"}
        and all(step.get("behavior") in _KEEPS_ALL for step in splits)
    )


def _covers_bytes(model: Mapping[str, Any]) -> bool:
    """Whether every byte has a token of its own: a byte that has none is dropped."""
    return model.get("type") == "BPE" and sum(len(token) == 1 for token in model.get("vocab", ())) >= 256
