"""What there is of a long turn, in Redis while it is sampled: whoever takes the turn over goes on behind it.

Fenced by the job's sequence and the attempt: a worker that comes back late writes nothing over its successor's.
A loss costs tokens that are sampled again, never an answer; so Redis is only ever waited for beside the engine, and
where it is away nothing happens but a count.  Turns too short to lose much, and those that cannot be gone on with
exactly, are not kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from rollgrid_contracts import codec, keys
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import Resume, SampleGroup
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.state import Script, State, StateError

from . import metrics
from .engines.base import Delta, EngineDead, GenerationRequest
from .generation import Told
from .jobs import HeldJob
from .resume import continuable
from .streaming import Pace

log = get_logger(__name__)
TOMBSTONE_S = 600.0
"""The fence of a finished turn stays so long, or until the deadline, against whoever comes back."""
LEAVE_S = 0.5
"""A turn that is given back waits so long for its last checkpoint."""

KEEP, TAKE, END = "keep", "take", "end"
SCRIPT = """
local held = redis.call('HMGET', KEYS[1], 'fence', 'attempt', 'prompt', 'resume')
local fence, attempt = tonumber(held[1] or 0), tonumber(held[2] or 0)
local my_fence, my_attempt = tonumber(ARGV[2]), tonumber(ARGV[3])
if fence > my_fence or (fence == my_fence and attempt > my_attempt) then return {0} end
redis.call('HSET', KEYS[1], 'fence', ARGV[2], 'attempt', ARGV[3])
if ARGV[1] == 'keep' then redis.call('HSET', KEYS[1], 'prompt', ARGV[5], 'resume', ARGV[6]) end
if ARGV[1] == 'end' then redis.call('HDEL', KEYS[1], 'prompt', 'resume') end
redis.call('PEXPIREAT', KEYS[1], ARGV[4])
if ARGV[1] == 'take' and held[3] == ARGV[5] then return {1, held[4]} end
return {1}
"""
"""KEYS: the partial.  ARGV: keep, take or end; fence, attempt, expiry in UNIX ms; prompt digest, packed `Resume`.

0 = a newer dispatch has it; else 1, and to `take` what was kept of the same prompt.
"""


class Partials:
    """Of one worker; without `state` nothing is kept."""

    def __init__(self, state: State | None, pace: Pace) -> None:
        self._script: Script | None = state.script(SCRIPT) if state is not None else None
        self._pace = pace
        self._touched: set[tuple[int, str]] = set()

    async def taken(self, held: HeldJob) -> Resume | None:
        """What an earlier owner of the turn kept; it keeps nothing from now on."""
        if self._script is None or not _keepable(held.job):
            return None
        try:
            packed = (await self._call(self._script, held, TAKE))[1:]
            found = codec.decode(packed[0], Resume) if packed else None
        except StateError as error:
            metrics.PARTIALS.labels("failed").inc()
            log.warning("partial_unreadable", error=error.message)
            return None
        except msgspec.DecodeError as error:
            log.warning("partial_undecodable", error=repr(error))
            return None
        return found if found is not None and found.index in held.job.indexes else None

    @contextlib.asynccontextmanager
    async def keeping(self, held: HeldJob, request: GenerationRequest) -> AsyncIterator[Keeper | None]:
        """Around the generation: `Keeper.take` is given its portions.  None where nothing is worth keeping."""
        rest = request.sampling.max_tokens - len(request.sent.token_ids)
        if self._script is None or not _keepable(held.job) or rest <= self._pace.tokens:
            yield None
            return
        keeper = Keeper(self, held, request, self._pace)
        writing = asyncio.create_task(keeper.run())
        try:
            yield keeper
        except (asyncio.CancelledError, EngineDead):
            await _stopped(writing)
            if not held.cancelled and not held.aborted and held.seconds_left() > 0:
                await keeper.leave()  # it is given back
            raise
        finally:
            await _stopped(writing)

    async def keep(self, held: HeldJob, attempt: int, progress: Resume) -> bool:
        """Whether it may be kept on: not once somebody newer has the turn."""
        if self._script is None:
            return False
        try:
            accepted = (await self._call(self._script, held, KEEP, codec.encode(progress), attempt=attempt))[0]
        except StateError as error:
            metrics.PARTIALS.labels("failed").inc()
            log.debug("partial_not_kept", error=error.message)
            return True
        metrics.PARTIALS.labels("stored" if accepted else "refused").inc()
        return bool(accepted)

    async def over(self, held: HeldJob) -> None:
        """The turn's finish is durable: only its fence stays."""
        if self._script is None or (held.sequence, held.job.call_id) not in self._touched:
            return
        self._touched.discard((held.sequence, held.job.call_id))
        try:
            await self._call(self._script, held, END)
        except StateError as error:  # it expires by itself
            log.debug("partial_not_dropped", error=error.message)

    def forget(self, held: HeldJob) -> None:
        """The turn has left this worker."""
        self._touched.discard((held.sequence, held.job.call_id))

    async def _call(
        self, script: Script, held: HeldJob, what: str, packed: bytes = b"", *, attempt: int = 0
    ) -> list[Any]:
        job = held.job
        expires = min(job.deadline, time.time() + TOMBSTONE_S) if what == END else job.deadline
        if what != END:
            self._touched.add((held.sequence, job.call_id))
        found: list[Any] = await script(
            [keys.partial(job.tenant, job.call_id)],
            what,
            held.sequence,
            attempt or held.attempt,
            int(expires * 1000),
            hashlib.blake2b(job.prompt_token_ids.packed, digest_size=16).hexdigest(),
            packed,
        )
        return found


class Keeper:
    """One turn under way.  `take` notes and returns; `run` writes the newest there is, never two at once."""

    def __init__(self, partials: Partials, held: HeldJob, request: GenerationRequest, pace: Pace) -> None:
        self._partials, self._held, self._pace = partials, held, pace
        self._index, self._attempt = request.index, held.attempt
        self._told = Told(request.sent, None)
        self._kept = 0
        self._some, self._enough = asyncio.Event(), asyncio.Event()

    def take(self, delta: Delta) -> None:
        self._told.take(delta)
        tokens = len(self._told.token_ids)
        self._kept = min(self._kept, tokens)  # it may have started again
        if tokens > self._kept:
            self._some.set()
        if tokens - self._kept >= self._pace.tokens:
            self._enough.set()

    async def run(self) -> None:
        """Every `pace.tokens` tokens, and every `pace.interval_s` while any come; until cancelled or overtaken."""
        while True:
            await self._some.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.interval_s):
                    await self._enough.wait()
            self._some.clear()
            self._enough.clear()
            if not await self._keep():
                log.info("turn_has_another_owner")
                return

    async def leave(self) -> None:
        """Once more, for whoever takes the turn over."""
        if len(self._told.token_ids) > self._kept:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await self._keep()

    async def _keep(self) -> bool:
        progress = self._progress()
        self._kept = len(progress.token_ids)
        return await self._partials.keep(self._held, self._attempt, progress)

    def _progress(self) -> Resume:
        told = self._told
        return Resume(
            index=self._index,
            token_ids=TokenIds.of(told.token_ids),
            logprobs=Floats(told.logprobs.tobytes()),
            spans=tuple(told.spans),
        )


async def _stopped(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _keepable(job: SampleGroup) -> bool:
    return job.session is not None and continuable(job.sampling)
