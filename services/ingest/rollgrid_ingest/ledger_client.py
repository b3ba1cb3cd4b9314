"""Questions to the ledger.  Its answers are bounded by tenant here as well as there."""

from __future__ import annotations

import asyncio
import time

from rollgrid_contracts import subjects
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.fleet import BatchStatus, GroupStatus, LedgerAnswer, LedgerQuery
from rollgrid_contracts.topology import JOBS, LEDGER_ANSWER_S
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError

GROUPS_PER_QUERY = 512


class LedgerClient:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    async def ask(self, query: LedgerQuery) -> LedgerAnswer:
        """One question.  Raises not_ready when no ledger answers in time."""
        try:
            answer = await self._bus.request(subjects.LEDGER_QUERY, query, LedgerAnswer, 2 * LEDGER_ANSWER_S)
        except BusError as error:
            raise _silent(error.message) from error
        if answer.error is not None:
            raise RollgridError(answer.error.code, answer.error.message, boundary=Boundary.LEDGER, retry_after_s=1.0)
        return answer

    async def groups(self, tenant: str, group_ids: list[str]) -> dict[str, GroupStatus]:
        """Status of those groups the ledger knows as this tenant's."""
        known: dict[str, GroupStatus] = {}
        for start in range(0, len(group_ids), GROUPS_PER_QUERY):
            part = tuple(group_ids[start : start + GROUPS_PER_QUERY])
            answer = await self.ask(LedgerQuery(group_ids=part, tenant=tenant))
            known |= {group.group_id: group for group in answer.groups if group.known}
        return known

    async def batch(self, tenant: str, batch_id: str, *, known: bool = False) -> BatchStatus | None:
        """Status of a batch; None when the tenant has none of this name (or the ledger has not come to a known one).

        Raises not_ready while the ledger has not read all jobs and the batch may be among them.
        """
        latest = (await self._bus.stream_info(JOBS.name)).state.last_seq
        answer = await self.ask(LedgerQuery(batch_id=batch_id, tenant=tenant))
        if answer.batch is not None:
            return answer.batch if answer.batch.tenant == tenant else None
        if answer.folded_to < latest and not known:
            raise _silent(f"it has read {answer.folded_to} of {latest} jobs")
        return None

    async def settled_batch(self, tenant: str, batch_id: str, job_seq: int) -> BatchStatus | None:
        """As `batch`, but None also while the ledger may not know all of the batch's jobs.

        `job_seq` is the last RG_JOBS sequence of the batch, 0 when the caller does not know it.
        """
        latest = job_seq or (await self._bus.stream_info(JOBS.name)).state.last_seq
        answer = await self.ask(LedgerQuery(batch_id=batch_id, tenant=tenant))
        if answer.batch is None or answer.batch.tenant != tenant or answer.folded_to < latest:
            return None
        return answer.batch

    async def caught_up(self, tenant: str, group_ids: list[str], *, within_s: float) -> dict[str, GroupStatus]:
        """As `groups`, from a ledger that has read every job stored before this call.

        Raises not_ready when it does not catch up in time.
        """
        latest = (await self._bus.stream_info(JOBS.name)).state.last_seq
        deadline = time.monotonic() + within_s
        while True:
            answer = await self.ask(LedgerQuery(group_ids=tuple(group_ids[:1]), tenant=tenant))
            if answer.folded_to >= latest:
                return await self.groups(tenant, group_ids)
            if time.monotonic() > deadline:
                raise _silent(f"it has read {answer.folded_to} of {latest} jobs")
            await asyncio.sleep(0.1)


def _silent(why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.NOT_READY, f"the ledger does not answer: {why}", boundary=Boundary.LEDGER, retry_after_s=1.0
    )
