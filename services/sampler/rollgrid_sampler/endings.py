"""Jobs that end without being sampled here, or before they were: what is missing is recorded as what it is.

A group's cancelled and late samples are the ledger's to write; a session goes on without its turn, and is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.samples import Sample
from rollgrid_runtime.logging import get_logger

from .jobs import HeldJob, Outcome
from .outcomes import Outcomes
from .publishing import Publisher
from .weights import Weights

log = get_logger(__name__)
EXPIRED_S = 10.0
"""A turn's end by its deadline may take so long to be recorded; else whoever asks finds it by the clock."""


class Endings:
    """`publisher` makes one for a job, `answer_recorded` replies with what of it is in the record."""

    def __init__(
        self,
        weights: Weights,
        outcomes: Outcomes,
        publisher: Callable[[HeldJob], Publisher],
        answer_recorded: Callable[[HeldJob], Awaitable[None]],
    ) -> None:
        self._weights, self._outcomes = weights, outcomes
        self._publisher, self._answer_recorded = publisher, answer_recorded

    async def unavailable(self, held: HeldJob) -> Outcome:
        """No version that the job allows came before its deadline: what is missing fails, and may be tried again.

        The version of a pinned session that is gone for good is not waited for.
        """
        rule, loaded = held.job.weights, [one.version for one in self._weights.loaded()]
        gone = self._weights.lost(held.job)
        message = f"no worker had weights for {rule.rule.value} {rule.value} in time; the last one asked has {loaded}"
        if gone:
            message = f"the session is pinned to version {rule.value}, which is loaded no more; loaded are {loaded}"
        error = ErrorInfo(
            code=ErrorCode.VERSION_GONE if gone else ErrorCode.VERSION_UNAVAILABLE,
            message=message,
            boundary=Boundary.WEIGHTS,
            retryable=not gone,
            field="weights",
            limit=f"{rule.rule.value} {rule.value}",
        )
        failed = [self._outcomes.failed(held, index, error, None, time.time()) for index in held.missing]
        return await self._record(held, failed)

    async def aborted(self, held: HeldJob) -> Outcome:
        """A turn that was cancelled before it began."""
        if held.done:
            await self._answer_recorded(held)
        given_up = [self._outcomes.cancelled(held, index, None, time.time()) for index in held.missing]
        return await self._record(held, given_up)

    async def expired(self, held: HeldJob) -> Outcome:
        """Past its deadline: of a group the ledger writes what is missing."""
        if held.job.session is None or held.cancelled:
            return Outcome.ACK
        late = [self._outcomes.expired(held, index, time.time()) for index in held.missing]
        return await self._record(held, late, EXPIRED_S)

    async def _record(self, held: HeldJob, samples: list[Sample], within_s: float = 0.0) -> Outcome:
        publisher = self._publisher(held)
        try:
            async with asyncio.timeout(max(within_s, held.seconds_left())):
                for sample in samples:
                    publisher.add(sample)
                await publisher.finish()
        except TimeoutError:
            log.warning("outcome_not_recorded", group=held.job.group_id)
        finally:
            publisher.stop()
        return Outcome.ACK
