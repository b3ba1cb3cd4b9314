"""Weights that are not what their label says take their worker out, and a clean load brings it back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts.checkpoints import Fingerprint, fingerprint_key
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.topology import FINGERPRINTS, SUSPECTS
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.script import fingerprint
from rollgrid_sampler.engines.scripted import ScriptedEngine
from rollgrid_sampler.proofs import Quarantined
from rollgrid_sampler.service import SamplerService
from rollgrid_sampler.settings import SamplerSettings, WeightFault

from .stage import Stage, make_job, sampler, sampler_settings
from .versions import Versions, make_base


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    base = make_base(tmp_path / "base")
    return {
        "model": base,
        "cache": tmp_path / "cache",
        "policy_wait_s": 5.0,
        "heal_s": 0.0,
        "max_loras": 3,
        "cold_check_every": 0,
    }


@contextlib.asynccontextmanager
async def running(nats: NatsSettings, s3: S3Settings, **changes: Any) -> AsyncIterator[asyncio.Task[None]]:
    """A sampler whose end is the test's business; its name is `changes["instance"]`."""
    service = SamplerService(sampler_settings(**changes), nats, s3)
    await service.start()
    work = asyncio.create_task(service.run())
    try:
        yield work
    finally:
        work.cancel()
        await asyncio.wait([work])
        await service.stop()


async def has(stage: Stage, worker: str, version: int, *, confirmed: bool | None = None) -> None:
    async with asyncio.timeout(20):
        while True:
            found = (await stage.workers()).get(worker)
            for loaded in found.loaded if found is not None else ():
                if loaded.version == version and loaded.current and confirmed in (None, loaded.confirmed):
                    return
            await asyncio.sleep(0.05)


async def ended(work: asyncio.Task[None]) -> Quarantined:
    async with asyncio.timeout(20):
        await asyncio.wait([work])
    error = work.exception()
    assert isinstance(error, Quarantined), error
    return error


async def lease(stage: Stage, worker: str) -> WorkerState:
    return (await stage.workers())[worker]


@pytest.mark.parametrize("kind", ["full", "lora"])
async def test_a_label_that_moves_before_the_bytes_leaves_rotation_and_heals(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any], kind: str
) -> None:
    """Alone, without another worker to differ from; no sample of the lying label is recorded."""
    versions = Versions(stage.bus, blobs)
    for number in (1, 2):
        await (versions.full(number) if kind == "full" else versions.lora(number))
    await versions.desire(1)
    options |= {"instance": "w1", "scripted_weight_faults": {2: WeightFault.LABEL_FIRST}, "scripted_token_rate": 300.0}
    jobs = [make_job(f"job{number}", n=4, sampling=SamplingParams(max_tokens=40, seed=1)) for number in range(12)]
    async with running(nats_settings, s3, **options) as work:
        await has(stage, "w1", 1, confirmed=True)
        for job in jobs:
            await stage.submit(job)
        await versions.desire(2)
        wrong = await ended(work)
        said = await lease(stage, "w1")
    assert "version 2" in wrong.message
    assert said.quarantined == wrong.message
    async with running(nats_settings, s3, **options):
        await has(stage, "w1", 2, confirmed=True)
        assert (await lease(stage, "w1")).quarantined is None
        for job in jobs:
            assert versions.lies(job.group_id, (await stage.finished(job)).values()) == []
    starts: Table[Any] = Table(stage.bus, SUSPECTS, object)
    assert all([await starts.get(job.group_id) is None for job in jobs]), "given back is not a start"


async def test_of_two_workers_the_one_with_a_stale_tensor_is_found_and_heals(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any]
) -> None:
    """The faulty one is first, so its fingerprint is the record until the other one has loaded cold."""
    versions = Versions(stage.bus, blobs)
    await versions.full(1)
    await versions.desire(0)
    faulty = {"scripted_weight_faults": {1: WeightFault.STALE_TENSOR}}
    async with (
        running(nats_settings, s3, **options, **faulty, instance="bad") as bad,
        running(nats_settings, s3, **options, instance="good") as good,
    ):
        await has(stage, "bad", 0, confirmed=True)
        await has(stage, "good", 0, confirmed=True)
        await versions.desire(1)
        done, _ = await asyncio.wait([bad, good], return_when=asyncio.FIRST_COMPLETED, timeout=20)
        first = "bad" if bad in done else "good"
        assert "not the one on record" in (await lease(stage, first)).quarantined  # type: ignore[operator]
        async with running(nats_settings, s3, **options, **faulty, instance=first):  # its supervisor starts it anew
            await has(stage, first, 1, confirmed=True)
            if first == "good":
                await ended(bad)
                assert (await lease(stage, "bad")).quarantined
                async with running(nats_settings, s3, **options, **faulty, instance="bad"):
                    await has(stage, "bad", 1, confirmed=True)
            else:
                await has(stage, "good", 1, confirmed=True)
                assert not good.done()


async def test_where_the_record_is_cold_nothing_of_wrong_weights_is_recorded(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any]
) -> None:
    """Samples that end between the load and the look at the record wait for it."""
    versions = Versions(stage.bus, blobs)
    await versions.full(1)
    await versions.desire(0)
    records: Table[Fingerprint] = Table(stage.bus, FINGERPRINTS, Fingerprint)
    key = fingerprint_key("shared", "default", 1, ScriptedEngine(SamplerSettings()).facts.fingerprint_class)
    await records.create(key, Fingerprint(fingerprint=fingerprint(versions.digest(1)), cold=True, worker="w0"))
    options |= {"instance": "w1", "scripted_weight_faults": {1: WeightFault.STALE_TENSOR}, "swap_mode": OnRefresh.KEEP}
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    jobs = [make_job(f"job{number}", n=32, sampling=sampling) for number in range(12)]
    async with running(nats_settings, s3, **options, scripted_token_rate=100.0) as work:
        await has(stage, "w1", 0, confirmed=True)
        for job in jobs:
            await stage.submit(job)
        while not await stage.read():
            await asyncio.sleep(0.01)
        await versions.desire(1)
        await ended(work)
    events = await stage.read()
    assert events
    assert [lie for event in events for lie in versions.lies(event.group_id, event.samples, 0.01)] == []


async def test_a_cold_load_that_differs_from_a_cold_record_never_serves(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any]
) -> None:
    """Here the disk is at fault: the staged files are checked, replaced, and the next start is clean."""
    versions = Versions(stage.bus, blobs)
    await versions.full(1)
    await versions.desire(1)
    async with running(nats_settings, s3, **options, instance="w1"):
        await has(stage, "w1", 1, confirmed=True)
    (staged,) = [path for path in (options["cache"] / "shared" / "default").iterdir() if path.is_dir()]
    (staged / "more.safetensors").write_bytes(b"more 0")
    job = make_job("job", n=2)
    await stage.submit(job)
    async with running(nats_settings, s3, **options, instance="w1") as work:
        await ended(work)
        assert (await lease(stage, "w1")).quarantined
    assert await stage.samples(job.group_id) == {}
    async with running(nats_settings, s3, **options, instance="w1"):
        await has(stage, "w1", 1, confirmed=True)
        assert versions.lies(job.group_id, (await stage.finished(job)).values()) == []


async def test_records_are_confirmed_once_a_cold_load_gave_the_same(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any]
) -> None:
    versions = Versions(stage.bus, blobs)
    await versions.full(1)
    await versions.desire(0)
    records: Table[Fingerprint] = Table(stage.bus, FINGERPRINTS, Fingerprint)
    async with sampler(nats_settings, s3, **options) as one:
        await versions.desire(1)
        await has(stage, one.worker, 1, confirmed=False)
        found = await records.get(fingerprint_key("shared", "default", 1, one.engine.facts.fingerprint_class))
        assert found is not None
        assert (found.value.cold, found.value.worker) == (False, one.worker)
        exact = WeightConstraint(rule=VersionRule.EXACT, value=1)
        pending = make_job("pending", n=1, weights=exact)
        await stage.submit(pending)
        (sample,) = (await stage.finished(pending)).values()
        assert (sample.weight_fingerprint, sample.fingerprint_confirmed) == (found.value.fingerprint, False)
        async with sampler(nats_settings, s3, **options) as joiner:
            await has(stage, joiner.worker, 1, confirmed=True)
            await has(stage, one.worker, 1, confirmed=True)
        confirmed = make_job("confirmed", n=1, weights=exact)
        await stage.submit(confirmed)
        (sample,) = (await stage.finished(confirmed)).values()
        assert (sample.weight_fingerprint, sample.fingerprint_confirmed) == (found.value.fingerprint, True)


@pytest.mark.parametrize("kind", ["full", "lora"])
async def test_alone_a_stale_tensor_is_found_by_the_next_cold_check(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, options: dict[str, Any], kind: str
) -> None:
    versions = Versions(stage.bus, blobs)
    if kind == "full":
        await versions.full(1)
        await versions.desire(0)
    else:
        for number in (1, 2):
            files = {f"{name}.safetensors": f"{name} {number}".encode() for name in ("a", "b")}
            await versions.put(number, {**files, "adapter_config.json": b"{}"}, base=0)
        await versions.desire(1)
    newest = 1 if kind == "full" else 2
    options |= {"instance": "w1", "cold_check_every": 1, "scripted_weight_faults": {newest: WeightFault.STALE_TENSOR}}
    async with running(nats_settings, s3, **options) as work:
        await has(stage, "w1", newest - 1, confirmed=True)
        await versions.desire(newest)
        assert "not the one on record" in (await ended(work)).message
    async with running(nats_settings, s3, **options):
        await has(stage, "w1", newest, confirmed=True)
