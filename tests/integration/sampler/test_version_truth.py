"""Every token is what the bytes of its version make, however fast the versions change (issue 4, version truth)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from pathlib import Path

import pytest
from prometheus_client import REGISTRY
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.base import GenerationRequest
from rollgrid_sampler.engines.scripted import ScriptedEngine
from rollgrid_sampler.settings import EngineKind, SamplerSettings, WeightFault

from .stage import Stage, make_job, sampler
from .versions import Versions, full, make_base

SAMPLES = 20_000
GROUP = 200
SWAP_S = 0.05


def swaps() -> Counter[str]:
    """Versions applied so far, by mode."""
    found: Counter[str] = Counter()
    for metric in REGISTRY.collect():
        for sample in metric.samples:
            if sample.name == "rollgrid_sampler_swaps_total" and sample.labels["outcome"] == "applied":
                found[sample.labels["mode"]] += int(sample.value)
    return found


@pytest.mark.slow
async def test_a21_a43_no_token_lies_about_its_version_under_swaps_every_50_ms(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, blobs: Blobs, tmp_path: Path
) -> None:
    versions = Versions(stage.bus, blobs)
    for number in range(1, 17):  # full, three adapters on it, full, …
        base = 4 * ((number - 1) // 4) + 1
        await (versions.full(number) if number == base else versions.lora(number, base))
    await versions.desire(1)
    modes = itertools.cycle([None, *OnRefresh])
    rules = itertools.cycle([WeightConstraint(), WeightConstraint(rule=VersionRule.MAX_STALENESS, value=20)])
    jobs = [
        make_job(
            f"truth-{number}",
            n=GROUP,
            on_refresh=next(modes),
            weights=next(rules),
            sampling=SamplingParams(max_tokens=40, seed=number, frequency_penalty=number % 3 // 2),
            deadline=time.time() + 600,
        )
        for number in range(SAMPLES // GROUP)
    ]
    before = swaps()
    options = {
        "slots": 128,
        "coalesce_samples": 100,
        "coalesce_s": 0.2,
        "scripted_token_rate": 400.0,
        "max_loras": 3,
        "policy_wait_s": 5.0,
    }
    async with sampler(nats_settings, s3, model=make_base(tmp_path / "base"), cache=tmp_path / "cache", **options):
        swapping = asyncio.create_task(_swap(versions))
        for job in jobs:
            await stage.submit(job)
        async with asyncio.timeout(120):
            while sum(len(event.samples) for event in await stage.read()) < SAMPLES:
                await asyncio.sleep(0.1)
        swapping.cancel()
    lies: list[str] = []
    seams: Counter[int] = Counter()
    for event in await stage.read():
        lies += versions.lies(event.group_id, event.samples)
        seams.update(len(sample.version_spans) for sample in event.samples)
    done = {(event.group_id, sample.index) for event in await stage.read() for sample in event.samples}
    applied = swaps() - before
    print(f"swaps {dict(applied)}; spans per sample {dict(seams)}")
    assert len(done) == SAMPLES
    assert lies == [], f"{len(lies)} lies"
    assert applied["wait"] >= 5, applied
    assert applied["lora"] >= 10, applied
    assert sum(count for spans, count in seams.items() if spans > 1) >= 20, f"too few crossed a seam: {seams}"


async def test_the_checker_catches_a_label_that_moves_before_the_bytes(
    stage: Stage, blobs: Blobs, tmp_path: Path
) -> None:
    """Without the proofs, that is: a sampler refuses such samples (`test_quarantine`)."""
    versions, folder = Versions(stage.bus, blobs), tmp_path / "1"
    await versions.full(1)
    folder.mkdir()
    for name, data in full(1).items():
        (folder / name).write_bytes(data)
    for fault in (None, WeightFault.LABEL_FIRST, WeightFault.STALE_TENSOR):
        faults = {} if fault is None else {1: fault}
        engine = ScriptedEngine(SamplerSettings(engine=EngineKind.SCRIPTED, scripted_weight_faults=faults))
        await engine.start(0, make_base(tmp_path / f"base-{fault}"))
        first = await _sample(engine)
        await engine.load_version(1, folder, OnRefresh.WAIT)
        second = await _sample(engine)
        assert versions.lies("g", [first]) == []
        assert bool(versions.lies("g", [second])) is (fault is not None), fault
        assert second.version_spans[0].version == 1


async def _swap(versions: Versions) -> None:
    for number in itertools.cycle(range(1, 17)):
        await versions.desire(number)
        await asyncio.sleep(SWAP_S)


async def _sample(engine: ScriptedEngine) -> Sample:
    request = GenerationRequest(
        request_id="r", sample="g.0", index=0, prompt_token_ids=[5], sampling=SamplingParams(max_tokens=20), seed=3
    )
    made = await engine.generate(request)
    return Sample(
        index=0,
        status=SampleStatus.SUCCEEDED,
        finish_reason=FinishReason.LENGTH,
        seed=3,
        token_ids=TokenIds.of(made.token_ids),
        logprobs=Floats(made.logprobs.tobytes()),
        version_spans=made.version_spans,
        weight_fingerprint=engine.loaded.fingerprint,
    )
