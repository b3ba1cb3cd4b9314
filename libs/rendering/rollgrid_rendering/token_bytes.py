"""The bytes of a token that is a piece of a character, from its name in the vocabulary."""

from __future__ import annotations

import re
from functools import cache

REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no character."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def own_bytes(token: str) -> bytes | None:
    """Of a byte-level vocabulary (`Ã`) or of byte fallback (`<0xC3>`); None of any other."""
    match = _FALLBACK.fullmatch(token)
    if match is not None:
        return bytes([int(match[1], 16)])
    alphabet = _byte_level()
    if token and all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
    return None


@cache
def _byte_level() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
