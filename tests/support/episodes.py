"""Sessions without their doors: what is said of one on the streams, and whether Redis holds the fold of it."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import msgspec
from rollgrid_contracts import codec, ids, keys, subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.jobs import OpenEpisode, SampleGroup, SamplingParams, Session
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SamplesScored, ScorerKind
from rollgrid_contracts.topology import SAMPLES
from rollgrid_episodes.tree import Tree
from rollgrid_ingest.session_episode import Episode, episode_of
from rollgrid_ingest.session_store_ending import ending_of
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import read_after

from .servers import ValkeyServer

TENANT, RUN, POOL = "local", "r1", "p1"
_Event = SessionOpened | SamplesFinished | SessionForked | SessionEnded | SamplesScored


def opening(
    *, group: str = "", index: int = 0, n: int = 1, deadline_s: float = 600.0, **terms: Any
) -> tuple[SessionOpened, OpenEpisode]:
    """A session and its group; `group` absent: one of its own."""
    group = group or ids.group_id(TENANT, RUN, ids.new_key(), 0)
    now = time.time()
    opened = SessionOpened(
        tenant=TENANT,
        run=RUN,
        group_id=group,
        index=index,
        n=n,
        session=ids.session_id(group, index),
        terms=SessionTerms(policy="tiny", deadline=now + deadline_s, **terms),
        opened_at=now,
    )
    episode = OpenEpisode(
        tenant=TENANT,
        run=RUN,
        batch_id=ids.batch_id(TENANT, RUN, group),
        group_id=group,
        n=n,
        policy="tiny",
        created_at=now,
        deadline=now + deadline_s,
    )
    return opened, episode


def job_of(opened: SessionOpened, turn: int, node: TurnNode, deadline: float) -> SampleGroup:
    return SampleGroup(
        tenant=opened.tenant,
        run=opened.run,
        batch_id=ids.batch_id(opened.tenant, opened.run, opened.group_id),
        group_id=opened.group_id,
        n=opened.n,
        indexes=(opened.index,),
        policy=opened.terms.policy,
        pool=POOL,
        prompt_token_ids=node.observation,
        sampling=SamplingParams(max_tokens=16),
        session=Session(session=opened.session, turn=turn, node=node),
        created_at=time.time(),
        deadline=deadline,
    )


def finish_of(job: SampleGroup, job_seq: int, **sample: Any) -> SamplesFinished:
    """The job's turn has ended: with two tokens unless `sample` says otherwise."""
    assert job.session is not None
    turn, node = job.session.turn, job.session.node
    fields: dict[str, Any] = {
        "status": SampleStatus.SUCCEEDED,
        "token_ids": TokenIds.of([1000 + turn, 2000 + turn]),
        "logprobs": Floats.of([-0.5, -0.25]),
        "finish_reason": FinishReason.STOP,
        "text": f"answer {turn}",
    }
    return SamplesFinished(
        tenant=job.tenant,
        run=job.run,
        batch_id=job.batch_id,
        group_id=job.group_id,
        n=job.n,
        policy=job.policy,
        job_seq=job_seq,
        fence=job_seq,
        session=job.session,
        samples=(Sample(index=job.indexes[0], turn=turn, node=node, **{**fields, **sample}),),
    )


async def store_job(bus: Bus, job: SampleGroup) -> int:
    """As ingest does it; the RG_JOBS sequence."""
    subject = subjects.jobs_pool(job.pool, job.priority, job.tenant)
    return (await bus.publish(subject, job, msg_id=job.call_id)).sequence


async def store_finish(bus: Bus, finish: SamplesFinished) -> int:
    """As a sampler does it; the RG_SAMPLES sequence."""
    assert finish.session is not None
    subject = subjects.samples(ScorerKind.DONE, finish.tenant, finish.session.session)
    return (await bus.publish(subject, finish)).sequence


def ending(opened: SessionOpened, outcome: SessionOutcome = SessionOutcome.CLOSED, **fields: Any) -> SessionEnded:
    return msgspec.structs.replace(ending_of(opened, outcome, None, 0.0, None), **fields)


# -- the checker ----------------------------------------------------------------------------------


async def folded_stream(bus: Bus, tenant: str, session: str, to: int | None = None) -> Tree:
    """The tree of what RG_SAMPLES has of a session (up to a sequence)."""
    tree, after = Tree(), 0
    while True:
        page = await read_after(bus, SAMPLES.name, subjects.samples_of(tenant, session), after, 100)
        for stored in page.messages:
            after = stored.sequence
            if to is not None and after > to:
                return tree
            event: Any = codec.decode(await bus.resolve(stored.data, stored.headers), _Event)  # type: ignore[arg-type]
            if not isinstance(event, SamplesScored):
                tree.apply(after, event)
        if not page.pending:
            return tree


def kept(valkey: ValkeyServer, tenant: str, session: str) -> Episode | None:
    """What Redis has of a session, as it lies there; None when it has nothing."""
    with contextlib.closing(valkey.client()) as client:
        fields: dict[Any, Any] = client.hgetall(keys.session(tenant, session))
    return episode_of({name.decode(): value for name, value in fields.items()}, None) if fields else None


def facts(tree: Tree) -> dict[str, Any]:
    """Everything two folds of the same events must agree on; what Redis leaves out of samples is left out."""

    def lean(sample: Sample) -> Sample:
        return msgspec.structs.replace(sample, top_logprobs=None, prompt_logprobs=None)

    nodes = {turn: (node.seq, lean(node.sample)) for turn, node in sorted(tree.nodes.items())}
    return {
        "opened": tree.opened,
        "ended": tree.ended,
        "nodes": nodes,
        "lost": dict(sorted(tree.lost.items())),
        "forks": tree.forks,
        "branches": tree.branches,
        "children": {parent: turns for parent, turns in tree.children.items() if turns},
        "tokens": tree.tokens,
        "depth": tree.depth,
        "events_to": tree.events_to,
        "prompts": {turn: tree.token_ids(turn) for turn in nodes},
    }


async def assert_kept_is_the_fold(bus: Bus, valkey: ValkeyServer, tenant: str, session: str) -> Episode | None:
    """Whatever Redis has of a session is the fold of the stream up to where it says it is; None when it has nothing."""
    episode = kept(valkey, tenant, session)
    if episode is None:
        return None
    stream = await folded_stream(bus, tenant, session, to=episode.at)
    assert facts(episode.tree) == facts(stream)
    taken = {*stream.nodes, *stream.lost}
    assert not taken & set(episode.open_turns), "a turn that ended is not open"
    assert episode.next_turn > max({*taken, *episode.open_turns}, default=-1), "a number is given once"
    return episode
