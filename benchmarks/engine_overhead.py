"""Fleet tokens a second against the same engine called directly, in one run.

    python -m benchmarks.engine_overhead [--groups 24] [--samples 8] [--tokens 128]

The sampler's own engine class is called with the same requests at the same concurrency, in a process
of its own and as a sampler behind the whole pipe, in turns while the other is stopped (SIGSTOP).  The figure is
the median of the ratios of neighbouring rounds: absolute speeds of a machine mean nothing elsewhere.
On a busy machine it means nothing either, so the load average stands beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from typing import Any

from rollgrid import Client

from benchmarks.report import Result, print_result, save
from tests.support.stack import POLICY, Stack, stack, vllm
from tests.support.tiny_models import TinyModel

SLOTS = 32
MODEL = TinyModel(context=2048)
MARK = "tokens-per-second"


def prompt(group: int) -> list[int]:
    return [5 + (group * 7 + place) % 400 for place in range(64)]


async def direct(groups: int, samples: int, tokens: int, environment: dict[str, str]) -> None:
    """The engine alone (runs in a child): for each line of stdin a round, its tokens a second to stdout."""
    from rollgrid_contracts import ids
    from rollgrid_contracts.jobs import SamplingParams
    from rollgrid_sampler.engines.base import GenerationRequest
    from rollgrid_sampler.service import make_engine
    from rollgrid_sampler.settings import SamplerSettings

    os.environ.update(environment)
    settings = SamplerSettings()
    engine = make_engine(settings)
    await engine.start(0, settings.model)
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    slots = asyncio.Semaphore(SLOTS)

    async def one(group: int, index: int, name: str) -> int:
        async with slots:
            request = GenerationRequest(
                request_id=f"{name}-{group}-{index}",
                sample=f"{name}-{group}.{index}",
                index=index,
                prompt_token_ids=prompt(group),
                sampling=sampling,
                seed=ids.sample_seed(group, index),
                cache_salt=f"direct/0/{name}",
            )
            return len((await engine.generate(request)).token_ids)

    while name := (await asyncio.to_thread(sys.stdin.readline)).strip():
        began = time.perf_counter()
        counts = await asyncio.gather(*(one(group, index, name) for group in range(groups) for index in range(samples)))
        print(MARK, sum(counts) / (time.perf_counter() - began), flush=True)
    await engine.close()


class DirectEngine:
    """The child that runs `direct`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        argv = [sys.executable, "-m", "benchmarks.engine_overhead", "--direct"]
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._send(json.dumps(arguments))

    def _send(self, line: str) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(line + "\n")
        self._child.stdin.flush()

    def round(self, name: str) -> float:
        self._send(name)
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                return float(line.split()[1])
        raise RuntimeError(f"the engine's process ended with {self._child.wait()}")

    def send(self, number: signal.Signals) -> None:
        os.killpg(self._child.pid, number)

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate("\n", timeout=60)


def through_the_fleet(pipe: Stack, run: str, groups: int, samples: int, tokens: int) -> tuple[float, list[float]]:
    """Tokens a second from the first start of a sample to the last finish, and finish-to-close seconds."""
    sampling: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    tasks: list[Any] = [
        {"prompt_token_ids": prompt(group), "sampling": {**sampling, "seed": group}} for group in range(groups)
    ]
    with Client(pipe.url, api_key="") as client:
        batch = client.submit(tasks, n=samples, sampling=sampling, run=run, policy=POLICY)
        closed = list(batch.groups(timeout=600))
    timings = [sample.record.timings for group in closed for sample in group]
    generated = sum(len(sample) for group in closed for sample in group)
    span = max(t.finished_at for t in timings) - min(t.started_at for t in timings)
    after = [group.closed.closed_at - max(s.record.timings.finished_at for s in group) for group in closed]
    return generated / span, after


def measure(groups: int, samples: int, tokens: int, rounds: int = 3) -> Result:
    plan = vllm(slots=SLOTS, model=MODEL, env={"ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(128 * 2**20)})
    alone: list[float] = []
    fleet: list[float] = []
    after: list[float] = []
    with stack(plan) as pipe:
        arguments = {"groups": groups, "samples": samples, "tokens": tokens, "environment": pipe.environment()}
        with DirectEngine(arguments) as engine:
            sampler = pipe["sampler-0"]
            for number in range(rounds + 1):
                sampler.pause()
                engine.send(signal.SIGCONT)
                direct_rate = engine.round(f"round{number}")
                engine.send(signal.SIGSTOP)
                sampler.resume()
                fleet_rate, closing = through_the_fleet(pipe, f"round{number}", groups, samples, tokens)
                if number:  # the first round warms both up
                    alone.append(direct_rate)
                    fleet.append(fleet_rate)
                    after += closing
            engine.send(signal.SIGCONT)
    after.sort()
    figures = {
        "direct_tokens_per_s": statistics.median(alone),
        "fleet_tokens_per_s": statistics.median(fleet),
        "ratio": statistics.median(with_pipe / by_itself for with_pipe, by_itself in zip(fleet, alone, strict=True)),
        "load_average": os.getloadavg()[0],
        "finish_to_close_p50_ms": 1e3 * after[len(after) // 2],
        "finish_to_close_p99_ms": 1e3 * after[len(after) * 99 // 100],
    }
    setting = {"groups": groups, "samples": samples, "tokens": tokens, "slots": SLOTS, "cores": os.cpu_count()}
    return Result("engine overhead (tiny model, CPU)", setting, figures)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=24)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(argv)
    if chosen.direct:
        asyncio.run(direct(**json.loads(sys.stdin.readline())))
        return
    result = measure(chosen.groups, chosen.samples, chosen.tokens, chosen.rounds)
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
