"""A bare AsyncLLM in a process of its own: the yardstick for what the pipe costs.

It is built and asked exactly as the sampler's engine is (same options, seeds and logprob settings);
nothing of the pipe runs beside it.  Commands come as JSON lines on stdin, answers go to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

from benchmarks.processes import cpu_seconds

MARK = "direct-engine-answer"


def prompt(group: int) -> list[int]:
    """64 token ids, other ones for every group."""
    return [5 + (group * 7 + place) % 400 for place in range(64)]


def observation(turn: int) -> list[int]:
    """16 token ids that an environment adds behind a turn."""
    return [7 + (turn * 11 + place) % 400 for place in range(16)]


class BareEngine:
    """Inside the child: rounds over `AsyncLLM.generate`."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def _one(self, name: str, group: int, index: int, tokens: int, *, stream: bool = False) -> tuple[int, float]:
        """Tokens of one request, and the UNIX-like time of its first output."""
        sampled, first = await self._sampled(name, prompt(group), (group, index), tokens, stream=stream)
        return len(sampled), first

    async def _sampled(
        self, name: str, prompt_ids: list[int], sample: tuple[int, int], tokens: int, *, stream: bool = False
    ) -> tuple[list[int], float]:
        from rollgrid_contracts import ids
        from rollgrid_contracts.jobs import SamplingParams
        from rollgrid_sampler.engines.vllm_options import translate
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = translate(SamplingParams(max_tokens=tokens, ignore_eos=True), ids.sample_seed(*sample))
        if stream:
            params.output_kind = RequestOutputKind.DELTA
        found: list[int] = []
        first = 0.0
        source = tokens_input(prompt_ids, cache_salt=f"direct/0/{name}")
        async for output in self._llm.generate(source, params, f"{name}-{sample[0]}-{sample[1]}"):
            first = first or time.perf_counter()
            found += output.outputs[0].token_ids
        return found, first

    async def throughput(self, name: str, groups: int, samples: int, tokens: int, concurrency: int) -> dict[str, float]:
        places = asyncio.Semaphore(concurrency)

        async def one(group: int, index: int) -> int:
            async with places:
                return (await self._one(name, group, index, tokens))[0]

        began = time.perf_counter()
        counts = await asyncio.gather(*(one(group, index) for group in range(groups) for index in range(samples)))
        return {"tokens_per_s": sum(counts) / (time.perf_counter() - began)}

    async def latency(self, name: str, calls: int, tokens: int) -> dict[str, list[float]]:
        """Seconds of whole calls, and to the first output of streamed ones, one after the other."""
        whole, first = [], []
        for call in range(calls):
            began = time.perf_counter()
            await self._one(name, call, 0, tokens)
            whole.append(time.perf_counter() - began)
            began = time.perf_counter()
            first.append((await self._one(name, call, 1, tokens, stream=True))[1] - began)
        return {"whole": whole, "first": first}

    async def conversations(self, name: str, episodes: int, turns: int, tokens: int) -> list[float]:
        """Seconds of each turn; a turn's prompt is all that was before, and `observation`."""
        spent = []
        for episode in range(episodes):
            so_far = prompt(episode)
            for turn in range(turns):
                began = time.perf_counter()
                sampled, _ = await self._sampled(name, so_far, (episode, turn), tokens)
                spent.append(time.perf_counter() - began)
                so_far = [*so_far, *sampled, *observation(turn)]
        return spent


async def serve(environment: dict[str, str]) -> None:
    """Runs in the child until stdin ends."""
    os.environ.update(environment)
    from rollgrid_sampler.engines.vllm_options import build, set_environment
    from rollgrid_sampler.settings import SamplerSettings

    settings = SamplerSettings()
    assert settings.model is not None
    set_environment(settings)
    llm = build(settings, settings.model)
    engine = BareEngine(llm)
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        command = json.loads(line)
        answer = await getattr(engine, command.pop("do"))(**command)
        print(MARK, json.dumps(answer), flush=True)
    llm.shutdown()


class DirectEngine:
    """The child, seen from the benchmark.  Stop it (SIGSTOP) while the fleet is measured."""

    def __init__(self, environment: dict[str, str]) -> None:
        argv = [sys.executable, "-m", "benchmarks.direct_engine"]
        self._child = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.cpu_s = 0.0
        """CPU seconds of the last question, the engine's processes included."""
        self._send(environment)

    def _send(self, message: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(message) + "\n")
        self._child.stdin.flush()

    def ask(self, do: str, **arguments: Any) -> Any:
        """The answer of `BareEngine.<do>`."""
        before = cpu_seconds(self._child.pid)
        self._send({"do": do, **arguments})
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(MARK):
                self.cpu_s = cpu_seconds(self._child.pid) - before
                return json.loads(line.removeprefix(MARK))
        raise RuntimeError(f"the engine's process ended with {self._child.wait()}")

    def pause(self) -> None:
        os.killpg(self._child.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._child.pid, signal.SIGCONT)

    def __enter__(self) -> DirectEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        try:
            self._child.communicate("\n", timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(self._child.pid, signal.SIGKILL)
            self._child.wait(10)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(serve(json.loads(sys.stdin.readline())))


if __name__ == "__main__":
    main()
