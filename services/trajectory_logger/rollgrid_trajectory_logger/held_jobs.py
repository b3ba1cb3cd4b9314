"""The jobs an active ledger holds in RG_JOBS, and how it lets go of them."""

from __future__ import annotations

import asyncio

from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import CancelWork
from rollgrid_contracts.topology import JOBS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from .ledger import Settle

log = get_logger(__name__)
DELETES_AT_ONCE = 16
ABORTS_PER_MESSAGE = 500
DELETE_ATTEMPTS = 5


class HeldJobs:
    """Acks, deletes and aborts, done by `run` in the order decided.

    None of them must succeed now: the close is durable, so whatever is left undone is done by the
    next take-over, which finds the job of a closed group.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._ack_subjects: dict[int, str] = {}
        self._acks: list[int] = []
        self._deletes: list[int] = []
        self._aborts: list[CancelWork] = []
        self._wake = asyncio.Event()
        self.letting_go = 0

    def hold(self, seq: int, ack_subject: str) -> None:
        self._ack_subjects[seq] = ack_subject

    def __len__(self) -> int:
        return len(self._ack_subjects)

    def settle(self, decision: Settle) -> None:
        self._acks += decision.ack
        self._deletes += decision.delete
        if decision.abort is not None or decision.turns:
            groups = () if decision.abort is None else (decision.abort,)
            self._aborts.append(CancelWork(group_ids=groups, turns=decision.turns))
        self._wake.set()

    async def run(self) -> None:
        gate = asyncio.Semaphore(DELETES_AT_ONCE)
        async with asyncio.TaskGroup() as deleting:
            while True:
                await self._wake.wait()
                self._wake.clear()
                acks, deletes, aborts = self._acks, self._deletes, self._aborts
                self._acks, self._deletes, self._aborts = [], [], []
                for seq in acks:
                    subject = self._ack_subjects.pop(seq, None)
                    if subject is not None:
                        await self._bus.publish_raw(subject, b"+ACK")
                self.letting_go += len(deletes)
                for start in range(0, len(aborts), ABORTS_PER_MESSAGE):
                    command = _joined(aborts[start : start + ABORTS_PER_MESSAGE])
                    await self._bus.publish_core(subjects.worker_control(subjects.EVERY_WORKER), command)
                for seq in deletes:
                    await gate.acquire()
                    deleting.create_task(self._delete(seq, gate))

    async def _delete(self, seq: int, gate: asyncio.Semaphore) -> None:
        try:
            for attempt in range(1, DELETE_ATTEMPTS + 1):
                try:
                    await self._bus.delete_message(JOBS.name, seq)
                    break
                except BusError as error:
                    log.warning("job_not_deleted", seq=seq, attempt=attempt, error=error.message)
                    await asyncio.sleep(0.2 * attempt)
        finally:
            self._ack_subjects.pop(seq, None)
            self.letting_go -= 1
            gate.release()


def _joined(aborts: list[CancelWork]) -> CancelWork:
    groups = tuple(group for abort in aborts for group in abort.group_ids)
    return CancelWork(group_ids=groups, turns=tuple(turn for abort in aborts for turn in abort.turns))
