"""A job in this sampler's hands, from its delivery to its ack."""

from __future__ import annotations

import asyncio
import time
from enum import StrEnum

from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.telemetry import OFF, Span, trace_id


class Outcome(StrEnum):
    """What becomes of the delivery."""

    ACK = "ack"
    REFUSE = "refuse"
    """Negative ack with a delay: not now, not here.  Never counted as a start."""
    RETURN = "return"
    """Negative ack at once: begun or not, another worker should take it."""


class HeldJob:
    """`done` maps indexes already in the record to their event; `suspect` = somebody may have died of it.

    `doubtful` = somebody may have begun it although its delivery does not say so; `refused` = it was given
    back somewhere, or begun: its starts are recorded, and it is a suspect once there is one.
    """

    __slots__ = (
        "cancelled",
        "delivery",
        "dequeued_at",
        "done",
        "doubtful",
        "job",
        "lane",
        "refused",
        "seats",
        "span",
        "suspect",
        "task",
    )

    def __init__(self, delivery: Delivery, job: SampleGroup, lane: PoolLane, *, suspect: bool) -> None:
        self.delivery = delivery
        self.job = job
        self.lane = lane
        self.suspect = suspect
        self.doubtful = False
        self.refused = False
        self.dequeued_at = time.time()
        self.done: dict[int, int] = {}
        self.cancelled = False
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
            "trace_id": trace_id(self.span.traceparent),
        }

    @property
    def taken_over(self) -> bool:
        """Whether another worker may have begun it."""
        return self.suspect or self.doubtful or self.delivery.delivered > 1

    def seconds_left(self) -> float:
        return self.job.deadline - time.time()

    def cancel(self) -> None:
        """The group's outcome is decided elsewhere: stop working on it."""
        self.cancelled = True
        if self.task is not None:
            self.task.cancel()
