"""Who still needs what is loaded: requests on LoRA versions, and groups that one version must make."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Uses:
    """Counts by version."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._freed = asyncio.Event()

    @contextmanager
    def of(self, version: int) -> Iterator[None]:
        self._counts[version] += 1
        try:
            yield
        finally:
            self._counts[version] -= 1
            if not self._counts[version]:
                del self._counts[version]
                self._freed.set()

    def __contains__(self, version: int) -> bool:
        return self._counts[version] > 0

    async def freed(self, version: int, timeout_s: float) -> bool:
        """Whether nobody needed the version any more within that time."""
        try:
            async with asyncio.timeout(timeout_s):
                while version in self:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            return False
        return True
