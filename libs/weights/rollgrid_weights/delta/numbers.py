"""The number formats that deltas know, as sign, exponent and mantissa of raw bits, and the token scheme.

Nothing here does arithmetic on the numbers: every bit pattern, NaN payloads and both zeros included,
comes back as it was.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from rollgrid_contracts.failures import ErrorCode

from rollgrid_weights.errors import WeightsError


class NumberFormat(NamedTuple):
    """One dtype: unsigned integers of `width` bits, the sign on top, then the exponent above `mantissa` bits."""

    dtype: str
    width: int
    mantissa: int

    @property
    def exponents(self) -> int:
        """How many exponent classes there are."""
        return 1 << (self.width - 1 - self.mantissa)

    @property
    def item(self) -> int:
        """Bytes of one element."""
        return self.width // 8

    @property
    def kind(self) -> np.dtype[np.unsignedinteger]:
        return np.dtype(f"<u{self.width // 8}")


FORMATS = {
    found.dtype: found
    for found in (
        NumberFormat("BF16", 16, 7),
        NumberFormat("F16", 16, 10),
        NumberFormat("F32", 32, 23),
        NumberFormat("F8_E4M3", 8, 3),
        NumberFormat("F8_E5M2", 8, 2),
    )
}

DIRECT = 16
"""Numbers below this are tokens of their own; above, four tokens an octave, the lower bits raw."""
GAP_TOKENS = DIRECT + 28 * 4
"""Gaps are below 2^32."""
STEP_TOKENS = GAP_TOKENS * 4
"""A step's token is that of its distance, times four, plus 2 for towards zero, plus 1 for a change of sign."""


def number_format(dtype: str, name: str) -> NumberFormat:
    """Raises WeightsError (field = the tensor's name) for a dtype that deltas do not know."""
    found = FORMATS.get(dtype)
    if found is None:
        raise WeightsError(
            ErrorCode.UNSUPPORTED,
            f"tensor {name[:100]!r} has dtype {dtype[:20]}; deltas know {', '.join(FORMATS)}",
            field=name[:100],
        )
    return found
