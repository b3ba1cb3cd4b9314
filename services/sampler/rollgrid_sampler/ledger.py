"""Questions to the ledger: which samples of a group are already in the record.

Asked for jobs that may have been begun before; one request carries the groups of a few
milliseconds.  No answer within a second means: generate, the ledger drops what came twice.
"""

from __future__ import annotations

import asyncio

from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import GroupStatus, LedgerAnswer, LedgerQuery
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

log = get_logger(__name__)
GATHER_S = 0.005
MOST_GROUPS = 200


class LedgerDesk:
    def __init__(self, bus: Bus, timeout_s: float) -> None:
        self._bus, self._timeout_s = bus, timeout_s
        self._waiting: dict[str, asyncio.Future[GroupStatus | None]] = {}
        self._asking: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def status(self, group_id: str) -> GroupStatus | None:
        """What the ledger knows of the group; None when it does not answer or does not know it."""
        answer = self._waiting.get(group_id)
        if answer is None:
            loop = asyncio.get_running_loop()
            answer = self._waiting[group_id] = loop.create_future()
            if self._timer is None:
                self._timer = loop.call_later(GATHER_S, self._ask)
        return await asyncio.shield(answer)

    def _ask(self) -> None:
        self._timer = None
        waiting, self._waiting = self._waiting, {}
        groups = list(waiting)
        for start in range(0, len(groups), MOST_GROUPS):
            part = {group: waiting[group] for group in groups[start : start + MOST_GROUPS]}
            task = asyncio.create_task(self._request(part))
            self._asking.add(task)
            task.add_done_callback(self._asking.discard)

    async def _request(self, waiting: dict[str, asyncio.Future[GroupStatus | None]]) -> None:
        known: dict[str, GroupStatus] = {}
        try:
            query = LedgerQuery(group_ids=tuple(waiting))
            answer = await self._bus.request(subjects.LEDGER_QUERY, query, LedgerAnswer, self._timeout_s)
            known = {status.group_id: status for status in answer.groups if status.known}
        except BusError as error:
            log.warning("ledger_silent", groups=len(waiting), error=error.message)
        finally:
            for group, future in waiting.items():
                if not future.done():
                    future.set_result(known.get(group))
