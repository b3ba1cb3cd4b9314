"""What new weights cost: the pause over the engine's own load, tokens lost, publish to first new token.

    python -m benchmarks.refresh [--models tiny,smollm2] [--refreshes 10] [--rounds 3] [--publishes 5]

The first two on an engine in this process, in one run: of each refresh how long generation was paused
(from the end of the steps that ran, whose tokens count; with the waits between steps by which a load beside
generation was helped along), over what vLLM's own load of the same weights takes on the
same engine when nothing else runs; and the tokens a second of the same work without a refresh and
with ten of them (running samples go on under the new weights), in turns.  The third through the whole
stack: from the call of `weights.publish` to the first token that the new version made, while samples
without a constraint are generated all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rollgrid import Client

from benchmarks.direct_engine import prompt
from benchmarks.engine_overhead import Subject, plan, subject
from benchmarks.report import Budget, Result, print_result, save
from tests.support.stack import POLICY, stack

SLOTS = 32
MIB = 2**20
LIVE_S = 120.0


def drifted(folder: Path, number: int) -> dict[str, Any]:
    """The folder's tensors as a later training step would have them: every one has moved a little."""
    import torch
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(number)
    tensors = {
        name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }
    return {
        name: (tensor.float() * (1 + 0.002 * torch.randn(tensor.shape, generator=generator))).to(tensor.dtype)
        for name, tensor in tensors.items()
    }


def version_folder(base: Path, number: int, root: Path) -> Path:
    from safetensors.torch import save_file

    folder = root / str(number)
    folder.mkdir()
    shutil.copy(base / "config.json", folder)
    save_file(drifted(base, number), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Work:
    """The same samples every time, at full concurrency."""

    def __init__(self, engine: Any, chosen: Subject) -> None:
        self._engine, self._chosen = engine, chosen
        self.ended = 0
        self._moved = asyncio.Event()

    @property
    def samples(self) -> int:
        return self._chosen.work[SLOTS]

    async def _one(self, name: str, number: int) -> int:
        from rollgrid_contracts import ids
        from rollgrid_contracts.jobs import SamplingParams
        from rollgrid_sampler.engines.base import GenerationRequest

        request = GenerationRequest(
            request_id=f"{name}-{number}",
            sample=f"{name}-{number}",
            index=0,
            prompt_token_ids=prompt(number),
            sampling=SamplingParams(max_tokens=self._chosen.tokens, ignore_eos=True),
            seed=ids.sample_seed(number, 0),
            cache_salt=name,
        )
        result = await self._engine.generate(request)
        self.ended += 1
        self._moved.set()
        return len(result.token_ids)

    async def tokens_per_s(self, name: str) -> float:
        places = asyncio.Semaphore(SLOTS)

        async def one(number: int) -> int:
            async with places:
                return await self._one(name, number)

        self.ended, began = 0, time.perf_counter()
        counts = await asyncio.gather(*(one(number) for number in range(self.samples)))
        return sum(counts) / (time.perf_counter() - began)

    async def reached(self, ended: int) -> None:
        while self.ended < ended:
            self._moved.clear()
            await self._moved.wait()


async def on_the_engine(chosen: Subject, folders: list[Path], rounds: int) -> dict[str, float]:
    from rollgrid_contracts.jobs import OnRefresh
    from rollgrid_sampler.engines.vllm import Refresh, VllmEngine
    from rollgrid_sampler.settings import SamplerSettings

    base = Path(chosen.folder)
    settings = SamplerSettings(
        model=base, dtype=chosen.dtype, slots=SLOTS, max_model_len=2048, kv_cache_bytes=512 * MIB
    )
    engine, refreshes, still, moving = VllmEngine(settings), list[Refresh](), list[float](), list[float]()
    await engine.start(0, base)
    work, version = Work(engine, chosen), 0

    async def refresh_all() -> None:
        nonlocal version
        for number, folder in enumerate(folders):
            await work.reached(number * work.samples // len(folders))
            version += 1
            await engine.load_version(version, folder, OnRefresh.KEEP)
            assert engine.last_refresh is not None
            refreshes.append(engine.last_refresh)

    try:
        for number in range(rounds + 1):
            alone = await work.tokens_per_s(f"still{number}")
            work.ended = 0
            refreshing = asyncio.create_task(refresh_all())
            with_them = await work.tokens_per_s(f"moving{number}")
            await refreshing
            if number:  # the first round warms up
                still.append(alone)
                moving.append(with_them)
            else:
                refreshes.clear()
        own = await own_loads(engine, folders * rounds)
    finally:
        await engine.close()
    tokens = work.samples * chosen.tokens
    lost = [(tokens / there - tokens / without) / len(folders) for without, there in zip(still, moving, strict=True)]
    return {
        "own_load_ms": 1e3 * statistics.median(own),
        "prepared_ms": 1e3 * statistics.median(r.prepared_s for r in refreshes),
        "helped_ms": 1e3 * statistics.median(r.helped_s for r in refreshes),
        "drain_ms": 1e3 * statistics.median(r.drained_s for r in refreshes),
        "pause_ms": 1e3 * statistics.median(r.helped_s + r.paused_s for r in refreshes),
        "pause_max_ms": 1e3 * max(r.helped_s + r.paused_s for r in refreshes),
        "pause_over_load": statistics.median(r.helped_s + r.paused_s for r in refreshes) / statistics.median(own),
        "exchange_ms": 1e3 * statistics.median(r.load_s for r in refreshes),
        "proof_ms": 1e3 * statistics.median(r.proof_s for r in refreshes),
        "still_tokens_per_s": statistics.median(still),
        "refreshed_tokens_per_s": statistics.median(moving),
        "kept_ratio": statistics.median(b / a for a, b in zip(still, moving, strict=True)),
        "lost_ms_per_refresh": 1e3 * statistics.median(lost),
    }


async def own_loads(engine: Any, folders: list[Path]) -> list[float]:
    """Seconds of vLLM's `reload_weights`, alone, of each folder."""
    took = []
    for folder in folders:
        began = time.perf_counter()
        await engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
        took.append(time.perf_counter() - began)
    return took


def through_the_stack(chosen: Subject, publishes: int) -> dict[str, float]:
    """Seconds from the call of `publish` to the commit, and to the first token of the new version."""
    committed, first = [], []
    with stack(plan(chosen, SLOTS)) as pipe, Client(pipe.url, api_key="") as client:

        def publish(tensors: dict[str, Any]) -> tuple[int, float]:
            with Client(pipe.url, api_key="") as publisher:
                published = publisher.weights.publish(POLICY, tensors)
                done = time.time()
                published.wait_live(LIVE_S)
                return published.version, done

        with ThreadPoolExecutor(1) as beside:
            for number in range(publishes + 1):
                tensors = drifted(Path(chosen.folder), 1000 + number)
                generate(client, f"before{number}")
                began = time.time()
                publishing, seen = beside.submit(publish, tensors), list[tuple[int, float]]()
                while not publishing.done():
                    seen += generate(client, f"during{number}")
                version, done = publishing.result()
                seen += generate(client, f"after{number}")
                if number:  # the first one also makes connections
                    committed.append(done - began)
                    first.append(min(at for made_by, at in seen if made_by == version) - began)
    return {
        "publish_to_commit_s": statistics.median(committed),
        "publish_to_first_token_s": statistics.median(first),
        "publish_to_first_token_max_s": max(first),
    }


def generate(client: Client, run: str) -> list[tuple[int, float]]:
    """A small batch; of each sample the version that began it, and when (UNIX seconds)."""
    sampling: dict[str, Any] = {"max_tokens": 8, "ignore_eos": True}
    batch = client.submit(
        [{"prompt_token_ids": prompt(n)} for n in range(8)], n=2, sampling=sampling, run=run, policy=POLICY
    )
    samples = [sample.record for group in batch.groups(timeout=300) for sample in group]
    return [(record.version_spans[0].version, record.timings.first_token_at) for record in samples]


def measure(model: str, refreshes: int, rounds: int, publishes: int) -> Result:
    chosen = subject(model)
    with tempfile.TemporaryDirectory(prefix="rollgrid-refresh-") as root:
        folders = [version_folder(Path(chosen.folder), number, Path(root)) for number in range(refreshes)]
        figures = asyncio.run(on_the_engine(chosen, folders, rounds))
    figures |= through_the_stack(chosen, publishes)
    figures["first_token_over_load_ratio"] = 1e3 * figures["publish_to_first_token_s"] / figures["own_load_ms"]
    figures["load_average"] = os.getloadavg()[0]
    setting = {"model": model, "refreshes": refreshes * rounds, "publishes": publishes}
    return Result("weight refresh", setting, figures, (Budget("pause_over_load", at_most=1.10),))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--refreshes", type=int, default=10, help="in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--publishes", type=int, default=5)
    chosen = parser.parse_args(argv)
    for model in chosen.models.split(","):
        result = measure(model, chosen.refreshes, chosen.rounds, chosen.publishes)
        print_result(result)
        save(result)


if __name__ == "__main__":
    main()
