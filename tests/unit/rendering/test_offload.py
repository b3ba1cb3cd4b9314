"""Render threads take owners in turn, and none keeps them all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextvars import ContextVar

from rollgrid_rendering.offload import RenderThreads

OWNER: ContextVar[str] = ContextVar("owner", default="")


class Bench:
    """Work that says when it began and ends when it may."""

    def __init__(self, threads: int) -> None:
        self.threads = RenderThreads(threads, OWNER.get)
        self.began: list[str] = []
        self._go = threading.Semaphore(0)

    def ask(self, owner: str, name: str) -> asyncio.Task[str]:
        OWNER.set(owner)
        return asyncio.create_task(self.threads.run(self._work(name)))

    def _work(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.began.append(name)
            assert self._go.acquire(timeout=20)
            return name

        return work

    async def until_began(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.began) < count:
                await asyncio.sleep(0.001)

    def let_end(self, count: int) -> None:
        for _ in range(count):
            self._go.release()


async def test_i8_a_flood_leaves_a_thread_to_others() -> None:
    bench = Bench(2)
    flood = [bench.ask("a", f"a{i}") for i in range(50)]
    await bench.until_began(1)
    other = bench.ask("b", "b0")
    await bench.until_began(2)
    assert bench.began == ["a0", "b0"], "the second thread was free for another owner"
    bench.let_end(51)
    assert await other == "b0"
    assert [await one for one in flood] == [f"a{i}" for i in range(50)]
    bench.threads.close()


async def test_i8_owners_are_served_in_turn() -> None:
    bench = Bench(1)
    tasks = [bench.ask(owner, f"{owner}{i}") for owner in "ab" for i in range(3)]
    tasks.append(bench.ask("c", "c0"))
    await bench.until_began(1)
    bench.let_end(7)
    await asyncio.gather(*tasks)
    assert bench.began == ["a0", "b0", "c0", "a1", "b1", "a2", "b2"]
    bench.threads.close()


async def test_work_without_an_owner_may_take_every_thread() -> None:
    bench = Bench(2)
    tasks = [bench.ask("", f"n{i}") for i in range(3)]
    await bench.until_began(2)
    bench.let_end(3)
    await asyncio.gather(*tasks)
    bench.threads.close()


async def test_work_whose_caller_has_gone_is_not_begun() -> None:
    bench = Bench(1)
    first, gone, last = bench.ask("a", "first"), bench.ask("a", "gone"), bench.ask("a", "last")
    await bench.until_began(1)
    gone.cancel()
    await asyncio.wait({gone})
    bench.let_end(2)
    await asyncio.gather(first, last)
    assert bench.began == ["first", "last"]
    bench.threads.close()
