"""What the doors add to a call: whole calls and first streamed tokens against a bare AsyncLLM, in one run.

    python -m benchmarks.latency [--calls 100] [--tokens 16] [--rounds 3]

One caller, one call after the other, over a kept-alive connection; the bare engine answers the same
prompts with the same settings in turns with the fleet.  Differences of quantiles, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import httpx2

from benchmarks.direct_engine import DirectEngine, prompt
from benchmarks.engine_overhead import plan, subject
from benchmarks.processes import Spent
from benchmarks.report import Budget, Result, print_result, save
from tests.support.stack import POLICY, Stack, stack


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def flush_ms(folder: Path, writes: int = 100) -> float:
    """Median of writing 1 KiB and flushing it, where the streams lie: a call waits for two such writes."""
    spent = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(writes):
            began = time.perf_counter()
            file.write(bytes(1024))
            file.flush()
            os.fsync(file.fileno())
            spent.append(time.perf_counter() - began)
    return 1e3 * quantile(spent, 0.5)


def through_the_door(pipe: Stack, name: str, calls: int, tokens: int) -> dict[str, list[float]]:
    """As `BareEngine.latency`, by `POST /v1/completions`."""
    whole, first = [], []
    fields = {"model": POLICY, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "cache_salt": name}
    with httpx2.Client(base_url=pipe.url, timeout=60) as http:
        for call in range(calls):
            body = {**fields, "prompt": prompt(call), "seed": call}
            began = time.perf_counter()
            http.post("/v1/completions", json=body).raise_for_status()
            whole.append(time.perf_counter() - began)
            began = time.perf_counter()
            with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
                answer.raise_for_status()
                lines = answer.iter_lines()
                next(line for line in lines if line.startswith("data:"))
                first.append(time.perf_counter() - began)
                for _ in lines:
                    pass
    return {"whole": whole, "first": first}


def measure(calls: int, tokens: int, rounds: int) -> Result:
    direct: dict[str, list[float]] = {"whole": [], "first": []}
    fleet: dict[str, list[float]] = {"whole": [], "first": []}
    ingest_cpu = 0.0
    with stack(plan(subject("tiny"), 32)) as pipe, DirectEngine(pipe.environment()) as engine:
        sampler = pipe["sampler-0"]
        flushed = flush_ms(pipe.folder)
        for number in range(rounds + 1):
            sampler.pause()
            engine.resume()
            alone = engine.ask("latency", name=f"r{number}", calls=calls, tokens=tokens)
            engine.pause()
            sampler.resume()
            spent = Spent(pipe)
            found = through_the_door(pipe, f"r{number}", calls, tokens)
            if number:
                ingest_cpu += spent.so_far()["ingest"]
                for kind in direct:
                    direct[kind] += alone[kind]
                    fleet[kind] += found[kind]
    figures: dict[str, float] = {"flush_p50_ms": flushed}
    for kind in ("whole", "first"):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            theirs, ours = quantile(direct[kind], share), quantile(fleet[kind], share)
            figures[f"{kind}_{label}_direct_ms"] = 1e3 * theirs
            figures[f"{kind}_{label}_added_ms"] = 1e3 * (ours - theirs)
    figures["ingest_cpu_per_call_ms"] = 1e3 * ingest_cpu / (2 * calls * rounds)
    figures["load_average"] = os.getloadavg()[0]
    budgets = (
        Budget("whole_p50_added_ms", at_most=5.0),
        Budget("whole_p99_added_ms", at_most=25.0),
        Budget("first_p50_added_ms", at_most=5.0),
        Budget("first_p99_added_ms", at_most=25.0),
        Budget("ingest_cpu_per_call_ms", at_most=1.0),
    )
    return Result("added latency", {"calls": calls * rounds, "tokens": tokens, "model": "tiny"}, figures, budgets)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args(argv)
    result = measure(chosen.calls, chosen.tokens, chosen.rounds)
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
