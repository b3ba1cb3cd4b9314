"""What sessions cost: latency added to a turn, sessions a second, Redis operations and flushes per turn.

    python -m benchmarks.sessions [--quick] [--no-engine]

A turn is compared with the same engine called directly: same prompts, seeds and settings, one caller, in turns with the
fleet while the other is stopped.  The rest is measured on the scripted engine, which answers at once, with and without the
idempotency key that the SDK sends with a turn.  Operations and flushes are counted, so they do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
from rollgrid import AsyncClient, AsyncSession, Client, run_episodes_async

from benchmarks.direct_engine import DirectEngine, observation, prompt
from benchmarks.engine_overhead import plan, subject
from benchmarks.latency import quantile
from benchmarks.processes import Spent
from benchmarks.report import Result, print_result, save
from tests.support.stack import Stack, scripted, stack
from tests.support.syscalls import counted_flushes, unavailable
from tests.support.tiny_models import TinyModel

TURNS, TOKENS, N, CONCURRENCY = 8, 16, 4, 64
OWN_COMMANDS = frozenset({"info", "hello", "client|setinfo", "auth", "select", "ping", "config|get"})


def new_ids(episode: int, turn: int) -> list[int]:
    """The whole first prompt, then what is observed."""
    return observation(turn - 1) if turn else prompt(episode)


def turn_body(episode: int, turn: int) -> dict[str, Any]:
    place = "observation_token_ids" if turn else "prompt"
    return {place: new_ids(episode, turn), "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 0}


def through_sessions(pipe: Stack, name: str, episodes: int) -> tuple[list[float], list[float]]:
    """Seconds of each turn as a plain HTTP client plays it, and of each opening."""
    spent, opening = [], []
    with Client(pipe.url, api_key="") as client, httpx2.Client(timeout=60) as http:
        for episode in range(episodes):
            began = time.perf_counter()
            session = client.sessions.open(run=name)
            opening.append(time.perf_counter() - began)
            for turn in range(TURNS):
                body = {**turn_body(episode, turn), "seed": episode * TURNS + turn}
                began = time.perf_counter()
                http.post(f"{session.base_url}/completions", json=body).raise_for_status()
                spent.append(time.perf_counter() - began)
            session.close(1.0)
    return spent, opening


def added(episodes: int, rounds: int) -> Result:
    """A turn through its session against the same turn on the bare engine."""
    direct: list[float] = []
    fleet: list[float] = []
    opening: list[float] = []
    with stack(plan(subject("tiny"), 32)) as pipe, DirectEngine(pipe.environment()) as engine:
        sampler = pipe["sampler-0"]
        for number in range(rounds + 1):
            sampler.pause()
            engine.resume()
            alone = engine.ask("conversations", name=f"r{number}", episodes=episodes, turns=TURNS, tokens=TOKENS)
            engine.pause()
            sampler.resume()
            found, opened = through_sessions(pipe, f"r{number}", episodes)
            if number:  # the first round warms both up
                direct += alone
                fleet += found
                opening += opened
    figures = {"open_p50_ms": 1e3 * quantile(opening, 0.5), "load_average": os.getloadavg()[0]}
    for label, share in (("p50", 0.5), ("p99", 0.99)):
        figures[f"turn_{label}_direct_ms"] = 1e3 * quantile(direct, share)
        figures[f"turn_{label}_added_ms"] = 1e3 * (quantile(fleet, share) - quantile(direct, share))
    setting = {"model": "tiny", "episodes": episodes * rounds, "turns": TURNS, "tokens": TOKENS}
    return Result("latency of a turn", setting, figures)


async def play_all(pipe: Stack, run: str, sessions: int, *, keyed: bool) -> float:
    """Seconds that `sessions` in groups of N took, from the first opening to the last group read."""
    sampling: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    async with AsyncClient(pipe.url, api_key="") as client, httpx2.AsyncClient(timeout=60) as http:

        async def play(session: AsyncSession, task: int) -> float:
            for turn in range(TURNS):
                if not keyed:
                    answer = await http.post(f"{session.base_url}/completions", json=turn_body(task, turn))
                    answer.raise_for_status()
                elif turn:
                    await session.sample(observation_token_ids=new_ids(task, turn), **sampling)
                else:
                    await session.sample(token_ids=new_ids(task, turn), **sampling)
            return 1.0

        began = time.perf_counter()
        groups = await run_episodes_async(
            client, range(sessions // N), play, n=N, concurrency=CONCURRENCY, run=run, ttl_s=600
        )
        assert {sample.status.value for group in groups for sample in group} == {"succeeded"}
        return time.perf_counter() - began


def operations(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Commands of Redis, those within scripts counted too."""
    used = {name: calls - before.get(name, 0) for name, calls in after.items() if name not in OWN_COMMANDS}
    return {name: calls for name, calls in used.items() if calls}


def flow(sessions: int, *, keyed: bool) -> Result:
    """Sessions a second, and what one turn costs in operations and flushes (those of opening and closing shared out)."""
    turns = sessions * TURNS
    with stack(scripted(samplers=1, slots=128, model=TinyModel(context=2048))) as pipe:
        asyncio.run(play_all(pipe, "warm", max(N, sessions // 10 // N * N), keyed=keyed))
        before, spent = pipe.valkey.commands(), Spent(pipe)
        seconds = asyncio.run(play_all(pipe, "measured", sessions, keyed=keyed))
        cpu = {f"cpu_{name}": used for name, used in spent.so_far().items()}
        used = operations(before, pipe.valkey.commands())
        figures = {
            "sessions_per_s": sessions / seconds,
            "turns_per_s": turns / seconds,
            "redis_operations_per_turn": sum(used.values()) / turns,
            "redis_scripts_per_turn": (used.get("evalsha", 0) + used.get("eval", 0)) / turns,
            "ingest_cpu_ms_per_turn": 1e3 * cpu["cpu_ingest"] / turns,
        }
        if unavailable() is None:
            with tempfile.TemporaryDirectory() as folder, counted_flushes(pipe.nats, Path(folder)) as flushes:
                flushed = flushes.count()
                counted = max(N, sessions // 4 // N * N)
                asyncio.run(play_all(pipe, "counted", counted, keyed=keyed))
                time.sleep(1.0)  # the acks behind the last closes
                figures["fsyncs_per_turn"] = (flushes.count() - flushed) / (counted * TURNS)
    print("  operations of Redis per turn:", {name: round(calls / turns, 2) for name, calls in sorted(used.items())})
    setting = {"sessions": sessions, "turns": TURNS, "tokens": TOKENS, "keyed": keyed, "at_once": CONCURRENCY}
    return Result("sessions", setting, figures | cpu)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a part of the work")
    parser.add_argument("--no-engine", action="store_true", help="leave vLLM out")
    chosen = parser.parse_args(argv)
    for keyed in (False, True):
        result = flow(64 if chosen.quick else 1024, keyed=keyed)
        print_result(result)
        save(result)
        sys.stdout.flush()
    if not chosen.no_engine and importlib.util.find_spec("vllm") is not None:
        result = added(3 if chosen.quick else 20, rounds=1 if chosen.quick else 3)
        print_result(result)
        save(result)


if __name__ == "__main__":
    main()
