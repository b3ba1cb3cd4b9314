"""A job in this sampler's hands, from its delivery to its ack."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from enum import StrEnum
from typing import Any, TypeVar, cast

from rollgrid_contracts import ids
from rollgrid_contracts.fleet import GroupStatus
from rollgrid_contracts.jobs import Job, OpenEpisode, SampleGroup
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.telemetry import OFF, Span, trace_id

T = TypeVar("T")
ANY_JOB = cast(type[SampleGroup | OpenEpisode], Job)


class Outcome(StrEnum):
    """What becomes of the delivery."""

    ACK = "ack"
    REFUSE = "refuse"
    """Negative ack with a delay: not now, not here.  Never counted as a start."""
    RETURN = "return"
    """Negative ack at once: begun or not, another worker should take it."""


class Aborted(Exception):
    """The caller wants this turn no more."""


class HeldJob:
    """`done` maps indexes already in the record to their event; `suspect` = somebody may have died of it.

    `doubtful` = somebody may have begun it although its delivery does not say so; `refused` = it was given
    back somewhere, or begun: its starts are recorded, and it is a suspect once there is one.
    `lane` is whose turn it uses; `private`: it came by a worker's own lane.
    `starts` is how many of them were recorded, as far as it was looked up.
    `cancelled`: its outcome is decided elsewhere; `aborted`: a turn that has to end as cancelled here.
    """

    __slots__ = (
        "_generating",
        "aborted",
        "cancelled",
        "delivery",
        "dequeued_at",
        "done",
        "doubtful",
        "job",
        "lane",
        "private",
        "refused",
        "seats",
        "span",
        "starts",
        "suspect",
        "task",
    )

    def __init__(
        self, delivery: Delivery, job: SampleGroup, lane: PoolLane, *, suspect: bool, private: bool = False
    ) -> None:
        self.delivery = delivery
        self.job = job
        self.lane = lane
        self.private = private
        self.suspect = suspect
        self.doubtful = False
        self.refused = False
        self.starts = 0
        self.dequeued_at = time.time()
        self.done: dict[int, int] = {}
        self.cancelled = False
        self.aborted = False
        self._generating: asyncio.Task[Any] | None = None
        self.seats = asyncio.Semaphore(0)
        """One permit for each sample that may start (given out by the dispatcher)."""
        self.task: asyncio.Task[Outcome] | None = None
        self.span: Span = OFF

    @property
    def sequence(self) -> int:
        return self.delivery.sequence

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(index for index in self.job.indexes if index not in self.done)

    @property
    def attempt(self) -> int:
        return self.job.attempt + self.delivery.delivered - 1

    @property
    def ids(self) -> dict[str, str | None]:
        """For every log line about it."""
        job = self.job
        return {
            "tenant": job.tenant,
            "run": job.run,
            "group": job.group_id,
            **({} if job.session is None else {"call": job.call_id}),
            "trace_id": trace_id(self.span.traceparent),
        }

    @property
    def taken_over(self) -> bool:
        """Whether another worker may have begun it, or a turn's earlier dispatch."""
        fence = self.job.session.fence if self.job.session is not None else 0
        return self.suspect or self.doubtful or self.delivery.delivered > 1 or fence not in (0, self.sequence)

    @property
    def alone(self) -> bool:
        """Whether nothing may run beside it.

        Of a session only what was begun twice: whoever dies leaves many turns, and each has somebody waiting.
        """
        return self.suspect and (self.job.session is None or self.starts > 0)

    def seconds_left(self) -> float:
        return self.job.deadline - time.time()

    def cancel(self) -> None:
        """The group's outcome is decided elsewhere: stop working on it."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()

    def abort(self) -> None:
        """Its generation ends now, and the handler records that it was cancelled."""
        self.aborted = True
        if self._generating is not None:
            self._generating.cancel()

    async def abortable(self, work: Coroutine[Any, Any, T]) -> T:
        """Of a turn, work that `abort` ends.  Raises Aborted."""
        if self.job.session is None:
            return await work
        if self.aborted:
            work.close()
            raise Aborted
        task = asyncio.create_task(work)
        self._generating = task
        try:
            await asyncio.wait([task])
        finally:
            self._generating = None
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        if task.cancelled():
            raise Aborted
        return task.result()


def sample_name(job: SampleGroup, index: int) -> str:
    """What names a sample (of a session: a turn) to engines and in the record, whoever makes it."""
    if job.session is None:
        return ids.sample_id(job.group_id, index)
    return ids.turn_id(job.group_id, index, job.session.turn)


def recorded_of(job: SampleGroup, status: GroupStatus) -> dict[int, int] | None:
    """Indexes of the job that are in the record, and their events; None where nothing is left to do."""
    if status.closed_seq:
        return None
    if job.session is None:
        return dict(status.done)
    if set(job.indexes) <= set(status.ended):
        return None
    found = {index: status.turns.get(index, {}).get(job.session.turn) for index in job.indexes}
    return {index: sequence for index, sequence in found.items() if sequence is not None}
