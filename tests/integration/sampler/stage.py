"""A stage for one sampler: jobs in through RG_JOBS, finishes read from RG_SAMPLES, a small ledger's answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from rollgrid_contracts import codec, ids, subjects, topology
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.fleet import GroupStatus, LedgerAnswer, LedgerQuery, WorkerState
from rollgrid_contracts.jobs import Priority, SampleGroup, SamplingParams
from rollgrid_contracts.samples import Sample, SamplesFinished
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.service import SamplerService
from rollgrid_sampler.settings import EngineKind, SamplerSettings

POOL = ids.pool_id("shared.default", "float32", "cpu", "local")


def make_job(name: str = "a", n: int = 8, **changes: Any) -> SampleGroup:
    sampling = changes.pop("sampling", None) or SamplingParams(max_tokens=32, seed=changes.pop("seed", 1))
    prompt = changes.pop("prompt", [5, 6, 7])
    fields: dict[str, Any] = {
        "tenant": "acme",
        "run": "run1",
        "batch_id": ids.batch_id("acme", "run1", name),
        "group_id": ids.group_id("acme", "run1", name, 0),
        "n": n,
        "indexes": tuple(range(n)),
        "policy": "default",
        "pool": POOL,
        "prompt_token_ids": TokenIds.of(prompt),
        "sampling": sampling,
        "created_at": time.time(),
        "deadline": time.time() + 60,
    }
    return SampleGroup(**{**fields, **changes})


class Stage:
    """What surrounds the sampler in a test."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.events: list[tuple[int, str, SamplesFinished]] = []
        self.ended: dict[str, set[int]] = {}
        """Indexes whose sessions have ended, by group, as `ledger` tells."""
        self._read = 0
        self._reading = asyncio.Lock()

    async def submit(self, job: SampleGroup) -> int:
        """Publish as ingest does; the job's RG_JOBS sequence."""
        lane = PoolLane(job.pool, job.priority, job.tenant)
        await ensure_consumer(self.bus, topology.pool_consumer(lane))
        ack = await self.bus.publish(subjects.jobs_pool(*lane), job, headers={"Rg-Group": job.group_id})
        return ack.sequence

    async def read(self) -> list[SamplesFinished]:
        """Every event of RG_SAMPLES so far (as far as the server answers)."""
        with contextlib.suppress(BusError):
            async with self._reading:  # the ledger's answers read too
                await self._read_on()
        return [event for _, _, event in self.events]

    async def _read_on(self) -> None:
        last = (await self.bus.stream_info(topology.SAMPLES.name)).state.last_seq
        while self._read < last:
            stored = await self.bus.stored(topology.SAMPLES.name, self._read + 1)
            self._read += 1
            if stored is not None:
                assert stored.data is not None
                data = await self.bus.resolve(stored.data, stored.headers)
                self.events.append((self._read, str(stored.subject), codec.decode(data, SamplesFinished)))

    async def samples(self, group_id: str) -> dict[int, Sample]:
        """First finish by index, as the ledger folds."""
        found: dict[int, Sample] = {}
        for event in await self.read():
            if event.group_id == group_id:
                for sample in event.samples:
                    found.setdefault(sample.index, sample)
        return found

    async def finished(self, job: SampleGroup, timeout_s: float = 20.0) -> dict[int, Sample]:
        """Wait until every index of the job has ended."""
        async with asyncio.timeout(timeout_s):
            while set(found := await self.samples(job.group_id)) != set(job.indexes):
                await asyncio.sleep(0.02)
        return found

    async def pending(self, lane: PoolLane) -> tuple[int, int]:
        """(jobs delivered and not acked, jobs not delivered) of a lane."""
        consumer = topology.pool_consumer(lane)
        info = await self.bus.js.consumer_info(consumer.stream, consumer.durable)
        return int(info.num_ack_pending or 0), int(info.num_pending or 0)

    async def clean(self, lane: PoolLane | None = None, timeout_s: float = 15.0) -> None:
        """Wait until the lane has neither open deliveries nor waiting jobs."""
        lane = lane or PoolLane(POOL, Priority.NORMAL, "acme")
        async with asyncio.timeout(timeout_s):
            while await self.pending(lane) != (0, 0):
                await asyncio.sleep(0.02)

    async def workers(self) -> dict[str, WorkerState]:
        table: Table[WorkerState] = Table(self.bus, topology.WORKERS, WorkerState)
        return {key: found.value for key, found in (await table.items()).items()}

    @contextlib.asynccontextmanager
    async def ledger(self) -> AsyncIterator[list[str]]:
        """Answers queries out of RG_SAMPLES; gives the list of groups asked for."""
        asked: list[str] = []

        async def answer(query: LedgerQuery, reply: str) -> None:
            await self.read()
            statuses = []
            for group_id in query.group_ids:
                asked.append(group_id)
                done: dict[int, int] = {}
                turns: dict[int, dict[int, int]] = {}
                for sequence, _, event in self.events:
                    if event.group_id == group_id:
                        for sample in event.samples:
                            if event.session is None:
                                done.setdefault(sample.index, sequence)
                            else:
                                turns.setdefault(sample.index, {}).setdefault(sample.turn, sequence)
                ended = tuple(self.ended.get(group_id, ()))
                statuses.append(GroupStatus(group_id=group_id, known=True, done=done, turns=turns, ended=ended))
            await self.bus.respond(reply, LedgerAnswer(epoch=1, folded_to=1, groups=tuple(statuses)))

        subscription = await self.bus.subscribe(subjects.LEDGER_QUERY, LedgerQuery, answer)
        try:
            yield asked
        finally:
            await subscription.unsubscribe()


def sampler_settings(**changes: Any) -> SamplerSettings:
    fields: dict[str, Any] = {
        "engine": EngineKind.SCRIPTED,
        "policy_wait_s": 0.0,
        "drain_s": 6.0,
        "refuse_delay_s": 0.2,
    }
    return SamplerSettings(**{**fields, **changes})


@contextlib.asynccontextmanager
async def sampler(nats: NatsSettings, s3: S3Settings, **changes: Any) -> AsyncIterator[SamplerService]:
    """A sampler inside this loop, ready; drained and stopped at the end."""
    redis = changes.pop("redis", None)
    service = SamplerService(sampler_settings(**changes), nats, s3, redis)
    await service.start()
    work = asyncio.create_task(service.run())
    try:
        await until(lambda: not service._engine_problem, work)
        while await service.problems():
            if work.done():
                work.result()
            await asyncio.sleep(0.01)
        yield service
        if not work.done():
            await service.drain()
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work
        await service.stop()


async def until(condition: Callable[[], bool], work: asyncio.Task[None], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            if work.done():
                work.result()
            await asyncio.sleep(0.01)
