"""The rules for sessions are not believed until they have caught each planted violation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import SessionForked, TurnNode
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus
from rollgrid_contracts.trajectories import Entry, GroupClosed

from .checker import ArchivedGroup, ArchivedRange, ArchivedSample, ArchivedTurn, Close, Evidence, check
from .journal import (
    Accepted,
    Attempted,
    Delivered,
    Journal,
    Line,
    Refused,
    SessionClosed,
    Taken,
    TurnReplied,
    read,
)
from .test_checker import RUN, TENANT, close, closed

KEY = "e0"
GROUP = ids.group_id(TENANT, RUN, KEY, 0)
WHO: dict[str, Any] = {"tenant": TENANT, "run": RUN, "group_id": GROUP}


def turn(index: int, number: int, parent: int | None = None, branch: str = "main", **changes: Any) -> Sample:
    base: dict[str, Any] = {
        "status": SampleStatus.SUCCEEDED,
        "token_ids": TokenIds.of([index, number]),
        "logprobs": Floats.of([-0.5, -0.25]),
        "finish_reason": FinishReason.LENGTH,
        "version_spans": (VersionSpan(version=0, start=0, end=2),),
        "node": TurnNode(parent=parent, branch=branch, observation=TokenIds.of([9, number])),
    }
    return Sample(**{"index": index, "turn": number, **base, **changes})


def entry(index: int, *turns: Sample, **changes: Any) -> Entry:
    """Turn 0, then one on each branch; a stopped one that had a token."""
    session = ids.session_id(GROUP, index)
    played = turns or (
        turn(index, 0),
        turn(index, 1, 0),
        turn(index, 2, 0, "b"),
        turn(index, 3, 1, status=SampleStatus.CANCELLED),
    )
    base: dict[str, Any] = {
        "sample": Sample(index=index, turn=1, status=SampleStatus.SUCCEEDED, finish_reason=FinishReason.LENGTH),
        "turns": played,
        "session": session,
        "reward": index + 0.5,
        "posted": index + 0.5,
        "branches": (SessionForked(**WHO, index=index, session=session, branch="b", parent=0),),
    }
    return Entry(**base | changes)


def history(record: GroupClosed, archive: Callable[[ArchivedGroup], ArchivedGroup] = lambda group: group) -> Evidence:
    one = close(1, record)
    journal: list[Line] = [
        Attempted(at=1, tenant=TENANT, run=RUN, key=KEY, groups=1, n=2),
        Refused(at=2, key="e0-0-open", status=503, code="episode_rebuilding"),
        Taken(at=3, key="e0-0-open"),
        Accepted(at=3, tenant=TENANT, run=RUN, key=KEY, group_ids=(GROUP,), n=2, deadline=200),
        *(answered(index, number) for index in range(2) for number in range(3)),
        *(
            SessionClosed(at=9, key=f"c{index}", group_id=GROUP, index=index, reward=index + 0.5, scored=False, turns=3)
            for index in range(2)
        ),
        Delivered(at=104, reader="r", run=RUN, cursor=1, group_id=GROUP),
    ]
    return Evidence(journal, [one], [ArchivedRange("m1", 1, 1, (archive(archived(one)),))], 1, 1)


def answered(index: int, number: int, **changes: Any) -> TurnReplied:
    base: dict[str, Any] = {"token_ids": TokenIds.of([index, number]), "logprobs": Floats.of([-0.5, -0.25])}
    return TurnReplied(**{"at": 5, "key": f"t{index}-{number}", "group_id": GROUP, "index": index, "turn": number, **base, **changes})  # fmt: skip


def archived(one: Close) -> ArchivedGroup:
    samples = tuple(
        ArchivedSample(e.sample.index, e.sample.status.value, (), (), e.reward, tuple(map(row_of, e.turns)))
        for e in one.record.entries
    )
    return ArchivedGroup(one.sequence, GROUP, samples)


def row_of(sample: Sample) -> ArchivedTurn:
    node = sample.node or TurnNode()
    return ArchivedTurn(
        sample.turn, node.parent, tuple(node.observation), tuple(sample.token_ids), tuple(sample.logprobs)
    )


def record(*entries: Entry) -> GroupClosed:
    return closed(GROUP, n=2, entries=entries or (entry(0), entry(1)))


def changed(**changes: Any) -> Evidence:
    """The first session's entry is another."""
    return history(record(entry(0, **changes), entry(1)))


def played(*turns: Sample) -> Evidence:
    return history(record(entry(0, *turns), entry(1)))


def archive_without(place: int) -> Evidence:
    def cut(group: ArchivedGroup) -> ArchivedGroup:
        first, second = group.samples
        return group._replace(samples=(first._replace(turns=first.turns[:place]), second))

    return history(record(), cut)


def archive_with_another_prefix() -> Evidence:
    def alter(group: ArchivedGroup) -> ArchivedGroup:
        first, second = group.samples
        turns = (first.turns[0]._replace(observation=(1, 2)), *first.turns[1:])
        return group._replace(samples=(first._replace(turns=turns), second))

    return history(record(), alter)


def also(line: Line) -> Evidence:
    evidence = history(record())
    return evidence._replace(journal=[*evidence.journal, line])


FULL = (turn(0, 0), turn(0, 1, 0), turn(0, 2, 0, "b"))
ENDED = Sample(index=0, status=SampleStatus.EXPIRED)
PLANTED: dict[str, tuple[str, Callable[[], Evidence]]] = {
    "a node twice": ("I6", lambda: played(*FULL, turn(0, 2, 0, "b"))),
    "a turn behind one that is not there": ("I6", lambda: played(*FULL, turn(0, 5, 4))),
    "a turn behind a later one": ("I6", lambda: played(turn(0, 0), turn(0, 1, 2), turn(0, 2, 0, "b"))),
    "a turn behind one that was stopped": ("I6", lambda: played(*FULL, turn(0, 3, 1, status=SampleStatus.CANCELLED), turn(0, 4, 3))),
    "turns out of order": ("I5", lambda: played(turn(0, 1, 0), turn(0, 0), turn(0, 2, 0, "b"))),
    "a branch nobody forked": ("I5", lambda: changed(branches=())),
    "another sample's session": ("I5", lambda: changed(session=ids.session_id(GROUP, 1))),
    "turns of no session": ("I5", lambda: changed(session=None)),
    "tokens beside the turns": ("I5", lambda: changed(sample=turn(0, 1))),
    "an empty turn that failed": (
        "I5",
        lambda: played(*FULL, turn(0, 4, 1, status=SampleStatus.FAILED, token_ids=TokenIds(), logprobs=Floats())),
    ),
    "a turn's tokens without logprobs": ("I5", lambda: played(*FULL[:2], turn(0, 2, 0, "b", logprobs=Floats.of([1.0])))),
    "a turn's tokens without a version": ("I4", lambda: played(*FULL[:2], turn(0, 2, 0, "b", version_spans=()))),
    "an answered turn that is lost": ("I2", lambda: played(*FULL[:2])),
    "an answered turn that failed": ("I2", lambda: played(*FULL[:2], turn(0, 2, 0, "b", status=SampleStatus.FAILED))),
    "a turn answered with other tokens": ("I2", lambda: also(answered(0, 2, token_ids=TokenIds.of([8, 8])))),
    "a turn answered with other logprobs": ("I2", lambda: also(answered(0, 2, logprobs=Floats.of([-0.5, -1.0])))),
    "one key, two turns": ("I2", lambda: also(answered(0, 2, key="t0-1"))),
    "a close that was taken and expired": ("I1", lambda: changed(sample=ENDED)),
    "a turn more than when it was closed": ("I1", lambda: played(*FULL, turn(0, 3, 1))),
    "another reward than was closed with": ("F", lambda: changed(posted=9.0)),
    "a reward that became none": ("F", lambda: changed(reward=None)),
    "an archive without a turn": ("I3", lambda: archive_without(3)),
    "an archive with another prefix": ("I3", archive_with_another_prefix),
    "a session's call turned away": ("door", lambda: also(Refused(at=7, key="e0-0-9", status=409, code="session_ended"))),
    "a group of sessions that never closed": ("I1", lambda: history(record())._replace(closes=[], archive=[])),
    "a group of sessions with an entry less": ("I5", lambda: history(record(entry(0)))),
}  # fmt: skip


def test_a_good_history_of_sessions_holds() -> None:
    assert check(history(record())) == []


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_of_a_session_is_found(name: str) -> None:
    promise, plant = PLANTED[name]
    found = check(plant())
    assert promise in {violation.promise for violation in found}, found


def test_every_rule_for_sessions_is_planted_once_at_least() -> None:
    """Each message of the rules comes up: a rule nobody breaks here may be one that cannot fail."""
    texts = " ".join(violation.what for _, plant in PLANTED.values() for violation in check(plant()))
    for said in (
        "has turns and no session", "another sample's", "times", "not in their order", "beside those of its turns",
        "which nobody forked", "no turn before it", "without a token", "before", "is recorded as", "answered",
        "was closed by its caller", "was closed with", "turns when it was closed",
    ):  # fmt: skip
        assert said in texts, said


def test_sessions_survive_the_journal(tmp_path: Any) -> None:
    lines = history(record()).journal
    journal = Journal(tmp_path / "journal.jsonl")
    for line in lines:
        journal.write(line)
    journal.close()
    assert read(tmp_path / "journal.jsonl") == lines
