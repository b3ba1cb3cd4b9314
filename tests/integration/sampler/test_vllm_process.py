"""The sampler as a process on real vLLM: a job through, weights through S3, and no orphans after SIGKILL."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest
from rollgrid_contracts import codec, ids
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo, PolicyState
from rollgrid_contracts.jobs import SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table

from tests.support.servers import scratch
from tests.support.services import ServiceProcess
from tests.support.tiny_models import TinyModel, tiny_model

from .stage import POOL, Stage, make_job

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
ORPHAN_LIMIT_S = 2.0
READY_S = 240.0


def environment(stack_env: dict[str, str], cache: object) -> dict[str, str]:
    return {
        **stack_env,
        "ROLLGRID_SAMPLER_ENGINE": "vllm",
        "ROLLGRID_SAMPLER_MODEL": str(tiny_model()),
        "ROLLGRID_SAMPLER_SLOTS": "16",
        "ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(32 * 1024 * 1024),
        "ROLLGRID_SAMPLER_CACHE": str(cache),
        "ROLLGRID_SAMPLER_POLICY_WAIT_S": "5",
    }


def state(**changes: object) -> PolicyState:
    fields = {
        "tenant": "shared",
        "policy": "default",
        "pool": POOL,
        "base": "tiny",
        "base_digest": "",
        "tokenizer_prefix": "",
        "tokenizer_digest": "",
        "max_model_len": 512,
        "vocab_size": 512,
        "dtype": "float32",
    }
    return PolicyState(**{**fields, **changes})  # type: ignore[arg-type]


async def publish_version(blobs: Blobs, version: int, spec: TinyModel) -> str:
    """What the SDK and ingest do for a full version: files, then the manifest."""
    data = (tiny_model(spec) / "model.safetensors").read_bytes()
    prefix = f"checkpoints/shared/default/{version}/"
    await blobs.put(prefix + "model.safetensors", data)
    manifest = CheckpointManifest(
        tenant="shared",
        policy="default",
        version=version,
        kind=CheckpointKind.FULL,
        files=(FileInfo(name="model.safetensors", size=len(data), sha256=hashlib.sha256(data).hexdigest()),),
        prefix=prefix,
    )
    assert await blobs.create(prefix + "manifest.json", codec.encode(manifest, codec.JSON))
    return prefix


async def until(condition: Callable[[], bool], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


def descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def kill_leader_only(sampler: ServiceProcess) -> float:
    """SIGKILL to the sampler alone; seconds until none of its processes lived."""
    children = descendants(sampler.pid)
    os.kill(sampler.pid, signal.SIGKILL)
    began = time.monotonic()

    def gone() -> bool:
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

    await until(gone, 20)
    return time.monotonic() - began


async def test_job_weights_and_no_orphans(stage: Stage, stack_env: dict[str, str], blobs: Blobs) -> None:
    policies: Table[PolicyState] = Table(stage.bus, POLICIES, PolicyState)
    revision = await policies.create("shared.default", state())
    with scratch("versions") as cache, scratch("sampler") as folder:
        with ServiceProcess("sampler", folder, environment(stack_env, cache)) as sampler:
            sampler.start().wait_ready(READY_S)
            job = make_job("real", n=8, sampling=SamplingParams(max_tokens=24, seed=7))
            await stage.submit(job)
            found = await stage.finished(job)
            assert {s.status for s in found.values()} == {SampleStatus.SUCCEEDED}
            assert {s.seed for s in found.values()} == {ids.sample_seed(7, index) for index in range(8)}
            assert len({tuple(s.token_ids) for s in found.values()}) == 8
            base = {s.weight_fingerprint for s in found.values()}

            # a version published, desired, applied in place, and asked for by a job that waited for it
            waiting = make_job("waits", n=2, weights=WeightConstraint(rule=VersionRule.MIN, value=1))
            await stage.submit(waiting)
            prefix = await publish_version(blobs, 1, TinyModel(seed=1))
            desired = state(desired=1, desired_prefix=prefix, history=(0, 1), newest=1)
            await policies.update("shared.default", desired, revision)
            found = await stage.finished(waiting, 60)
            assert {(p.version, p.start) for s in found.values() for p in s.version_spans} == {(1, 0)}
            applied = {s.weight_fingerprint for s in found.values()}
            assert len(applied) == 1
            assert applied.isdisjoint(base)
            lease = next(iter((await stage.workers()).values()))
            assert lease.loaded[0].version in (0, 1)

            assert len(descendants(sampler.pid)) >= 2, "an engine core and a worker"
            assert await kill_leader_only(sampler) < ORPHAN_LIMIT_S

        with ServiceProcess("sampler", folder, environment(stack_env, cache)) as sampler:
            sampler.start()  # killed while its engine is only starting
            await until(lambda: bool(engine_processes(sampler.pid)), 60)
            assert await kill_leader_only(sampler) < ORPHAN_LIMIT_S

        with ServiceProcess("sampler", folder, environment(stack_env, cache)) as sampler:
            sampler.start().wait_ready(READY_S)
            facts = sampler.readiness()[1]
            assert (facts["version"], {facts["fingerprint"]}) == (1, applied), "loaded cold = reloaded in place"
            began = time.monotonic()
            assert await asyncio.to_thread(sampler.stop) == 0
            assert time.monotonic() - began < 15


def engine_processes(pid: int) -> list[psutil.Process]:
    return [c for c in descendants(pid) if "resource_tracker" not in " ".join(c.cmdline())]
