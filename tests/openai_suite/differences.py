"""Where the two endpoints differ: the one table, held both ways.

A test named here must fail on that endpoint and pass on the other; `docs/reference/compatibility.md`
says the same in prose.
"""

from __future__ import annotations

from .endpoints import PLAIN, ROLLGRID

DIFFERENCES: dict[tuple[str, str], str] = {}
"""(test, endpoint that does not do it) → why."""

__all__ = ["DIFFERENCES", "PLAIN", "ROLLGRID"]
