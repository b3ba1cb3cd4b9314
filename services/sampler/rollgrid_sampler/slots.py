"""Capacity of one engine as pure bookkeeping: which sample may start, which must wait.

A job is admitted while a slot is free and nobody waits; samples of it that find no slot wait in
order and take the next ones.  A suspect is admitted only when no other job is in hand, and nothing
beside it until it has left, so that a crash can be laid at no other door.
"""

from __future__ import annotations

from collections import Counter, deque


class Slots:
    """`total` samples at once.  Keys name jobs; a job is in hand from `admit` to `leave`."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError("an engine needs at least one slot")
        self.total = total
        self._running: Counter[int] = Counter()
        self._waiting: deque[int] = deque()
        self._jobs: set[int] = set()
        self._alone: int | None = None

    @property
    def busy(self) -> int:
        return self._running.total()

    @property
    def free(self) -> int:
        """Slots a new job could use now."""
        return 0 if self._alone is not None or self._waiting else self.total - self.busy

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def jobs(self) -> int:
        return len(self._jobs)

    def admissible(self, *, alone: bool = False) -> bool:
        return not self._jobs if alone else self.free > 0

    def admit(self, key: int, samples: int, *, alone: bool = False) -> int:
        """Take a job in; how many of its samples may start now.  Requires `admissible`."""
        if not self.admissible(alone=alone) or key in self._jobs:
            raise ValueError(f"job {key} admitted without room")
        self._jobs.add(key)
        if alone:
            self._alone = key
        starting = min(samples, self.total - self.busy)
        self._running[key] += starting
        self._waiting.extend([key] * (samples - starting))
        return starting

    def release(self, key: int) -> int | None:
        """One running sample of `key` has ended; the job whose next sample takes its place, if any."""
        if self._running[key] < 1:
            raise ValueError(f"job {key} runs nothing")
        self._running[key] -= 1
        if not self._waiting:
            return None
        successor = self._waiting.popleft()
        self._running[successor] += 1
        return successor

    def leave(self, key: int) -> list[int]:
        """The job is over, whatever it still had: the jobs whose next samples take its slots."""
        self._waiting = deque(other for other in self._waiting if other != key)
        successors = []
        while self._running[key]:
            successor = self.release(key)
            if successor is not None:
                successors.append(successor)
        del self._running[key]
        self._jobs.discard(key)
        if self._alone == key:
            self._alone = None
        return successors
