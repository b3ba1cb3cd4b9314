"""Whose event is taken up next: every key (tenant and webhook) has its share, so a slow one stops nobody else.

Pure.  What is beyond a key's share goes back to the stream for about as long as the key needs for what
is before it: its events come again as fast as they can be worked on, not faster.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST_GUESS_S = 1.0
MIN_DELAY_S = 0.25
MAX_DELAY_S = 60.0
MAX_KEYS = 1024


@dataclass(slots=True)
class _Share:
    held: int = 0
    seconds: float = FIRST_GUESS_S
    returns: list[float] = field(default_factory=list)
    """A heap: when the events sent back will come again."""


class Turns:
    """`total` events held together, `per_key` of one key, of which `running` are worked on at a time."""

    def __init__(self, total: int, per_key: int, running: int) -> None:
        self._total, self._per_key, self._running = total, per_key, running
        self._shares: dict[Hashable, _Share] = {}
        self.held = 0

    def admit(self, key: Hashable, now: float) -> bool:
        """Hold one more event of `key`, or not.  A key that holds none is always let in."""
        if len(self._shares) > MAX_KEYS:
            self._forget_idle(now)
        share = self._shares.setdefault(key, _Share())
        keys = sum(1 for other in self._shares.values() if other.held) + (not share.held)
        fair = min(self._per_key, max(1, self._total // (keys + 1)))
        if share.held and (share.held >= fair or self.held >= self._total):
            return False
        share.held += 1
        self.held += 1
        return True

    def leave(self, key: Hashable, seconds: float | None) -> None:
        """An event of `key` has ended, after so many seconds of work (None = none was done)."""
        share = self._shares[key]
        share.held -= 1
        self.held -= 1
        if seconds is not None:
            share.seconds += 0.2 * (seconds - share.seconds)

    def holds(self, key: Hashable) -> int:
        """Events of `key` held now."""
        share = self._shares.get(key)
        return 0 if share is None else share.held

    def delay_s(self, key: Hashable, now: float) -> float:
        """When an event that was not admitted shall come again."""
        share = self._shares[key]
        while share.returns and share.returns[0] <= now:
            heapq.heappop(share.returns)
        before = len(share.returns) + share.held
        delay = min(MAX_DELAY_S, max(MIN_DELAY_S, before * share.seconds / self._running * random.uniform(0.5, 1.0)))
        heapq.heappush(share.returns, now + delay)
        return delay

    def _forget_idle(self, now: float) -> None:
        idle = [
            key for key, share in self._shares.items() if not share.held and not any(at > now for at in share.returns)
        ]
        for key in idle:
            del self._shares[key]
