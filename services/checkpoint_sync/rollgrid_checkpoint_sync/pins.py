"""Versions that somebody needs: pins that hold, and those that are over and go.

A pin ends with its time or with its batch.  The ledger counts only groups whose jobs it has read, and a
batch's jobs are still being published while its pin is there already: so it has to have read all jobs
and to find the batch closed, with the same number of groups, in two rounds one after the other.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from rollgrid_contracts import subjects, topology
from rollgrid_contracts.checkpoints import Pin
from rollgrid_contracts.fleet import LedgerAnswer, LedgerQuery
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_runtime.logging import get_logger

log = get_logger(__name__)


class Pins:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._table: Table[Pin] = Table(bus, topology.PINS, Pin)
        self._closed: dict[str, int] = {}

    async def pinned(self, policy: str) -> set[int]:
        """Versions of a policy (`<tenant>.<policy>`) with a pin.  Raises BusError."""
        return {_version(key) for key in await self._of(policy)} - {0}

    async def drop_ended(self, policy: str) -> None:
        """Raises BusError."""
        now = time.time()
        pins = await self._of(policy)
        folded = await self._folded_all() if any(pin.value.batch_id for pin in pins.values()) else False
        self._closed = {key: groups for key, groups in self._closed.items() if key in pins or not _is_of(key, policy)}
        for key, (pin, revision) in pins.items():
            if pin.until <= now or (folded and pin.batch_id and await self._is_closed(key, pin)):
                await self._table.remove(key, revision)
                log.info("pin_dropped", pin=key, batch=pin.batch_id, until=pin.until)

    async def _of(self, policy: str) -> Mapping[str, Versioned[Pin]]:
        return await self._table.items(f"{policy}.>")

    async def _folded_all(self) -> bool:
        """Whether the ledger has read every job there is; no answer means no."""
        latest = (await self._bus.stream_info(topology.JOBS.name)).state.last_seq
        answer = await self._ask(LedgerQuery())
        return answer is not None and answer.folded_to >= latest

    async def _is_closed(self, key: str, pin: Pin) -> bool:
        answer = await self._ask(LedgerQuery(batch_id=pin.batch_id, tenant=pin.tenant or None))
        batch = answer.batch if answer is not None else None
        before = self._closed.pop(key, None)
        if batch is None or not batch.groups or batch.closed < batch.groups:
            return False
        self._closed[key] = batch.groups
        return before == batch.groups

    async def _ask(self, query: LedgerQuery) -> LedgerAnswer | None:
        try:
            return await self._bus.request(subjects.LEDGER_QUERY, query, LedgerAnswer, topology.LEDGER_ANSWER_S)
        except BusError as error:
            log.info("ledger_silent", error=error.message)
            return None


def _version(key: str) -> int:
    number = key.split(".")[2]
    return int(number) if number.isdigit() else 0


def _is_of(key: str, policy: str) -> bool:
    return key.startswith(policy + ".")
