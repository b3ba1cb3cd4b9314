"""Sessions played at random: their events in stream order, copies and late finishes among them, and what they come to."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    MAIN_BRANCH,
    ForkReason,
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.jobs import Session, VersionSpan
from rollgrid_contracts.samples import FinishReason, Parsed, Sample, SamplesFinished, SampleStatus
from rollgrid_episodes import SessionEvent, Tree

WHO: dict[str, Any] = {"tenant": "acme", "run": "r1", "group_id": "g1", "index": 2, "session": "s1"}


def opened(**terms: Any) -> SessionOpened:
    return SessionOpened(**WHO, n=4, terms=SessionTerms(policy="p", **terms), opened_at=1.0)


def forked(branch: str, parent: int | None, **more: Any) -> SessionForked:
    return SessionForked(**WHO, branch=branch, parent=parent, **{"reason": ForkReason.EXPLORE, **more})


def ended(**more: Any) -> SessionEnded:
    return SessionEnded(**WHO, outcome=SessionOutcome.CLOSED, **more)


def sample(turn: int, node: TurnNode, ids: list[int], **more: Any) -> Sample:
    """A turn that succeeded, sampled by versions 1 and 2, half each."""
    half = len(ids) // 2
    spans = [VersionSpan(version=1, start=0, end=half), VersionSpan(version=2, start=half, end=len(ids))]
    fields: dict[str, Any] = {
        "status": SampleStatus.SUCCEEDED,
        "logprobs": Floats.of([-0.5 - i - turn for i in range(len(ids))]),
        "text": f"answer {turn}",
        "finish_reason": FinishReason.STOP,
        "version_spans": tuple(span for span in spans if span.end > span.start),
    }
    return Sample(index=2, turn=turn, node=node, token_ids=TokenIds.of(ids), **{**fields, **more})


def finished(*samples: Sample, job_seq: int = 1, group: str = "g1", session: str = "s1") -> SamplesFinished:
    first = samples[0]
    place = Session(session=session, turn=first.turn, node=first.node or TurnNode())
    return SamplesFinished(
        tenant="acme", run="r1", batch_id="b1", group_id=group, n=4, policy="p", job_seq=job_seq, session=place,
        samples=samples,
    )  # fmt: skip


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def turn(
    number: int, parent: int | None = None, branch: str = MAIN_BRANCH, text: str | None = None, **more: Any
) -> Sample:
    """Turn `number` behind `parent`, with ids that name it."""
    said = (user(f"question {number}" if text is None else text),)
    node = TurnNode(
        parent=parent, branch=branch, messages=said, observation=TokenIds.of([1000 + number, 2000 + number])
    )
    return sample(number, node, [10 * number, 10 * number + 1, 10 * number + 2], **more)


def folded(*events: SessionEvent) -> Tree:
    """A tree of these events, all of which must count."""
    tree = Tree()
    for seq, event in enumerate((opened(), *events), start=1):
        assert tree.apply(seq, event) is None, event
    return tree


@dataclass
class Played:
    """`events` in stream order; `winners` are the finishes that must count, by turn."""

    events: list[tuple[int, SessionEvent]] = field(default_factory=list)
    winners: dict[int, Sample] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    branches: dict[str, int | None] = field(default_factory=lambda: {MAIN_BRANCH: None})
    late: list[SamplesFinished] = field(default_factory=list)
    """Second finishes of turns that have one."""

    def add(self, event: SessionEvent) -> None:
        self.events.append((3 * len(self.events) + 1, event))


_FAILED = [SampleStatus.FAILED, SampleStatus.CANCELLED, SampleStatus.EXPIRED]
_TEXTS = ["", "a", "b", "ünï", "<|im_end|>", " a", "a\n"]
_CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
_PARSED = [None, Parsed(content="seen", reasoning="why"), Parsed(tool_calls=(_CALL,))]


def played(most: int = 14) -> st.SearchStrategy[Played]:
    """Any tree: forks from any node, turns behind any node of any branch, turns that fail, copies of their finishes."""
    return st.integers(0, 2**48).map(lambda seed: play(random.Random(seed), most))


def play(rng: random.Random, most: int) -> Played:
    found = Played()
    found.add(opened())
    for number in range(rng.randint(0, most)):
        if rng.random() < 0.25:
            _fork(rng, found, number)
        _turn(rng, found, number)
        if found.late and rng.random() < 0.3:
            found.add(rng.choice(found.late))
    if rng.random() < 0.5:
        found.add(ended())
        for late in found.late[:2]:
            found.add(late)
    return found


def _fork(rng: random.Random, found: Played, number: int) -> None:
    parent = rng.choice([None, *found.winners])
    found.branches[f"b{number}"] = parent
    found.add(forked(f"b{number}", parent))


def _turn(rng: random.Random, found: Played, number: int) -> None:
    branch = rng.choice([*found.branches])
    parent = rng.choice([found.branches[branch]] * 3 + [None, *found.winners])
    messages = tuple(user(rng.choice(_TEXTS)) for _ in range(rng.randint(1, 2)))
    node = TurnNode(parent=parent, branch=branch, messages=messages, observation=TokenIds.of(_ids(rng)))
    status = rng.choice([SampleStatus.SUCCEEDED] * 9 + _FAILED)
    made = sample(number, node, _ids(rng), status=status, text=rng.choice(_TEXTS), parsed=rng.choice(_PARSED))
    found.add(finished(made, job_seq=7))
    other = sample(number, node, [5], text="late")
    found.late += [finished(other, job_seq=7), finished(other, job_seq=3)]
    if status is SampleStatus.SUCCEEDED:
        found.winners[number] = made
        found.branches[branch] = number
    else:
        found.lost.add(number)


def _ids(rng: random.Random) -> list[int]:
    return [rng.randrange(2**32) for _ in range(rng.randint(0, 4))]
