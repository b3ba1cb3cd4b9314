"""Verifiers in processes of their own: a pool of workers, a wall deadline for every verdict.

What a verifier does to its process stays there.  A crash or a hang is pinned on the sample that
was being judged; the process group is killed, a new worker is forked, and the call's other samples
go on.  A hang is `verifier_timeout`, an exception or a value that is no finite number is
`verifier_error`; a process that dies is given one more chance (attempt 2), as the cause may have
been the machine's, and is `verifier_error` then.  None of these is ever a number.

All verifiers run here, the built-in ones too: with one exchange per event, `exact_match` does
13,000 to 55,000 samples/s on two cores (`python -m benchmarks.scorer`), several times what the
stream's fsyncs let through, so it needs no path around the isolation.

Verifiers that have not proved quick share all workers but one, so hanging ones cannot take the
whole pool from the quick ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger

from .calls import LOADING, REPORTING, Call, Item, ItemResult, Results, Shared, frame
from .workers import Nursery, NurseryDown, WorkerGone, WorkerProcess

log = get_logger(__name__)

LOAD_S = 60.0
"""A user's verifier may import heavy modules: that is not on the sample's clock."""
REPORT_S = 30.0
QUICK_MS = 100.0
MAX_ATTEMPTS = 2
UNEXPLAINED_DEATHS = 3


class IsolationError(RollgridError):
    """No worker process can be had: the scorer cannot score; nothing is said about the sample."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.NOT_READY, message, boundary=Boundary.SCORER, retry_after_s=1.0)


class Outcome(NamedTuple):
    """The verdict on one sample; `value` is None unless `status.has_value`."""

    status: ScoreStatus
    value: float | None
    detail: str | None
    version: str
    duration_ms: float
    attempt: int
    turn_values: tuple[float | None, ...] = ()
    network: tuple[str, ...] = ()


class Fate(StrEnum):
    DONE = "done"
    DIED = "died"
    HUNG = "hung"


class Ending(NamedTuple):
    """How a conversation ended; `position` is the sample at fault, LOADING, or None when unknown."""

    fate: Fate
    position: int | None = None
    detail: str = ""
    worn: bool = False


class Pool:
    """`size` worker processes, made when needed.  Call `start` first and `close` at the end.

    `environment` is added to that of the workers; `watched` ones have no network (see `watch`).
    """

    def __init__(
        self,
        size: int,
        memory_mb: int = 4096,
        verifiers: Sequence[str] = (),
        *,
        environment: Mapping[str, str] | None = None,
        watched: bool = False,
    ) -> None:
        self.size = size
        self._nursery = Nursery(memory_mb, verifiers, environment=environment or {}, watched=watched)
        self._idle: list[WorkerProcess] = []
        self._all = asyncio.Semaphore(size)
        self._slow = asyncio.Semaphore(max(1, size - 1))
        self._quick: set[str] = set()
        self._numbers = 0
        self.replaced = 0

    async def start(self) -> None:
        """Start the nursery; raises IsolationError."""
        try:
            await self._nursery.ensure()
        except NurseryDown as error:
            raise IsolationError(str(error)) from error

    async def close(self) -> None:
        while self._idle:
            await self._discard(self._idle.pop(), ending=False)
        await self._nursery.close()

    async def judge(
        self, type_: str, params: dict[str, Any], shared: Shared, items: Sequence[Item], timeout_s: float
    ) -> dict[int, Outcome]:
        """An outcome for every item, by position.  Each verdict may take `timeout_s`.

        Raises IsolationError when no worker can be had; nothing is then known of any item.
        """
        job = _Judging(items)
        while job.waiting:
            async with self._turn(type_):
                worker = await self._worker()
                call = Call(self._next_number(), type_, params, shared, tuple(job.waiting))
                ending, how = Ending(Fate.HUNG), ""
                try:
                    ending = await _converse(worker, call, job, timeout_s)
                finally:  # a cancelled conversation leaves its worker in an unknown state
                    if ending.fate is Fate.DONE and not ending.worn:
                        self._idle.append(worker)
                    else:
                        how = await self._discard(worker, ending=ending.fate is Fate.DIED)
                if ending.fate is not Fate.DONE:
                    job.blame(ending, how, timeout_s)
                    self._quick.discard(type_)
        if job.trouble_free:
            self._quick.add(type_)
        else:
            self._quick.discard(type_)
        return job.outcomes

    @contextlib.asynccontextmanager
    async def _turn(self, type_: str) -> Any:
        if type_ in self._quick:
            async with self._all:
                yield
        else:
            async with self._slow, self._all:
                yield

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def _worker(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            await self._discard(worker, ending=True)
        try:
            return await self._nursery.spawn()
        except NurseryDown as error:
            raise IsolationError(str(error)) from error

    async def _discard(self, worker: WorkerProcess, *, ending: bool) -> str:
        """Kill the worker and everything in its session; how it ended, in words."""
        self.replaced += 1
        return await asyncio.shield(asyncio.ensure_future(self._nursery.discard(worker, ending=ending)))


class _Judging:
    """The state of one `judge`: what waits, what came out, how often each sample lost its process."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.waiting: deque[Item] = deque(items)
        self.outcomes: dict[int, Outcome] = {}
        self._slowest_ms = 0.0
        self._blamed = False
        self._attempts: dict[int, int] = {}
        self._unexplained = 0

    @property
    def trouble_free(self) -> bool:
        return not self._blamed and self._slowest_ms < QUICK_MS

    def take(self, results: Sequence[ItemResult]) -> None:
        for result in results:
            attempt = self._attempts.get(result.position, 1)
            self._slowest_ms = max(self._slowest_ms, result.duration_ms)
            self.outcomes[result.position] = _outcome(result, attempt)
        self.waiting = deque(item for item in self.waiting if item.position not in self.outcomes)

    def blame(self, ending: Ending, how: str, timeout_s: float) -> None:
        """End or retry the samples at fault; the others wait before them."""
        self._blamed = True
        guilty = [item for item in self.waiting if ending.position in (item.position, LOADING)]
        if not guilty:
            self._unexplained += 1
            if self._unexplained < UNEXPLAINED_DEATHS:
                return
            guilty = list(self.waiting)
        for item in guilty:
            self.waiting.remove(item)
            attempt = self._attempts.get(item.position, 1)
            if ending.fate is Fate.HUNG:
                what = ending.detail or f"no verdict within {timeout_s:g} s"
                self.outcomes[item.position] = Outcome(
                    ScoreStatus.VERIFIER_TIMEOUT, None, what, "", timeout_s * 1e3, attempt
                )
            elif attempt >= MAX_ATTEMPTS or self._unexplained >= UNEXPLAINED_DEATHS:
                what = f"the verifier's process ended: {ending.detail or how}"
                self.outcomes[item.position] = Outcome(ScoreStatus.VERIFIER_ERROR, None, what, "", 0.0, attempt)
            else:
                self._attempts[item.position] = attempt + 1
                self.waiting.append(item)


def _outcome(result: ItemResult, attempt: int) -> Outcome:
    value = result.value
    if value is None or not math.isfinite(value):
        detail = result.detail or f"the verifier returned {value}"
        return Outcome(
            ScoreStatus.VERIFIER_ERROR, None, detail, result.version, result.duration_ms, attempt, (), result.network
        )
    status = ScoreStatus.INVALID_OUTPUT if result.invalid_output else ScoreStatus.SCORED
    return Outcome(
        status, value, result.detail, result.version, result.duration_ms, attempt, result.turn_values, result.network
    )


async def _converse(worker: WorkerProcess, call: Call, job: _Judging, timeout_s: float) -> Ending:
    """Send the call and collect its results until they are complete, the worker dies or a deadline passes."""
    sent_ns = time.monotonic_ns()
    stall = _Stall()
    reading: asyncio.Task[bytes] | None = None
    sending = asyncio.ensure_future(worker.send(frame(call)))
    try:
        while True:
            if reading is None:
                reading = asyncio.ensure_future(worker.receive())
            progress = worker.cell.read()
            at, since_ns = (
                (progress.position, progress.started_ns) if progress.number == call.number else (LOADING, sent_ns)
            )
            left_s = since_ns / 1e9 + _allowance(at, timeout_s) + stall.since(since_ns) - time.monotonic()
            await stall.wait(reading, left_s)
            if reading.done():
                try:
                    results = msgspec.msgpack.decode(reading.result(), type=Results)
                except (WorkerGone, msgspec.DecodeError, ValueError) as error:
                    return Ending(Fate.DIED, _position(worker, call), str(error))
                reading = None
                if results.number == call.number:
                    job.take(results.results)
                    if results.last:
                        return _complete(job, results)
            elif left_s <= 0 and worker.cell.read() == progress:
                detail = f"loading the verifier took over {LOAD_S:g} s" if at == LOADING else ""
                return Ending(Fate.HUNG, at, detail)
    finally:
        for task in (sending, reading):
            if task is not None and not task.done():
                task.cancel()
        await asyncio.gather(*(task for task in (sending, reading) if task is not None), return_exceptions=True)


class _Stall:
    """Time during which this process did not run either (stopped, machine asleep): on no verifier's clock."""

    SLICE_S = 0.5
    NOTICED_S = 1.0

    def __init__(self) -> None:
        self._stalls: list[tuple[int, float]] = []

    async def wait(self, task: asyncio.Task[bytes], left_s: float) -> None:
        asked_s = min(max(left_s, 0.0) + 0.02, self.SLICE_S)
        began_ns = time.monotonic_ns()
        await asyncio.wait({task}, timeout=asked_s)
        late_s = (time.monotonic_ns() - began_ns) / 1e9 - asked_s
        if late_s > self.NOTICED_S:
            self._stalls.append((began_ns, late_s))

    def since(self, start_ns: int) -> float:
        return sum(late_s for began_ns, late_s in self._stalls if began_ns + int(late_s * 1e9) > start_ns)


def _complete(job: _Judging, results: Results) -> Ending:
    if job.waiting:
        return Ending(Fate.DIED, None, "the worker left samples out")
    return Ending(Fate.DONE, worn=results.worn)


def _position(worker: WorkerProcess, call: Call) -> int | None:
    """The sample a dead worker was at; None when it had not begun the call or was between samples."""
    progress = worker.cell.read()
    return progress.position if progress.number == call.number and progress.position != REPORTING else None


def _allowance(position: int, timeout_s: float) -> float:
    if position == LOADING:
        return LOAD_S
    return REPORT_S if position == REPORTING else timeout_s
