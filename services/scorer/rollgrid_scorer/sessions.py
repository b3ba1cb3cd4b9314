"""What scorers see of a session that has ended: one conversation, its answers in order, its last answer.

The event says that it ended and on which turn; what was sampled is folded from the session's own subject, and
what was asked for is in the `OpenEpisode` that is kept until the close.  A verifier's `turn_values` are one per
answer of the conversation, in order; in the verdict that goes out they stand under the turns' own numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace
from rollgrid_contracts import subjects
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened, SessionOutcome
from rollgrid_contracts.jobs import OpenEpisode, Session
from rollgrid_contracts.samples import Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import SamplesScored, Score, ScoreStatus
from rollgrid_contracts.topology import JOBS, SAMPLES
from rollgrid_contracts.trajectories import Entry
from rollgrid_episodes import Tree, answer_of
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import read_after

PAGE = 256
Told: Any = SessionOpened | SessionForked | SessionEnded | SamplesFinished | SamplesScored


class SessionTask(ScoringTask, frozen=True, omit_defaults=True, kw_only=True):
    """`path` holds the turns that are judged, from the root to the last answer; `messages` the whole conversation."""

    path: tuple[Sample, ...] = ()


def path_of_task(task: ScoringTask) -> tuple[Sample, ...]:
    """The judged turns, none of a single generation."""
    return task.path if isinstance(task, SessionTask) else ()


async def finish_of(bus: Bus, sequence: int, ended: SessionEnded) -> SamplesFinished | None:
    """The end of a session (at RG_SAMPLES `sequence`) as a finish to judge; None when its group has closed.

    A session that was not closed, or in which nothing was sampled, has no sample to judge.  Raises BusError,
    StorageError, PayloadGone, DecodeError.
    """
    stored = await bus.stored(JOBS.name, ended.job_seq)
    if stored is None:
        return None
    opening = await bus.decoded(stored.data, stored.headers, OpenEpisode)
    tree = await _folded(bus, sequence, ended)
    judged = ended.outcome is SessionOutcome.CLOSED and ended.leaf in tree.nodes
    path = tuple(node.sample for node in tree.path(ended.leaf)) if judged else ()
    return SamplesFinished(
        tenant=ended.tenant,
        run=ended.run,
        batch_id=opening.batch_id,
        group_id=ended.group_id,
        n=opening.n,
        policy=opening.policy,
        job_seq=ended.job_seq,
        session=Session(session=ended.session, turn=ended.leaf or 0),
        samples=path[-1:],
        scoring=SessionTask(
            scorers=opening.scorers,
            messages=ended.messages or tree.messages(ended.leaf if judged else None),
            task=opening.task,
            metadata=opening.metadata,
            deadline=opening.deadline,
            path=path,
        ),
        traceparent=ended.traceparent,
    )


async def _folded(bus: Bus, sequence: int, ended: SessionEnded) -> Tree:
    """The session up to RG_SAMPLES `sequence`."""
    tree, subject = Tree(), subjects.samples_of(ended.tenant, ended.session)
    after = 0
    while True:
        page = await read_after(bus, SAMPLES.name, subject, after, PAGE)
        for message in page.messages:
            after = message.sequence
            if after > sequence:
                return tree
            event = await bus.decoded(message.data, message.headers, Told)
            if not isinstance(event, SamplesScored):
                tree.apply(after, event)
        if not page.messages or not page.pending:
            return tree


def path_of(entry: Entry) -> tuple[Sample, ...]:
    """The judged turns of a session in the record; none where it did not close or nothing was sampled."""
    turns = {turn.turn: turn for turn in entry.turns if turn.status is SampleStatus.SUCCEEDED}
    found: list[Sample] = []
    at: int | None = entry.sample.turn if entry.sample.status is SampleStatus.SUCCEEDED else None
    while at is not None and (turn := turns.pop(at, None)) is not None:
        found.append(turn)
        at = turn.node.parent if turn.node is not None else None
    return tuple(reversed(found))


def conversation(path: Sequence[Sample]) -> tuple[dict[str, Any], ...]:
    """What was said along a path, its answers included."""
    found: list[dict[str, Any]] = []
    for turn in path:
        found += turn.node.messages if turn.node is not None else ()
        found.append(answer_of(turn))
    return tuple(found)


def by_turn(score: Score, path: Sequence[Sample]) -> Score:
    """With `turn_values` under the turns' numbers; more values than turns are the scorer's failure."""
    values = score.turn_values
    if not values or not path:
        return score
    if len(values) > len(path):
        detail = f"{len(values)} turn values for {len(path)} turns"
        return replace(score, status=ScoreStatus.VERIFIER_ERROR, value=None, turn_values=(), detail=detail)
    found: list[float | None] = [None] * (max(turn.turn for turn in path) + 1)
    for turn, value in zip(path, values, strict=False):
        found[turn.turn] = value
    return replace(score, turn_values=tuple(found))
