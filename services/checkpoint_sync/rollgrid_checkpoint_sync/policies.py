"""`rg_policies`, changed by compare-and-set alone: several checkpoint-syncs, and whoever rolls back, may do so at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.errors import Conflict, RollgridError
from rollgrid_runtime.kv import Table


class Changed(NamedTuple):
    """What a decision was made on, and what it made of it; the same object when it changed nothing."""

    before: PolicyState
    after: PolicyState


async def change(table: Table[PolicyState], key: str, decide: Callable[[PolicyState], PolicyState]) -> Changed:
    """Decide on what is stored until that is what the decision was made on.

    Raises what `decide` raises, RollgridError `not_found`, BusError.
    """
    while True:
        found = await table.get(key)
        if found is None:
            raise RollgridError(ErrorCode.NOT_FOUND, f"there is no policy {key}", field="policy")
        wanted = decide(found.value)
        if wanted == found.value:
            return Changed(found.value, found.value)
        try:
            await table.update(key, wanted, found.revision)
        except Conflict:
            continue
        return Changed(found.value, wanted)
