"""Which groups have closed, and the counts of every batch: what the ledger answers questions from.

Rebuilt at each take-over from the headers of the closes and from the open jobs.  A close is kept
here for as long as a retry may bring its job again.  Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rollgrid_contracts.samples import SampleStatus

KEEP_S = 25 * 3600.0
"""Idempotency keys live 24 h: until then a retry may republish the jobs of a closed group."""

Counts = tuple[int, ...]
"""Entries by status, in the order of `SampleStatus`."""


def parse_counts(text: str) -> Counts:
    """Parse `Rg-Counts`; a malformed one raises ValueError."""
    found = dict(part.split("=", 1) for part in text.split(",") if part)
    return tuple(int(found.get(status.value, 0)) for status in SampleStatus)


def format_counts(counts: Counts) -> str:
    return ",".join(f"{status.value}={count}" for status, count in zip(SampleStatus, counts, strict=True))


def has_missing(counts: Counts) -> bool:
    """Whether some sample was cancelled or expired, so that copies of its job may still wait somewhere."""
    by_status = dict(zip(SampleStatus, counts, strict=True))
    return by_status[SampleStatus.CANCELLED] + by_status[SampleStatus.EXPIRED] > 0


class ClosedRead(NamedTuple):
    """One close as its headers tell it: at RG_TRAJECTORIES `seq`, stored at UNIX second `at`."""

    group_id: str
    batch_id: str
    subject: str
    seq: int
    counts: Counts
    at: float


class ClosedGroup(NamedTuple):
    seq: int
    subject: str
    batch_id: str
    counts: Counts


@dataclass(slots=True)
class Batch:
    """Counts over the groups of one batch; `samples` is what they will have when all are closed."""

    subject: str
    open: set[str] = field(default_factory=set)
    closed: int = 0
    samples: int = 0
    finished: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * len(SampleStatus))
    last_seq: int = 0


class ClosedIndex:
    def __init__(self) -> None:
        self.groups: dict[str, ClosedGroup] = {}
        self.batches: dict[str, Batch] = {}
        self._order: deque[tuple[float, str]] = deque()

    def opened(self, group_id: str, batch_id: str, subject: str, n: int) -> None:
        if batch_id:
            batch = self._batch(batch_id, subject)
            batch.open.add(group_id)
            batch.samples += n

    def finished(self, batch_id: str) -> None:
        if batch_id:
            self.batches[batch_id].finished += 1

    def closed(self, read: ClosedRead, open_finished: int | None) -> bool:
        """Record a close; `open_finished` is how many samples of the group had finished, None if it was not open.

        False when the group has closed before at another sequence, which must never happen.
        """
        known = self.groups.get(read.group_id)
        if known is not None:
            return known.seq == read.seq
        self.groups[read.group_id] = ClosedGroup(read.seq, read.subject, read.batch_id, read.counts)
        self._order.append((read.at, read.group_id))
        if not read.batch_id:  # of a refusal that named no batch
            return True
        batch = self._batch(read.batch_id, read.subject)
        n = sum(read.counts)
        batch.open.discard(read.group_id)
        batch.closed += 1
        batch.last_seq = max(batch.last_seq, read.seq)
        batch.finished += n - (open_finished or 0)
        if open_finished is None:
            batch.samples += n
        for place, count in enumerate(read.counts):
            batch.counts[place] += count
        return True

    def forget(self, before: float, at_most: int) -> int:
        """Drop closes stored before a UNIX time, and the oldest beyond `at_most`; how many of the latter."""
        early = 0
        while self._order and (self._order[0][0] < before or len(self.groups) > at_most):
            at, group_id = self._order.popleft()
            early += at >= before
            gone = self.groups.pop(group_id)
            batch = self.batches.get(gone.batch_id)
            if batch is not None and not batch.open and batch.last_seq <= gone.seq:
                del self.batches[gone.batch_id]
        return early

    def _batch(self, batch_id: str, subject: str) -> Batch:
        batch = self.batches.get(batch_id)
        if batch is None:
            batch = self.batches[batch_id] = Batch(subject)
        return batch
