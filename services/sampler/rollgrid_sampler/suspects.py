"""Who began a job that came back: the count that ends a job which kills its samplers.

A start is recorded before the engine is touched, so a crash cannot hide it; success clears it.  Jobs go by their
`call_id`: a session's turn is counted by itself, its neighbours are not.
"""

from __future__ import annotations

from rollgrid_contracts.fleet import Suspect
from rollgrid_contracts.topology import SUSPECTS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict
from rollgrid_runtime.kv import Table

ATTEMPTS = 20


class Suspects:
    """All methods raise BusError when the bucket is out of reach."""

    def __init__(self, bus: Bus) -> None:
        self._table: Table[Suspect] = Table(bus, SUSPECTS, Suspect)

    async def starts(self, call_id: str) -> int:
        found = await self._table.get(call_id)
        return found.value.starts if found is not None else 0

    async def record(self, call_id: str, worker: str) -> int:
        """One more start, by compare-and-set; the number of starts now."""
        for _ in range(ATTEMPTS):
            found = await self._table.get(call_id)
            try:
                if found is None:
                    await self._table.create(call_id, Suspect(group_id=call_id, starts=1, workers=(worker,)))
                    return 1
                value = found.value
                more = Suspect(group_id=call_id, starts=value.starts + 1, workers=(*value.workers, worker))
                await self._table.update(call_id, more, found.revision)
            except Conflict:
                continue
            return more.starts
        raise Conflict(f"{call_id}: {ATTEMPTS} attempts to record a start were overtaken")

    async def withdraw(self, call_id: str) -> None:
        """One start less: it was ended on purpose."""
        for _ in range(ATTEMPTS):
            found = await self._table.get(call_id)
            if found is None or found.value.starts <= 1:
                await self._table.delete(call_id)
                return
            value = found.value
            fewer = Suspect(group_id=call_id, starts=value.starts - 1, workers=value.workers[:-1])
            try:
                await self._table.update(call_id, fewer, found.revision)
            except Conflict:
                continue
            return

    async def clear(self, call_id: str) -> None:
        await self._table.delete(call_id)
