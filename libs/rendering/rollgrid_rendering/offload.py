"""Runs tokenizers in threads, so that a long prompt does not stall the event loop, nor other callers."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class RenderThreads:
    """A few threads for blocking tokenizer work; one hop per request, whatever it contains.

    Waiting work is served owner by owner in turn.  With owners told apart none has all threads at
    once, so another's work begins within one turn of a thread, however much waits.
    """

    def __init__(self, threads: int = 2, owner: Callable[[], str] = lambda: "") -> None:
        """`owner` names whose work is being asked for; one without a name may take every thread."""
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="render")
        self._free, self._threads, self._owner = threads, threads, owner
        self._waiting: dict[str, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = {}
        self._running: Counter[str] = Counter()
        self._turns: dict[str, int] = {}
        self._turn = 0

    async def run(self, work: Callable[[], T]) -> T:
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(self._owner(), deque()).append((work, answer))
        self._start()
        return await answer

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Give free threads to those whose last turn is longest ago."""
        while self._free and (owner := self._next()) is not None:
            waiting = self._waiting[owner]
            work, answer = waiting.popleft()
            if not waiting:
                del self._waiting[owner]
            if not answer.done():  # else its caller has gone
                self._begin(owner, work, answer)

    def _next(self) -> str | None:
        most = max(1, self._threads - 1)
        free = [owner for owner in self._waiting if not owner or self._running[owner] < most]
        return min(free, key=lambda owner: self._turns.get(owner, 0), default=None)

    def _begin(self, owner: str, work: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        self._free -= 1
        self._turn += 1
        self._turns[owner] = self._turn
        self._running[owner] += 1
        started = asyncio.get_running_loop().run_in_executor(self._pool, work)
        started.add_done_callback(lambda done: self._ended(owner, answer, done))

    def _ended(self, owner: str, answer: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._free += 1
        self._running[owner] -= 1
        if not self._running[owner]:
            del self._running[owner]
        if done.cancelled():
            answer.cancel()
        elif (error := done.exception()) is not None:
            if not answer.done():
                answer.set_exception(error)
        elif not answer.done():
            answer.set_result(done.result())
        self._start()
