"""Messages of RG_JOBS and RG_SAMPLES in; closes, acks, deletes and aborts out."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Any

import msgspec
from rollgrid_contracts.jobs import Job
from rollgrid_contracts.topology import Header
from rollgrid_runtime.errors import PayloadGone, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.pulling import Delivery

from . import metrics
from .closed_index import ClosedRead
from .closer import Closer
from .held_jobs import HeldJobs
from .ledger import Close, Decision, Event, Ledger

log = get_logger(__name__)
CLAIM_RETRY_S = 1.0
CLAIMS_AT_ONCE = 8


class LedgerHandler:
    """Feeds the fold and carries out what it decides.

    `jobs_read` and `events_read` count deliveries: what the server says it has delivered can be
    compared with them.  Until `go_live` decisions are kept, because closes must not be written
    before everything has been read again.
    """

    def __init__(self, ledger: Ledger, jobs: HeldJobs) -> None:
        self.ledger, self._jobs = ledger, jobs
        self._closer: Closer | None = None
        self._kept: list[Decision] = []
        self.jobs_read = 0
        self.events_read = 0
        self.applied_at = 0.0
        """When the newest event that has been applied was stored (UNIX seconds)."""
        self.unreadable_jobs = 0
        self._event_acks: deque[tuple[int, str]] = deque()

    def go_live(self, closer: Closer) -> None:
        self._closer = closer
        self.ledger.live = True
        kept, self._kept = self._kept, []
        self.decide(kept)

    async def on_job(self, delivery: Delivery) -> None:
        job: Job | None = await self._read(delivery, Job)
        self.jobs_read += 1
        self._jobs.hold(delivery.sequence, delivery.ack_subject)
        if job is None:  # it stays in the stream for a human: nothing says whose it is
            self.unreadable_jobs += 1
            self.decide(self.ledger.jobs_end(delivery.sequence, 0, time.time()))
            return
        self.decide(self.ledger.job_read(delivery.sequence, job, time.time()))

    async def on_events(self, batch: list[Delivery]) -> None:
        """Events in stream order; bodies that are in S3 are fetched a few at a time."""
        for start in range(0, len(batch), CLAIMS_AT_ONCE):
            part = batch[start : start + CLAIMS_AT_ONCE]
            if any(Header.CLAIM.value in delivery.headers for delivery in part):
                events = await asyncio.gather(*(self._read(delivery, Event) for delivery in part))
            else:
                events = [await self._read(delivery, Event) for delivery in part]
            for delivery, event in zip(part, events, strict=True):
                self._on_event(delivery, event)

    def _on_event(self, delivery: Delivery, event: Event | None) -> None:
        self.events_read += 1
        self._event_acks.append((delivery.sequence, delivery.ack_subject))
        if event is None:
            self.decide(self.ledger.skip_event(delivery.sequence, "unreadable", time.time()))
        else:
            self.decide(self.ledger.event_read(delivery.sequence, event, time.time()))
        if not self.ledger.waiting:
            self.applied_at = delivery.timestamp

    def events_settled(self) -> str | None:
        """Ack subject of the last event that is settled and was not when last asked.

        Acknowledging it (policy `all`) moves the floor from which the next take-over must read.
        """
        settled, last = self.ledger.settled_to(), None
        while self._event_acks and self._event_acks[0][0] <= settled:
            last = self._event_acks.popleft()[1]
        return last

    def on_closed(self, read: ClosedRead) -> None:
        self.decide(self.ledger.closed(read))

    def decide(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if self._closer is None:
                self._kept.append(decision)
            elif isinstance(decision, Close):
                self._closer.add(decision)
            else:
                self._jobs.settle(decision)

    async def _read(self, delivery: Delivery, kind: Any) -> Any:
        """The decoded message, None when nobody can ever read it; waits for as long as S3 holds its body back."""
        while True:
            try:
                return await delivery.message(kind)
            except (msgspec.MsgspecError, RecursionError, PayloadGone) as error:
                metrics.UNREADABLE.labels(delivery.subject.split(".")[2]).inc()
                log.error("unreadable_message", subject=delivery.subject, seq=delivery.sequence, error=repr(error))
                return None
            except StorageError as error:
                log.warning("claim_waits_for_s3", seq=delivery.sequence, error=error.message)
                await asyncio.sleep(CLAIM_RETRY_S)
