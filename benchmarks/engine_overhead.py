"""Fleet tokens a second against a bare AsyncLLM, at several concurrencies, in one run.

    python -m benchmarks.engine_overhead [--models tiny,smollm2] [--concurrency 1,8,32] [--rounds 3]

The bare engine is asked for the same prompts, seeds and logprob settings at the same concurrency, in
turns with the fleet while the other is stopped (SIGSTOP).  The figure is the median of the ratios
of neighbouring rounds: absolute speeds of a machine mean nothing elsewhere.  On a busy machine it
means nothing either, so the load average stands beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from typing import Any, NamedTuple

from rollgrid import Client
from rollgrid.models.prepare import prepare

from benchmarks.direct_engine import DirectEngine, prompt
from benchmarks.processes import Spent
from benchmarks.report import Budget, Result, print_result, save
from tests.support.stack import POLICY, Stack, StackPlan, stack, vllm
from tests.support.tiny_models import TinyModel, tiny_model


class Subject(NamedTuple):
    """A model to measure with; `tokens` of a sample, `work` = samples of a round at concurrency 32, 8 and 1."""

    folder: str
    dtype: str
    tokens: int
    work: dict[int, int]


def subject(name: str) -> Subject:
    if name == "tiny":
        return Subject(str(tiny_model(TinyModel(context=2048))), "float32", 128, {32: 384, 8: 96, 1: 16})
    if name == "smollm2":
        return Subject(str(prepare("smollm2-135m").path), "bfloat16", 64, {32: 96, 8: 32, 1: 6})
    raise SystemExit(f"no model {name!r}: tiny, smollm2")


def plan(chosen: Subject, slots: int) -> StackPlan:
    models = [{"name": POLICY, "path": chosen.folder, "dtype": chosen.dtype, "max_model_len": 2048}]
    env = {
        "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps(models),
        "ROLLGRID_SAMPLER_MODEL": chosen.folder,
        "ROLLGRID_SAMPLER_DTYPE": chosen.dtype,
        "ROLLGRID_SAMPLER_MAX_MODEL_LEN": "2048",
        "ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(512 * 2**20),
    }
    return vllm(slots=slots, env=env)


def through_the_fleet(pipe: Stack, run: str, groups: int, samples: int, tokens: int) -> dict[str, Any]:
    """Tokens a second from the first start of a sample to the last finish, and finish-to-close seconds."""
    sampling: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    tasks: list[Any] = [
        {"prompt_token_ids": prompt(group), "sampling": {**sampling, "seed": group}} for group in range(groups)
    ]
    spent = Spent(pipe)
    with Client(pipe.url, api_key="") as client:
        batch = client.submit(tasks, n=samples, sampling=sampling, run=run, policy=POLICY)
        closed = list(batch.groups(timeout=900))
    timings = [sample.record.timings for group in closed for sample in group]
    generated = sum(len(sample) for group in closed for sample in group)
    span = max(t.finished_at for t in timings) - min(t.started_at for t in timings)
    after = [group.closed.closed_at - max(s.record.timings.finished_at for s in group) for group in closed]
    return {"tokens_per_s": generated / span, "after": after, "cpu": spent.so_far(), "tokens": generated}


def measure(model: str, concurrency: int, rounds: int = 3) -> Result:
    chosen = subject(model)
    work = chosen.work[concurrency]
    samples = min(8, concurrency)
    groups = work // samples
    alone: list[float] = []
    fleet: list[float] = []
    after: list[float] = []
    cpu: dict[str, float] = {}
    tokens, direct_cpu = 0, 0.0
    with stack(plan(chosen, concurrency)) as pipe, DirectEngine(pipe.environment()) as engine:
        sampler = pipe["sampler-0"]
        for number in range(rounds + 1):
            sampler.pause()
            engine.resume()
            direct = engine.ask(
                "throughput", name=f"round{number}", groups=groups, samples=samples, tokens=chosen.tokens,
                concurrency=concurrency,
            )  # fmt: skip
            engine.pause()
            sampler.resume()
            through = through_the_fleet(pipe, f"round{number}", groups, samples, chosen.tokens)
            if number:  # the first round warms both up
                alone.append(direct["tokens_per_s"])
                fleet.append(through["tokens_per_s"])
                after += through["after"]
                tokens += through["tokens"]
                direct_cpu += engine.cpu_s
                cpu = {name: cpu.get(name, 0.0) + seconds for name, seconds in through["cpu"].items()}
    after.sort()
    engine_cpu = cpu.pop("sampler-0")
    figures = {
        "direct_tokens_per_s": statistics.median(alone),
        "fleet_tokens_per_s": statistics.median(fleet),
        "ratio": statistics.median(with_pipe / by_itself for with_pipe, by_itself in zip(fleet, alone, strict=True)),
        "finish_to_close_p50_ms": 1e3 * after[len(after) // 2],
        "finish_to_close_p99_ms": 1e3 * after[len(after) * 99 // 100],
        "pipe_cpu_us_per_token": 1e6 * sum(cpu.values()) / tokens,
        "sampler_cpu_us_per_token": 1e6 * engine_cpu / tokens,
        "direct_cpu_us_per_token": 1e6 * direct_cpu / tokens,
        "load_average": os.getloadavg()[0],
    }
    setting = {"model": model, "concurrency": concurrency, "samples": work, "tokens": chosen.tokens}
    return Result("engine overhead", setting, figures, (Budget("ratio", at_least=0.99),))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="tiny,smollm2")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(argv)
    for model in chosen.models.split(","):
        for concurrency in map(int, chosen.concurrency.split(",")):
            result = measure(model, concurrency, chosen.rounds)
            print_result(result)
            save(result)


if __name__ == "__main__":
    main()
