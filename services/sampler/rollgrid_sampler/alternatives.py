"""Alternatives per position (`TopLogprobs`) cut and joined; a position without any stays an empty row."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.samples import TopLogprobs


def rows(top: TopLogprobs | None, start: int, end: int) -> TopLogprobs | None:
    """Positions [start, end)."""
    if top is None:
        return None
    offsets = np.frombuffer(top.offsets.packed, "<u4")[start : end + 1]
    first, last = 4 * int(offsets[0]), 4 * int(offsets[-1])
    return TopLogprobs(
        offsets=TokenIds((offsets - offsets[0]).astype("<u4").tobytes()),
        token_ids=TokenIds(top.token_ids.packed[first:last]),
        logprobs=Floats(top.logprobs.packed[first:last]),
    )


def empty(positions: int) -> TopLogprobs:
    """Positions of which nothing is known."""
    return TopLogprobs(offsets=TokenIds(bytes(4 * (positions + 1))), token_ids=TokenIds(), logprobs=Floats())


def joined(parts: Iterable[TopLogprobs]) -> TopLogprobs:
    offsets, total, ids, logprobs = [np.zeros(1, "<u4")], 0, [], []
    for part in parts:
        own = np.frombuffer(part.offsets.packed, "<u4")
        offsets.append((own[1:] + np.uint32(total)).astype("<u4"))
        total += len(part.token_ids)
        ids.append(part.token_ids.packed)
        logprobs.append(part.logprobs.packed)
    return TopLogprobs(
        offsets=TokenIds(np.concatenate(offsets).tobytes()),
        token_ids=TokenIds(b"".join(ids)),
        logprobs=Floats(b"".join(logprobs)),
    )
