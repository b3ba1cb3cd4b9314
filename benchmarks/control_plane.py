"""Durable samples a second from a door to the SDK's iterator, and where the time goes.

    python -m benchmarks.control_plane [--door http|queue] [--groups 2000] [--samples 8] [--tokens 256] [--scored]

The scripted engine answers at once, so this is the price of the pipe itself: HTTP, JetStream with
an fsync for every durable write, the fold, and the trainer's decoding.  Flushes are counted in a
run of their own, because counting slows the server down.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from rollgrid import Client, NatsClient

from benchmarks.processes import Spent
from benchmarks.report import Result, print_result, save
from tests.support.stack import POLICY, TENANT, Stack, scripted, stack
from tests.support.syscalls import counted_flushes, unavailable
from tests.support.tiny_models import TinyModel

BATCH = 100
SUBMITTERS = 2


def submit_all(pipe: Stack, run: str, groups: int, options: dict[str, Any]) -> list[float]:
    """Submit in batches from `SUBMITTERS` threads; seconds each call took."""
    took: list[float] = []
    sizes = [min(BATCH, groups - start) for start in range(0, groups, BATCH)]
    lock = threading.Lock()

    def work() -> None:
        with Client(pipe.url, api_key="") as client:
            while True:
                with lock:
                    if not sizes:
                        return
                    size = sizes.pop()
                began = time.perf_counter()
                client.submit([{"prompt_token_ids": [5, 6, 7, 8], "task": {"answer": "x"}}] * size, run=run, **options)
                took.append(time.perf_counter() - began)

    threads = [threading.Thread(target=work) for _ in range(SUBMITTERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return took


async def through_the_queue(pipe: Stack, run: str, groups: int, options: dict[str, Any]) -> int:
    """All groups in and out again by NATS alone; tokens really read as arrays."""

    def client() -> NatsClient:
        return NatsClient(pipe.nats.url, tenant=TENANT, user=pipe.nats.user, password=pipe.nats.password)

    sizes = [min(BATCH, groups - start) for start in range(0, groups, BATCH)]

    async def submit() -> None:
        async with client() as trainer:
            while sizes:
                tasks = [{"prompt_token_ids": [5, 6, 7, 8], "task": {"answer": "x"}}] * sizes.pop()
                await trainer.submit(tasks, run=run, **options)

    tokens = read = 0
    async with asyncio.TaskGroup() as submitting, client() as trainer:
        for _ in range(SUBMITTERS):
            submitting.create_task(submit())
        async for group in trainer.trajectories(run, timeout=600):
            tokens += sum(int(np.count_nonzero(sample.token_ids >= 0)) for sample in group)
            read += 1
            if read == groups:
                break
    return tokens


def queue_flow(pipe: Stack, run: str, groups: int, options: dict[str, Any]) -> dict[str, float]:
    """As `flow`, without HTTP."""
    spent = Spent(pipe)
    began = time.perf_counter()
    tokens = asyncio.run(through_the_queue(pipe, run, groups, options))
    took = time.perf_counter() - began
    cpu = {f"cpu_{name}": seconds for name, seconds in spent.so_far().items()}
    return {"seconds": took, "tokens": float(tokens), **cpu}


def flow(pipe: Stack, run: str, groups: int, options: dict[str, Any]) -> dict[str, float]:
    """All groups in and out again; seconds, and tokens really read as arrays."""
    submitting = threading.Thread(target=submit_all, args=(pipe, run, groups, options))
    spent = Spent(pipe)
    began = time.perf_counter()
    submitting.start()
    tokens = read = 0
    with Client(pipe.url, api_key="") as trainer:
        for group in trainer.trajectories(run, timeout=600):
            tokens += sum(int(np.count_nonzero(sample.token_ids >= 0)) for sample in group)
            read += 1
            if read == groups:
                break
    took = time.perf_counter() - began
    submitting.join()
    cpu = {f"cpu_{name}": seconds for name, seconds in spent.so_far().items()}
    return {"seconds": took, "tokens": float(tokens), **cpu}


def measure(groups: int, samples: int, tokens: int, *, scored: bool, samplers: int, door: str = "http") -> Result:
    options: dict[str, Any] = {
        "n": samples,
        "sampling": {"max_tokens": tokens},
        "policy": POLICY,
        "scorers": ["exact_match"] if scored else [],
    }
    plan = scripted(samplers=samplers, slots=128, eos_rate=0.0, model=TinyModel(context=2048))
    through = queue_flow if door == "queue" else flow
    with stack(plan) as pipe:
        through(pipe, "warm", max(1, groups // 10), options)
        figures = through(pipe, "measured", groups, options)
        if unavailable() is None:
            with tempfile.TemporaryDirectory() as folder, counted_flushes(pipe.nats, Path(folder)) as flushes:
                before = flushes.count()
                counted = max(1, groups // 4)
                through(pipe, "counted", counted, options)
                time.sleep(1.0)  # the acks behind the last closes
                figures["fsyncs_per_group"] = (flushes.count() - before) / counted
    figures["samples_per_s"] = groups * samples / figures["seconds"]
    figures["tokens_per_s"] = figures["tokens"] / figures["seconds"]
    figures["cpu_ms_per_group"] = 1e3 * sum(v for k, v in figures.items() if k.startswith("cpu_")) / groups
    name = "control plane, scored" if scored else "control plane, unscored"
    setting = {
        "door": door,
        "groups": groups,
        "samples": samples,
        "tokens": tokens,
        "samplers": samplers,
        "cores": os.cpu_count(),
    }
    return Result(name, setting, figures)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--samplers", type=int, default=1)
    parser.add_argument("--scored", action="store_true")
    parser.add_argument("--door", choices=("http", "queue"), default="http")
    chosen = parser.parse_args(argv)
    result = measure(
        chosen.groups, chosen.samples, chosen.tokens, scored=chosen.scored, samplers=chosen.samplers, door=chosen.door
    )
    print_result(result)
    save(result)


if __name__ == "__main__":
    main()
