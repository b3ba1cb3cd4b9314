"""Weighted fair turns over lanes, sample by sample: no tenant's flood starves another, and priorities are shares.

Pure.  Each lane has a clock that a sample moves on by 1 / weight; the lane whose clock is least is next.
A lane that had no work begins at the present: it is next at once, and has no claim on the past.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from rollgrid_contracts.jobs import Priority

L = TypeVar("L")
T = TypeVar("T")

WEIGHTS = {Priority.INTERACTIVE: 16, Priority.NORMAL: 4, Priority.BULK: 1}
REMEMBERED_LANES = 1000


class _Waiting(Generic[T]):
    __slots__ = ("job", "samples")

    def __init__(self, job: T, samples: int) -> None:
        self.job = job
        self.samples = samples


class _Lane(Generic[T]):
    __slots__ = ("clock", "jobs", "weight")

    def __init__(self, weight: int, clock: float) -> None:
        self.weight = weight
        self.clock = clock
        self.jobs: deque[_Waiting[T]] = deque()


class FairQueue(Generic[L, T]):
    """Jobs of many lanes, each of some samples; `take` gives the job whose next sample it is.

    A job stays at the head of its lane until its last sample has been taken.
    """

    def __init__(self) -> None:
        self._lanes: dict[L, _Lane[T]] = {}
        self._left: dict[L, float] = {}
        self._now = 0.0
        self.cost = 0
        """Samples that wait."""

    def __len__(self) -> int:
        return sum(len(lane.jobs) for lane in self._lanes.values())

    def __iter__(self) -> Iterator[T]:
        return (waiting.job for lane in self._lanes.values() for waiting in lane.jobs)

    def depth(self, lane: L) -> int:
        found = self._lanes.get(lane)
        return len(found.jobs) if found is not None else 0

    def push(self, lane: L, job: T, samples: int, weight: int = 1) -> None:
        if samples < 1 or weight < 1:
            raise ValueError("samples and weight are positive")
        held = self._lanes.get(lane)
        if held is None:
            held = self._lanes[lane] = _Lane(weight, max(self._now, self._left.pop(lane, 0.0)))
        held.jobs.append(_Waiting(job, samples))
        self.cost += samples

    def peek(self, may: Callable[[T], bool] = lambda _: True) -> T | None:
        """The job whose turn it is among those at the head of a lane that `may`."""
        name = self._next(may)
        return None if name is None else self._lanes[name].jobs[0].job

    def take(self, may: Callable[[T], bool] = lambda _: True) -> T | None:
        """As `peek`, and one sample of that job waits no longer."""
        name = self._next(may)
        if name is None:
            return None
        lane = self._lanes[name]
        first = lane.jobs[0]
        self._now = max(self._now, lane.clock)
        lane.clock += 1 / lane.weight
        first.samples -= 1
        self.cost -= 1
        if not first.samples:
            lane.jobs.popleft()
            self._drop_if_empty(name)
        return first.job

    def remove(self, unwanted: Callable[[T], bool]) -> list[T]:
        """Take out every job that is `unwanted`, with the samples it still has."""
        removed: list[T] = []
        for name, lane in list(self._lanes.items()):
            gone = [waiting for waiting in lane.jobs if unwanted(waiting.job)]
            if gone:
                removed += [waiting.job for waiting in gone]
                self.cost -= sum(waiting.samples for waiting in gone)
                lane.jobs = deque(waiting for waiting in lane.jobs if not unwanted(waiting.job))
                self._drop_if_empty(name)
        return removed

    def _next(self, may: Callable[[T], bool]) -> L | None:
        ready = [name for name, lane in self._lanes.items() if may(lane.jobs[0].job)]
        return min(ready, key=lambda name: self._lanes[name].clock, default=None)

    def _drop_if_empty(self, name: L) -> None:
        """A lane that empties and comes back at once gains nothing by it."""
        if self._lanes[name].jobs:
            return
        self._left[name] = self._lanes.pop(name).clock
        if len(self._left) > REMEMBERED_LANES:
            self._left = {lane: clock for lane, clock in self._left.items() if clock > self._now}
