"""A worker with real vLLM dies in the middle of turns: its sessions end on the other, token-exact and once (issue 5, A13, A25).

The last of this package on these engines: what is killed here stays dead.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest
from rollgrid import AsyncClient
from rollgrid.results import Sample
from rollgrid_runtime.bus import Bus

from tests.e2e.reference import logprobs
from tests.support.stack import Stack
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

from .conftest import ENGINES_MODEL
from .test_fleet import PATIENT, finishes

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(540)]

RUN = "dying"
SESSIONS, TURNS, LONG_TURN = 6, 4, 1
SHORT, LONG = 8, 4000
TOLERANCE = 1e-4


async def test_I2_sessions_of_a_worker_killed_in_mid_turn_end_on_the_other(engines: Stack) -> None:
    wire = await Bus.connect(engines.nats.settings(), "test")
    async with AsyncClient(engines.url, retries=PATIENT) as client:
        opened = [await client.sessions.open(run=RUN, group=f"g{number}") for number in range(SESSIONS)]
        names = [session.id for session in opened]
        histories: dict[str, list[Any]] = {name: [] for name in names}
        prefixes: dict[str, list[int]] = {name: [] for name in names}

        async def play(name: str, number: int) -> None:
            session, messages = await client.sessions.get(name), histories[name]
            messages.append({"role": "user", "content": f"{number} more for {names.index(name)}"})
            turn = await session.sample(messages, max_tokens=LONG if number == LONG_TURN else SHORT, ignore_eos=True)
            assert turn.fork is None
            assert turn.prompt_ids[: len(prefixes[name])].tolist() == prefixes[name], "earlier turns, token by token"
            prefixes[name] = [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]
            messages.append(turn.message)

        for number in range(LONG_TURN):
            await asyncio.gather(*(play(name, number) for name in names))
        bound = {name: (await client.sessions.state(name)).worker or "" for name in names}
        victim, there = Counter(bound.values()).most_common()[0]
        assert {"sampler-0", "sampler-1"} == set(bound.values())
        its = {name for name in names if bound[name] == victim}
        async with asyncio.TaskGroup() as turns:
            for name in names:
                turns.create_task(play(name, LONG_TURN))

            await until(lambda: bool(its & checkpointed(engines, names)), 60, "in mid-turn")
            engines[victim].kill()
        for number in range(LONG_TURN + 1, TURNS):
            await asyncio.gather(*(play(name, number) for name in names))

        for name in names:
            await (await client.sessions.get(name)).close(reward=1.0)
            assert await finishes(wire, name) == dict.fromkeys(range(TURNS), 1), "no turn is in the record twice"
        samples = [
            sample
            async for group in client.trajectories(RUN, timeout=60, until=[one.group_id for one in opened])
            for sample in group.samples
        ]
    await wire.close()
    assert sorted(sample.session or "" for sample in samples) == sorted(names)
    for sample in samples:
        check_turns(
            sample, prefixes[sample.session or ""], died=victim if bound[sample.session or ""] == victim else ""
        )
    resumed = [s.turns[LONG_TURN].record.resumed_from for s in samples if s.turns[LONG_TURN].record.attempt > 1]
    if not resumed:
        pytest.skip("all turns had ended on this machine before the kill reached them: nothing was interrupted")
    assert max(resumed) > 0, "it goes on behind the last checkpoint"
    worst = max(map(difference, samples))
    print(f"{there} of {SESSIONS} sessions were moved; largest |Δlogprob| {worst:.1e}")
    assert worst <= TOLERANCE


def check_turns(sample: Sample, whole: list[int], *, died: str) -> None:
    """Every turn once, behind the one before; `died`: the worker that was killed during the long one."""
    assert [(turn.number, turn.node.parent) for turn in sample.turns] == [
        (0, None),
        *((n, n - 1) for n in range(1, TURNS)),
    ]
    assert [len(turn) for turn in sample.turns] == [LONG if n == LONG_TURN else SHORT for n in range(TURNS)]
    (path,) = sample.paths()
    assert [*path.prompt_ids.tolist(), *path.completion_ids.tolist()] == whole
    moved = sample.turns[LONG_TURN].record
    workers = {turn.record.worker for turn in sample.turns[LONG_TURN + 1 :]}
    assert len(workers) == 1
    assert died not in workers
    if died and moved.worker != died:
        assert sample.turns[0].record.worker == died
        assert moved.attempt > 1
        assert 0 <= moved.resumed_from < LONG


def difference(sample: Sample) -> float:
    """Largest |Δlogprob| of what the policy sampled, against one forward over the whole path."""
    (path,) = sample.paths()
    want = logprobs(tiny_model(ENGINES_MODEL), path.prompt_ids.tolist(), path.completion_ids.tolist(), 1.0)
    assert path.mask.sum() == LONG + (TURNS - 1) * SHORT
    return max(abs(a - b) for a, b, sampled in zip(path.logprobs, want, path.mask, strict=True) if sampled)


def checkpointed(engines: Stack, names: list[str]) -> set[str]:
    """Sessions whose turn under way has a checkpoint in Redis."""
    with contextlib.closing(engines.valkey.client()) as client:
        kept = [str(key) for key in client.keys("rg:partial:*")]
    return {name for name in names if any(name in key for key in kept)}
