"""`make bench`: every budget of the design's section 13 that this fleet has so far, in one run.

The control plane by both doors and with a scorer, a flood beside a quiet tenant, fleet tokens a second
against a bare AsyncLLM, what new weights cost, and what the doors add to a call.  ARGS='--quick' takes
a part of the work, ARGS='--only latency,fairness' some of it; every benchmark is a module of its own,
with a help text.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator

from benchmarks import control_plane, engine_overhead, fairness, latency, refresh
from benchmarks.report import Result, missed, print_result, save

PLAN = {
    "control": "control plane",
    "fairness": "tenants",
    "overhead": "engine overhead",
    "latency": "doors",
    "refresh": "weight refresh",
}


def steps(quick: bool) -> Iterator[tuple[str, bool, Callable[[], Result]]]:
    """(part, whether it needs the engine, what measures)."""
    groups = 200 if quick else 2000
    for door, scored in (("http", False), ("http", True), ("queue", False)):
        yield (
            "control",
            False,
            lambda door=door, scored=scored: control_plane.measure(  # type: ignore[misc]
                groups, 8, 256, scored=scored, samplers=1, door=door
            ),
        )
    yield "fairness", False, lambda: fairness.measure(quick=quick)
    for model in ("tiny", "smollm2"):
        for concurrency in (1, 8, 32):
            yield (
                "overhead",
                True,
                lambda model=model, concurrency=concurrency: engine_overhead.measure(  # type: ignore[misc]
                    model, concurrency, rounds=1 if quick else 3
                ),
            )
    for model in ("tiny", "smollm2"):
        yield (
            "refresh",
            True,
            lambda model=model: refresh.measure(  # type: ignore[misc]
                model, refreshes=10, rounds=1 if quick else 3, publishes=2 if quick else 5
            ),
        )
    yield "latency", True, lambda: latency.measure(calls=30 if quick else 100, tokens=16, rounds=1 if quick else 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the work")
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out")
    parser.add_argument("--only", default=",".join(PLAN), help=f"some of {', '.join(PLAN)}")
    chosen = parser.parse_args()
    engine = not chosen.no_engine and importlib.util.find_spec("vllm") is not None
    results = []
    for part, needs_engine, measure in steps(chosen.quick):
        if part not in chosen.only.split(","):
            continue
        if needs_engine and not engine:
            print(f"\n{PLAN[part]}: no engine here, left out", flush=True)
            continue
        results.append(measure())
        print_result(results[-1])
        sys.stdout.flush()
        save(results[-1])
    print("\nmissed budgets:", ", ".join(line for result in results for line in missed(result)) or "none")


if __name__ == "__main__":
    main()
