"""Half an hour at full load on the scripted engine: does memory stay flat, and does everything come back to zero?

    python -m benchmarks.soak [--minutes 30] [--out soak.json]

Jobs are submitted as fast as the pipe takes them, scored and unscored in turns, with interactive
calls and cancellations between; a trainer reads everything.  The memory of every process is sampled
and a line is fitted behind the warm-up.  The ledger remembers closed groups for 25 hours up to a bound
(300 bytes each); here that bound is small, so that it is reached within the warm-up.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import psutil
from rollgrid import Client, RollgridError
from rollgrid.transport import Retries

from benchmarks.report import Budget, Result, print_result, save
from tests.support.stack import POLICY, Stack, StackPlan, scripted, stack
from tests.support.tiny_models import TinyModel
from tests.support.waiting import wait_until

SAMPLE_EVERY_S = 5.0
WARM_UP = 0.25
"""Share of the run that is not fitted."""
BATCH = 50
MIB = 2**20
SETTLE_S = 180.0


def plan() -> StackPlan:
    env = {
        "ROLLGRID_TRAJECTORY_LOGGER_CLOSED_KEPT": "20000",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "5",
        "ROLLGRID_NATS_JOBS_MAX_BYTES": str(128 * MIB),
        "ROLLGRID_NATS_SAMPLES_MAX_BYTES": str(256 * MIB),
        "ROLLGRID_NATS_TRAJECTORIES_MAX_BYTES": str(256 * MIB),
        "ROLLGRID_INGEST_MAX_INFLIGHT_SAMPLES": "40000",
    }
    return scripted(samplers=2, slots=64, eos_rate=0.02, model=TinyModel(context=2048), env=env)


class Load:
    """Submitters, one reader, and one caller of the interactive door, until told to stop."""

    def __init__(self, pipe: Stack) -> None:
        self._pipe = pipe
        self._stop = threading.Event()
        self.submitted = self.read = self.refused = self.calls = self.cancelled = 0
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,)) for work in (self._submit, self._read, self._call)
        ]
        self.failure: BaseException | None = None

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)
            if thread.is_alive():
                raise RuntimeError("a client of the soak hangs")

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.failure = error
            raise

    def _submit(self) -> None:
        options: dict[str, Any] = {"n": 8, "sampling": {"max_tokens": 64}, "policy": POLICY, "run": "soak"}
        turn = 0
        with Client(self._pipe.url, api_key="", retries=Retries(budget_s=1.0)) as client:
            while not self._stop.is_set():
                turn += 1
                scorers = ["exact_match"] if turn % 2 else []
                tasks: list[Any] = [{"prompt_token_ids": [5, 6, 7, 8], "task": {"answer": "x"}}] * BATCH
                try:
                    batch = client.submit(tasks, scorers=scorers, **options)
                except RollgridError:
                    self.refused += 1
                    self._stop.wait(0.2)
                    continue
                self.submitted += BATCH
                if turn % 50 == 0:
                    batch.cancel()
                    self.cancelled += 1

    def _read(self) -> None:
        with Client(self._pipe.url, api_key="") as client:
            groups = client.trajectories("soak", timeout=3600)
            for _ in groups:
                self.read += 1
                if self._stop.is_set() and self.read >= self.submitted:
                    return

    def _call(self) -> None:
        import openai

        with openai.OpenAI(base_url=f"{self._pipe.url}/v1", api_key="none", max_retries=5) as client:
            while not self._stop.is_set():
                if self.calls % 2:
                    client.completions.create(model=POLICY, prompt="hello", max_tokens=16)
                else:
                    for _ in client.completions.create(model=POLICY, prompt="hello", max_tokens=16, stream=True):
                        pass
                self.calls += 1
                self._stop.wait(0.05)


def memory(pipe: Stack) -> dict[str, float]:
    """Resident MiB of every part and its children."""
    found = {}
    for name, process in pipe.processes().items():
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        total = 0
        for member in family:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        found[name] = total / MIB
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """MiB an hour of the least-squares line."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope * 3600.0


def curve(points: list[tuple[float, float]]) -> list[float]:
    """The mean MiB of every minute."""
    minutes: dict[int, list[float]] = {}
    for at, mib in points:
        minutes.setdefault(int(at // 60), []).append(mib)
    return [round(statistics.fmean(minutes[minute]), 1) for minute in sorted(minutes)]


def at_rest(pipe: Stack) -> dict[str, float]:
    """Everything that must be zero once the work has ended."""
    fleet = httpx2.get(f"{pipe.url}/v1/fleet", timeout=10).raise_for_status().json()
    queues = fleet["queues"]
    found = {"RG_JOBS messages": float(queues["RG_JOBS"]["messages"])}
    for stream, queue in queues.items():
        for name, lag in queue["consumers"].items():
            if name.startswith("tenant_"):  # a reader of its tenant's, who may never come
                continue
            found[f"{stream}/{name} pending"] = float(lag["pending"])
    for worker in fleet["workers"]:
        found[f"{worker['worker']} busy"] = float(worker.get("busy", 0))
    for name in ("sampler-0", "sampler-1"):
        facts = pipe[name].readiness()[1]
        found |= {f"{name} {key}": float(facts[key]) for key in ("busy", "held", "queued")}
    facts = pipe["ingest"].readiness()[1]
    found |= {f"ingest {key}": float(facts[key]) for key in ("waiting", "readers")}
    for line in pipe["trajectory_logger"].metrics().splitlines():
        for gauge in ("rollgrid_ledger_open_groups", "rollgrid_archive_lag", "rollgrid_ledger_double_closes"):
            if line.startswith(f"{gauge} "):
                found[gauge] = float(line.split()[1])
    return found


def measure(minutes: float) -> tuple[Result, dict[str, list[float]]]:
    """The result, and the memory of each part minute by minute."""
    samples: dict[str, list[tuple[float, float]]] = {}
    with stack(plan()) as pipe:
        load = Load(pipe)
        began = time.monotonic()
        load.start()
        while (elapsed := time.monotonic() - began) < 60 * minutes:
            time.sleep(SAMPLE_EVERY_S)
            if load.failure is not None:
                raise RuntimeError("a client of the soak failed") from load.failure
            for name, mib in memory(pipe).items():
                samples.setdefault(name, []).append((elapsed, mib))
        rate = 8 * load.read / (time.monotonic() - began)
        load.stop()
        try:
            wait_until(lambda: not any(at_rest(pipe).values()), SETTLE_S, "everything at zero", every_s=1.0)
        except TimeoutError:
            print("not at rest:", {name: value for name, value in at_rest(pipe).items() if value})
        left = float(sum(1 for value in at_rest(pipe).values() if value))
        figures = {
            "not_at_rest": left,
            "samples_per_s": rate,
            "groups": float(load.read),
            "refusals": float(load.refused),
        }
        figures |= {"interactive_calls": float(load.calls), "cancelled_batches": float(load.cancelled)}
        for name, points in samples.items():
            fitted = [point for point in points if point[0] > WARM_UP * 60 * minutes]
            figures[f"{name}_mib_first"] = fitted[0][1]
            figures[f"{name}_mib_last"] = fitted[-1][1]
            figures[f"{name}_mib_per_hour"] = slope(fitted)
    result = Result("soak", {"minutes": minutes}, figures, (Budget("not_at_rest", at_most=0.0),))
    return result, {name: curve(points) for name, points in samples.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the figures")
    chosen = parser.parse_args(argv)
    result, curves = measure(chosen.minutes)
    print_result(result)
    for name, mib in curves.items():
        print(f"  {name} MiB by the minute: {' '.join(f'{value:.0f}' for value in mib)}")
    path = save(result)
    if chosen.out is not None:
        chosen.out.write_text(path.read_text())
    print(json.dumps({"saved": str(path.name)}))


if __name__ == "__main__":
    main()
