"""Capacity of one engine as pure bookkeeping: whether one more sample may start.

Beside the slots there are a few express places for interactive samples, taken only when all slots are
busy: however long the samples of a flood run, a call need not wait for one of them to end.  No tenant
has more of them than it leaves free.  A suspect job is begun only when no other is in hand, and nothing
beside it until it has left, so that a crash can be laid at no other door.
"""

from __future__ import annotations

from collections import Counter


class Slots:
    """`total` samples at once, and `express` more.  Keys name jobs; a job is in hand from `admit` to `leave`."""

    def __init__(self, total: int, express: int = 0) -> None:
        if total < 1 or express < 0:
            raise ValueError("an engine needs at least one slot")
        self.total, self.express = total, express
        self._running: Counter[int] = Counter()
        self._tenants: dict[int, str] = {}
        self._hurried: Counter[int] = Counter()
        self._alone: int | None = None

    @property
    def busy(self) -> int:
        return self._running.total()

    @property
    def free(self) -> int:
        """Slots that samples of new jobs could use now."""
        return 0 if self._alone is not None else max(0, self.total - self.busy)

    @property
    def jobs(self) -> int:
        return len(self._tenants)

    def admissible(self, *, alone: bool = False) -> bool:
        """Whether another job may be begun."""
        return not self._tenants if alone else self._alone is None

    def admit(self, key: int, tenant: str = "", *, alone: bool = False) -> None:
        """Take a job in.  Requires `admissible`."""
        if not self.admissible(alone=alone) or key in self._tenants:
            raise ValueError(f"job {key} admitted without room")
        self._tenants[key] = tenant
        if alone:
            self._alone = key

    def room(self, tenant: str = "", *, hurried: bool = False) -> bool:
        """Whether one more sample of this tenant may start; `hurried` ones may use an express place."""
        if self.busy < self.total:
            return True
        used = self._hurried.total()
        own = sum(count for key, count in self._hurried.items() if self._tenants[key] == tenant)
        return hurried and own < self.express - used

    def start(self, key: int) -> None:
        """One sample of `key` starts.  Requires `room`."""
        if key not in self._tenants or self.busy >= self.total + self.express:
            raise ValueError(f"a sample of job {key} started without room")
        if self.busy >= self.total:
            self._hurried[key] += 1
        self._running[key] += 1

    def release(self, key: int) -> None:
        """One running sample of `key` has ended."""
        if self._running[key] < 1:
            raise ValueError(f"job {key} runs nothing")
        self._running[key] -= 1
        if self._hurried[key]:
            self._hurried[key] -= 1

    def leave(self, key: int) -> None:
        """The job is over, whatever it still had running."""
        del self._running[key]
        del self._hurried[key]
        self._tenants.pop(key, None)
        if self._alone == key:
            self._alone = None
