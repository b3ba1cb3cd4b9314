"""What one tenant's flood does to another's calls: interactive latency idle, then beside a flood by each door.

    python -m benchmarks.fairness [--quick]

The scripted engine at a fixed token rate, so that a call takes a known time and what is added is
waiting.  The flood never stops: batches of long samples, interactive calls, long texts to tokenize and
prompts far over the context, as fast as the doors take them, with 429s answered by coming again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.topology import Header
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError

from benchmarks.report import Budget, Result, print_result, save
from tests.support.servers import scratch
from tests.support.stack import POLICY, Stack, scripted, stack
from tests.support.tiny_models import TinyModel

TOKEN_RATE, TOKENS, SLOTS = 200.0, 32, 16
FLOOD_TOKENS = 128
BATCHERS, CALLERS, TEXTERS = 2, 24, 2
TENANTS = ("flood", "calm")
WARM_UP_S = 3.0


def quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def headers(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {tenant}"}


def generate(tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    return {"model": POLICY, "token_ids": [5, 6, 7], "sampling_params": sampling, "deadline_s": 60}


def batch(tasks: int, tokens: int) -> dict[str, Any]:
    sampling = {"max_tokens": tokens, "ignore_eos": True}
    prompts = [{"prompt_token_ids": [5, 6, 7]}] * tasks
    return {"run": "flood", "policy": POLICY, "n": 8, "sampling": sampling, "tasks": prompts}


def call_quietly(pipe: Stack, calls: int) -> list[float]:
    """Seconds of each interactive call of the calm tenant, one after the other."""
    took = []
    with httpx2.Client(base_url=pipe.url, timeout=120, headers=headers("calm")) as http:
        for _ in range(calls):
            began = time.perf_counter()
            http.post("/inference/v1/generate", json=generate(TOKENS)).raise_for_status()
            took.append(time.perf_counter() - began)
    return took


class Flood:
    """Threads that send for ever; `answers` counts what came back by status."""

    def __init__(self, pipe: Stack) -> None:
        self._pipe, self._stop = pipe, threading.Event()
        self.answers: Counter[str] = Counter()

    def http(self) -> list[threading.Thread]:
        long_text = "so long " * 30_000
        hopeless = "so long " * 700_000
        kinds: list[tuple[str, Callable[[], dict[str, Any]], int]] = [
            ("/v1/rollouts", lambda: batch(64, FLOOD_TOKENS), BATCHERS),
            ("/inference/v1/generate", lambda: generate(FLOOD_TOKENS), CALLERS),
            ("/v1/completions", lambda: {"model": POLICY, "prompt": long_text, "max_tokens": 1}, TEXTERS),
            ("/v1/completions", lambda: {"model": POLICY, "prompt": hopeless, "max_tokens": 1}, 1),
        ]
        return [
            threading.Thread(target=self._send, args=(path, make), daemon=True)
            for path, make, count in kinds
            for _ in range(count)
        ]

    def _send(self, path: str, make: Callable[[], dict[str, Any]]) -> None:
        body = json.dumps(make()).encode()
        with httpx2.Client(base_url=self._pipe.url, timeout=120, headers=headers("flood")) as http:
            while not self._stop.is_set():
                try:
                    answer = http.post(path, content=body)
                except httpx2.HTTPError as error:
                    self.answers[type(error).__name__] += 1
                    continue
                self.answers[str(answer.status_code)] += 1
                if answer.status_code == 429:
                    self._stop.wait(0.05)  # a rude client: Retry-After says a second

    def queue(self) -> list[threading.Thread]:
        return [threading.Thread(target=lambda: asyncio.run(self._publish()), daemon=True)]

    async def _publish(self) -> None:
        bus = await Bus.connect(self._pipe.nats.settings(), "flood")
        body = codec.encode(batch(64, FLOOD_TOKENS), codec.JSON)
        kind = {Header.CONTENT_TYPE.value: codec.JSON}
        while not self._stop.is_set():
            try:
                await bus.publish(subjects.submit("flood"), body, headers=kind, timeout_s=5)
                self.answers["published"] += 1
            except RollgridError as error:
                self.answers[error.code.value] += 1
                await asyncio.sleep(0.05)
        await bus.close()

    @contextlib.contextmanager
    def running(self, threads: list[threading.Thread]) -> Iterator[None]:
        for thread in threads:
            thread.start()
        try:
            time.sleep(WARM_UP_S)
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(180)


@contextlib.contextmanager
def two_tenants() -> Iterator[Stack]:
    with scratch("fairness") as folder:
        keys = Path(folder) / "keys.json"
        entries = [{"key_sha256": hashlib.sha256(t.encode()).hexdigest(), "tenant": t} for t in TENANTS]
        keys.write_text(json.dumps(entries))
        env = {"ROLLGRID_INGEST_KEYS_FILE": str(keys), "ROLLGRID_INGEST_MAX_INFLIGHT_REQUESTS": "32"}
        plan = scripted(
            samplers=1,
            scorers=0,
            token_rate=TOKEN_RATE,
            eos_rate=0.0,
            slots=SLOTS,
            env=env,
            model=TinyModel(context=2048),
        )
        with stack(plan) as pipe:
            yield pipe


def measure(*, quick: bool = False) -> Result:
    calls = 20 if quick else 60
    figures: dict[str, float] = {}
    doors: dict[str, Callable[[Flood], list[threading.Thread]]] = {"http": Flood.http, "queue": Flood.queue}
    for door, threads in doors.items():  # a stack each: what the first flood left waiting is no idle side
        with two_tenants() as pipe:
            call_quietly(pipe, 5)
            idle = call_quietly(pipe, calls)
            flood = Flood(pipe)
            with flood.running(threads(flood)):
                flooded = call_quietly(pipe, calls)
            for label, share in (("p50", 0.5), ("p99", 0.99)):
                before, after = quantile(idle, share), quantile(flooded, share)
                figures[f"{door}_{label}_idle_ms"] = 1e3 * before
                figures[f"{door}_{label}_flooded_ms"] = 1e3 * after
                figures[f"{door}_{label}_ratio"] = after / before
            figures |= {f"{door}_flood_{name}": float(count) for name, count in sorted(flood.answers.items())}
    figures["load_average"] = os.getloadavg()[0]
    budgets = tuple(Budget(f"{door}_p50_ratio", at_most=2.0) for door in doors)
    setting = {"calls": calls, "tokens": TOKENS, "flood_tokens": FLOOD_TOKENS, "slots": SLOTS, "rate": TOKEN_RATE}
    return Result("tenants", setting, figures, budgets)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a third of the calls")
    chosen = parser.parse_args(argv)
    result = measure(quick=chosen.quick)
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
