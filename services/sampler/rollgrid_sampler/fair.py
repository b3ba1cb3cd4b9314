"""Deficit round robin over lanes: no tenant's flood starves another, and priorities are shares.

Pure.  A lane's turn gives it `weight * quantum` of credit; it serves jobs while its credit covers
their cost and keeps the rest for its next turn.  An empty lane loses its credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rollgrid_contracts.jobs import Priority

L = TypeVar("L")
T = TypeVar("T")

QUANTUM = 8
"""Samples of credit per turn and unit of weight."""

WEIGHTS = {Priority.INTERACTIVE: 16, Priority.NORMAL: 4, Priority.BULK: 1}


class _Lane(Generic[T]):
    __slots__ = ("credit", "jobs", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.credit = 0
        self.jobs: deque[tuple[T, int]] = deque()


class FairQueue(Generic[L, T]):
    """Jobs of many lanes; `peek` names the next, `pop` takes it."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._lanes: dict[L, _Lane[T]] = {}
        self._turns: deque[L] = deque()
        self.cost = 0

    def __len__(self) -> int:
        return sum(len(lane.jobs) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[T]:
        return (job for lane in self._lanes.values() for job, _ in lane.jobs)

    def depth(self, lane: L) -> int:
        found = self._lanes.get(lane)
        return len(found.jobs) if found is not None else 0

    def push(self, lane: L, job: T, cost: int, weight: int = 1) -> None:
        if cost < 1 or weight < 1:
            raise ValueError("cost and weight are positive")
        held = self._lanes.get(lane)
        if held is None:
            held = self._lanes[lane] = _Lane(weight)
            self._turns.append(lane)
            if len(self._turns) == 1:
                self._arrive()
        held.jobs.append((job, cost))
        self.cost += cost

    def peek(self) -> T | None:
        """The job whose turn it is; the same one until it is popped."""
        return self._lanes[self._turns[0]].jobs[0][0] if self._settle() else None

    def pop(self) -> T | None:
        if not self._settle():
            return None
        name = self._turns[0]
        lane = self._lanes[name]
        job, cost = lane.jobs.popleft()
        lane.credit -= cost
        self.cost -= cost
        if not lane.jobs:
            self._drop(name)
        return job

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out every job that is `unwanted`."""
        removed: list[T] = []
        for name, lane in list(self._lanes.items()):
            kept = deque((job, cost) for job, cost in lane.jobs if not unwanted(job))
            removed += [job for job, _ in lane.jobs if unwanted(job)]
            self.cost -= sum(cost for _, cost in lane.jobs) - sum(cost for _, cost in kept)
            lane.jobs = kept
            if not kept:
                self._drop(name)
        return removed

    def _settle(self) -> bool:
        """Turn the wheel until the lane in front can pay for its first job."""
        if not self._turns:
            return False
        while True:
            lane = self._lanes[self._turns[0]]
            if lane.credit >= lane.jobs[0][1]:
                return True
            self._turns.rotate(-1)
            self._arrive()

    def _arrive(self) -> None:
        """The lane now in front begins its turn."""
        if self._turns:
            lane = self._lanes[self._turns[0]]
            lane.credit += lane.weight * self._quantum

    def _drop(self, name: L) -> None:
        in_front = self._turns[0] == name
        self._turns.remove(name)
        del self._lanes[name]
        if in_front:
            self._arrive()
