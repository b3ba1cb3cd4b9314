"""Plays ingest, samplers and scorers against a real logger, and reads what comes out from outside."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from nats.js.api import StreamState
from rollgrid_contracts import codec, ids, subjects, topology
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.columns import MANIFEST_PREFIX
from rollgrid_contracts.fleet import LedgerAnswer, LedgerQuery
from rollgrid_contracts.jobs import Priority, SampleGroup, SamplingParams
from rollgrid_contracts.samples import GroupsCancelled, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerKind, ScorerSpec, ScoreStatus
from rollgrid_contracts.subjects import PoolLane
from rollgrid_contracts.topology import Header
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime import archive_turns
from rollgrid_runtime.archive import decode_manifest
from rollgrid_runtime.archive_rows import from_parquet
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus, Outgoing
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.reading import read_after
from rollgrid_trajectory_logger.service import TrajectoryLogger
from rollgrid_trajectory_logger.settings import TrajectoryLoggerSettings

TENANT, RUN, POOL = "acme", "run-1", "ppool"
LANE = PoolLane(POOL, Priority.NORMAL, TENANT)
SCORER = ScorerSpec(name="exact", type="exact")


def make_job(position: int, n: int = 4, *, key: str = "k", run: str = RUN, **fields: Any) -> SampleGroup:
    base: dict[str, Any] = {
        "tenant": TENANT,
        "run": run,
        "batch_id": ids.batch_id(TENANT, run, key),
        "group_id": ids.group_id(TENANT, run, key, position),
        "position": position,
        "n": n,
        "indexes": tuple(range(n)),
        "policy": "tiny",
        "pool": POOL,
        "prompt_token_ids": TokenIds.of(range(position % 7 + 1)),
        "sampling": SamplingParams(max_tokens=8),
        "created_at": time.time(),
        "deadline": time.time() + 300,
        "metadata": {"position": position},
    }
    return SampleGroup(**base | fields)


def make_sample(
    index: int, *, attempt: int = 1, status: SampleStatus = SampleStatus.SUCCEEDED, tokens: int = 8
) -> Sample:
    return Sample(
        index=index,
        attempt=attempt,
        status=status,
        token_ids=TokenIds.of(range(tokens)),
        logprobs=Floats.of([-0.25] * tokens),
        text="x" * tokens,
    )


class Driver:
    """Ingest's, the samplers' and the scorers' side of the streams."""

    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self.bus, self.blobs = bus, blobs

    async def open_lane(self) -> None:
        await ensure_consumer(self.bus, topology.pool_consumer(LANE))

    async def submit(self, jobs: Iterable[SampleGroup]) -> list[int]:
        items = [Outgoing(subjects.jobs_pool(POOL, Priority.NORMAL, TENANT), job, {}) for job in jobs]
        return await self.bus.publish_batch(items)

    async def finish(self, job: SampleGroup, seq: int, samples: Iterable[Sample] | None = None) -> int:
        """Publish finishes; the RG_SAMPLES sequence."""
        todo = ScorerKind.VERIFIER if job.scorers else ScorerKind.DONE
        event = SamplesFinished(
            tenant=job.tenant,
            run=job.run,
            batch_id=job.batch_id,
            group_id=job.group_id,
            n=job.n,
            policy=job.policy,
            job_seq=seq,
            engine="scripted",
            samples=tuple(samples if samples is not None else (make_sample(index) for index in job.indexes)),
        )
        # once, also where a restart swallows the answer: whoever scores names the sequence that is stored
        return (await self.bus.publish(subjects.samples(todo, job.tenant), event, msg_id=ids.new_key())).sequence

    async def score(self, job: SampleGroup, seq: int, finished_seq: int, value: float = 1.0) -> None:
        results = tuple(
            SampleScores(index=i, scores=(Score(scorer="exact", status=ScoreStatus.SCORED, value=value),))
            for i in job.indexes
        )
        event = SamplesScored(
            tenant=job.tenant,
            run=job.run,
            group_id=job.group_id,
            job_seq=seq,
            finished_seq=finished_seq,
            results=results,
        )
        await self.bus.publish(subjects.samples(ScorerKind.DONE, job.tenant), event)

    async def cancel(self, job: SampleGroup, *, whole_batch: bool = False) -> None:
        event = GroupsCancelled(
            tenant=job.tenant,
            run=job.run,
            batch_id=job.batch_id,
            group_ids=() if whole_batch else (job.group_id,),
            job_seq=(await self.state(topology.JOBS.name)).last_seq,
        )
        await self.bus.publish(subjects.samples(ScorerKind.DONE, job.tenant), event)

    async def ask(self, within_s: float = 20.0, **query: Any) -> LedgerAnswer:
        deadline = time.monotonic() + within_s
        while True:
            try:
                return await self.bus.request(subjects.LEDGER_QUERY, LedgerQuery(**query), LedgerAnswer, 1.0)
            except BusError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.05)

    async def state(self, stream: str) -> StreamState:
        """The stream's state, asked again when the server was away."""
        for _ in range(10):
            try:
                return (await self.bus.stream_info(stream)).state
            except BusError:
                await asyncio.sleep(0.1)
        return (await self.bus.stream_info(stream)).state

    # -- what came out ------------------------------------------------------------------------

    async def closes(self, subject: str = subjects.TRAJECTORIES_ALL) -> list[tuple[int, GroupClosed]]:
        found: list[tuple[int, GroupClosed]] = []
        after = 0
        while True:
            page = await read_after(self.bus, topology.TRAJECTORIES.name, subject, after, 500)
            for message in page.messages:
                after = message.sequence
                if subjects.is_rewards(message.subject):
                    continue
                body = await self.bus.resolve(message.data, message.headers)
                closed = codec.decode(body, GroupClosed)
                assert message.headers[Header.GROUP.value] == closed.group_id
                found.append((message.sequence, closed))
            if not page.pending:
                return found

    async def wait_closed(self, count: int, within_s: float = 30.0) -> list[tuple[int, GroupClosed]]:
        deadline = time.monotonic() + within_s
        while True:
            closed = (await self.state(topology.TRAJECTORIES.name)).last_seq
            if closed >= count:
                return await self.closes()
            assert time.monotonic() < deadline, f"{closed} of {count} groups closed"
            await asyncio.sleep(0.05)

    async def wait_stored(self, stream: str, count: int, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while (stored := (await self.state(stream)).messages) != count:
            assert time.monotonic() < deadline, f"{stream} holds {stored} messages, not {count}"
            await asyncio.sleep(0.05)

    async def ack_lane(self) -> None:
        """Acknowledge everything in the pool's durable, as samplers do."""
        puller = self.bus.puller(topology.pool_consumer(LANE))
        while batch := await puller.fetch(500, 0.5):
            for delivery in batch:
                await delivery.ack()
        await puller.close()

    async def archived(self) -> list[tuple[int, GroupClosed]]:
        """Every group in the archive, read by manifests alone; checks ranges and digests on the way."""
        found: list[tuple[int, GroupClosed]] = []
        behind = 0
        for key in await self.blobs.keys(MANIFEST_PREFIX):
            manifest = decode_manifest(await self.blobs.get(key) or b"")
            assert manifest.first == behind + 1, "manifests overlap or leave a hole"
            behind = manifest.last
            if manifest.key is None:
                continue
            data = await self.blobs.get(manifest.key)
            assert data is not None
            assert (len(data), hashlib.sha256(data).hexdigest()) == (manifest.size, manifest.sha256)
            groups = from_parquet(data)
            if manifest.turns is not None:
                turns = await self.blobs.get(manifest.turns.key)
                assert turns is not None
                assert hashlib.sha256(turns).hexdigest() == manifest.turns.sha256
                groups = archive_turns.joined(groups, archive_turns.from_parquet(turns, [s for s, _ in groups]))
            assert [(c.sequence, c.group_id) for c in manifest.closes] == [(s, g.group_id) for s, g in groups]
            found += groups
        return found

    async def wait_archived(self, count: int, within_s: float = 40.0) -> list[tuple[int, GroupClosed]]:
        deadline = time.monotonic() + within_s
        while True:
            found = await self.archived()
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, f"{len(found)} of {count} groups archived"
            await asyncio.sleep(0.2)


def settings(**changes: Any) -> TrajectoryLoggerSettings:
    return TrajectoryLoggerSettings(
        **{"archive_age_s": 0.3, "retain_every_s": 0.5, "retain_step": 1, "purge_every_s": 0.5} | changes
    )


@asynccontextmanager
async def logger_in_process(
    monkeypatch_env: dict[str, str], monkeypatch: Any, **changes: Any
) -> AsyncIterator[TrajectoryLogger]:
    for name, value in monkeypatch_env.items():
        monkeypatch.setenv(name, value)
    service = TrajectoryLogger(settings(**changes))
    await service.start()
    work = asyncio.create_task(service.run())
    try:
        yield service
        if work.done():
            work.result()
        await service.drain()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await service.stop()
