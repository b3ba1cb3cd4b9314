"""Turns of sessions as ingest sends them, what the record has of them, and what Redis has while they are sampled."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import redis
from rollgrid_contracts import codec, ids, keys
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.jobs import (
    Priority,
    Reply,
    Resume,
    SampleGroup,
    SamplingParams,
    Session,
    VersionRule,
    WeightConstraint,
)
from rollgrid_contracts.samples import Sample, SamplesFinished
from rollgrid_contracts.subjects import PoolLane
from rollgrid_sampler.engines.script import sample_key, script, weights_digest
from rollgrid_sampler.jobs import sample_name

from .stage import POOL, Stage, make_job

LANE = PoolLane(POOL, Priority.INTERACTIVE, "acme")
LONG = SamplingParams(max_tokens=200, ignore_eos=True)
"""Unseeded: every turn has tokens of its own."""


def make_turn(name: str, turn: int, *, index: int = 0, n: int = 1, **changes: Any) -> SampleGroup:
    """Turn `turn` of the session that plays `index` of the group; it goes on behind the turn before it."""
    group = ids.group_id("acme", "run1", name, 0)
    node = TurnNode(
        parent=turn - 1 if turn else None,
        observation=TokenIds.of([20, 21 + turn]),
        messages=({"role": "user", "content": f"turn {turn}"},),
    )
    session = changes.pop("session", None) or Session(session=ids.session_id(group, index), turn=turn, node=node)
    fields: dict[str, Any] = {
        "n": n,
        "indexes": (index,),
        "prompt": [5, 6, 7, *range(20, 22 + turn)],
        "session": session,
        "reply": Reply.RESULT,
        "priority": Priority.INTERACTIVE,
        "sampling": LONG,
    }
    return make_job(name, **{**fields, **changes})


def session_of(job: SampleGroup) -> Session:
    assert job.session is not None
    return job.session


class Finish(NamedTuple):
    sequence: int
    subject: str
    event: SamplesFinished
    sample: Sample


async def finishes(stage: Stage) -> dict[str, list[Finish]]:
    """By call, every finish of a turn in stream order: the first has won."""
    await stage.read()
    found: dict[str, list[Finish]] = defaultdict(list)
    for sequence, subject, event in stage.events:
        if event.session is not None:
            for sample in event.samples:
                call = f"{event.session.session}-t{sample.turn}"
                found[call].append(Finish(sequence, subject, event, sample))
    return found


async def ended(stage: Stage, *jobs: SampleGroup, timeout_s: float = 20.0) -> list[Sample]:
    """Wait until each of these turns has a finish; the winners."""
    async with asyncio.timeout(timeout_s):
        while not {job.call_id for job in jobs} <= set(found := await finishes(stage)):
            await asyncio.sleep(0.02)
    return [found[job.call_id][0].sample for job in jobs]


def exact(version: int) -> WeightConstraint:
    return WeightConstraint(rule=VersionRule.EXACT, value=version)


def check_turn(job: SampleGroup, sample: Sample) -> None:
    """Every token is what the weights without a folder make of this very turn, however often it was taken over."""
    key = sample_key(weights_digest(None), sample_name(job, sample.index), sample.index, sample.seed)
    tokens, logprobs = script(key, 0, len(sample.token_ids), 512, 2, 0.01)
    assert sample.token_ids.tolist() == tokens.tolist()
    assert np.array_equal(np.frombuffer(sample.logprobs.packed, "<f4"), logprobs)


class Kept:
    """The partials in Redis."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client

    def fields(self, job: SampleGroup) -> dict[str, bytes]:
        found: Any = self._client.hgetall(keys.partial(job.tenant, job.call_id))
        return {name.decode(): value for name, value in found.items()}

    def tokens(self, job: SampleGroup) -> int:
        packed = self.fields(job).get("resume")
        return len(codec.decode(packed, Resume).token_ids) if packed is not None else 0
