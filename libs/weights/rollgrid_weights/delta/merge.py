"""Several deltas as one, for whoever is several versions behind: fewer bytes than all of them, and one pass.

For publishers and tools: the services apply the deltas one after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rollgrid_weights.errors import invalid

from .blob import Codec, Delta
from .decode import apply_delta
from .encode import encode_delta
from .states import State, TensorBits


def merge_deltas(
    base: State,
    deltas: Sequence[Delta],
    *,
    codec: Codec = Codec.EXPONENT,
    threads: int = 1,
    max_bytes: int | None = None,
) -> bytes:
    """The delta from the base to where the last of `deltas` leads; of the same tensors, so shard by shard.

    Holds one copy of the base's tensors.

    Raises WeightsError: no delta, one that does not go on from where that before it ends, other tensors,
    and as `apply_delta` and `encode_delta`.
    """
    if not deltas:
        raise invalid("no delta to merge", "deltas")
    names = [tensor.name for tensor in deltas[0].header.tensors]
    for before, after in itertools.pairwise(deltas):
        if [tensor.name for tensor in after.header.tensors] != names:
            raise invalid("deltas of different tensors cannot be merged", "tensors")
        if after.header.base_digest != before.header.target_digest:
            raise invalid("a delta does not go on from where that before it ends", "base_digest")
    missing = [name for name in names if name not in base]
    if missing:
        raise invalid(f"tensor {missing[0]!r} is missing in the base", missing[0])
    begin = {name: base[name] for name in names}
    state: dict[str, TensorBits] = {name: found._replace(bits=found.bits.copy()) for name, found in begin.items()}
    for delta in deltas:
        apply_delta(delta, state, state, threads=threads)
    return encode_delta(
        begin,
        state,
        base_digest=deltas[0].header.base_digest,
        target_digest=deltas[-1].header.target_digest,
        codec=codec,
        threads=threads,
        max_bytes=max_bytes,
    )
