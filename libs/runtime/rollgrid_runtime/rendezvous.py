"""Rendezvous hashing: an order of names that everybody computes alike, and that hardly moves when names come or go.

Pure.  Of two names in both orders of one key, which comes first never changes; so a name that leaves moves only the
keys it was first for, and one that comes takes keys from the others in the ratio of its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

_SPAN = float(1 << 64)


def ranked(key: str, weights: Mapping[str, int]) -> list[str]:
    """The names, best first; a name is first with the share of its weight (which is positive)."""
    return sorted(weights, key=lambda name: (-_score(key, name, weights[name]), name))


def _score(key: str, name: str, weight: int) -> float:
    """Weighted highest random weight: w / -ln(u), u of (0, 1) by hash.  The key's length is hashed too: no two
    pairs of a key and a name are one text."""
    digest = blake2b(f"{len(key)}\x1f{key}\x1f{name}".encode(), digest_size=8).digest()
    return weight / -math.log((int.from_bytes(digest, "little") + 0.5) / _SPAN)
