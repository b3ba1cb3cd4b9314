"""Groups of sessions in the ledger: what counts, what becomes of the jobs of turns, and what the record says."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    ForkReason,
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import GroupStatus, LedgerQuery
from rollgrid_contracts.jobs import OpenEpisode, SampleGroup, Session, turn_call
from rollgrid_contracts.samples import GroupsCancelled, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerSpec, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason
from rollgrid_trajectory_logger.ledger import Close, Event, Ledger, Settle
from rollgrid_trajectory_logger.query import answer

from .test_fold import NOW, WHO, Stream, finished, job, read_of, the_close

GROUP = "g1"
SCORERS = (ScorerSpec(name="exact", type="exact"),)


def name_of(index: int, group: str = GROUP) -> str:
    return ids.session_id(group, index)


def episode(**fields: Any) -> OpenEpisode:
    base: dict[str, Any] = {**WHO, "batch_id": "b1", "n": 2, "policy": "p", "created_at": 1.0, "deadline": 100.0}
    return OpenEpisode(**base | fields)


def turn_job(index: int, turn: int, **fields: Any) -> SampleGroup:
    return job(indexes=(index,), session=Session(session=name_of(index), turn=turn), **fields)


def opened(index: int, **fields: Any) -> SessionOpened:
    base: dict[str, Any] = {
        **WHO,
        "index": index,
        "n": 2,
        "session": name_of(index),
        "terms": SessionTerms(policy="p", model="p@live"),
        "opened_at": 2.0,
        "job_seq": 1,
    }
    return SessionOpened(**base | fields)


def played(index: int, turn: int, job_seq: int = 1, *, parent: int | None = None, branch: str = "main", **fields: Any) -> SamplesFinished:  # fmt: skip
    base: dict[str, Any] = {
        "index": index,
        "turn": turn,
        "status": SampleStatus.SUCCEEDED,
        "token_ids": TokenIds.of([turn, 7]),
        "logprobs": Floats.of([-0.5, -0.25]),
        "node": TurnNode(parent=parent, branch=branch, observation=TokenIds.of([100 + turn])),
    }
    return finished(Sample(**base | fields), job_seq=job_seq, session=Session(session=name_of(index), turn=turn))


def forked(index: int, branch: str, parent: int | None) -> SessionForked:
    return SessionForked(
        **WHO, index=index, session=name_of(index), branch=branch, parent=parent, reason=ForkReason.EXPLORE, job_seq=1
    )


def ended(index: int, outcome: SessionOutcome = SessionOutcome.CLOSED, **fields: Any) -> SessionEnded:
    return SessionEnded(**{**WHO, "index": index, "session": name_of(index), "outcome": outcome, "job_seq": 1} | fields)


def status_of(stream: Stream) -> GroupStatus:
    return answer(stream.ledger, LedgerQuery(group_ids=(GROUP,), tenant="acme")).groups[0]


def test_i1_i5_a_group_closes_when_its_sessions_have_ended() -> None:
    stream = Stream(
        episode(label="task-7", reasoning_history="template"), turn_job(0, 0), turn_job(0, 1), turn_job(1, 0)
    )
    assert stream.feed(opened(0), opened(1)) == []
    assert stream.feed(played(0, 0, 2)) == [Settle(ack=(2,))]
    assert stream.feed(played(0, 1, 3, parent=0)) == [Settle(ack=(3,))]
    assert stream.feed(ended(0, reward=0.5, turn_rewards={1: 0.25}, deliverables=({"kind": "patch"},))) == []
    stream.feed(played(1, 0, 4))
    closed = the_close(stream.feed(ended(1, SessionOutcome.FAILED, detail="the tool broke", reward=0.0)))
    assert (closed.reason, closed.label, closed.reasoning_history, closed.model) == (
        CloseReason.COMPLETE, "task-7", "template", "p@live",
    )  # fmt: skip
    first, second = closed.entries
    assert [(turn.turn, turn.node and turn.node.parent) for turn in first.turns] == [(0, None), (1, 0)]
    assert (first.session, first.posted, first.reward, first.turn_rewards) == (name_of(0), 0.5, 0.5, {1: 0.25})
    assert (first.deliverables, first.score_status, first.sample.token_ids) == (({"kind": "patch"},), None, TokenIds())
    assert (first.sample.status, second.sample.status) == (SampleStatus.SUCCEEDED, SampleStatus.FAILED)
    assert second.sample.error is not None
    assert second.sample.error.message == "the tool broke"
    assert (second.posted, second.reward) == (0.0, None), "a failure is never a reward of 0"
    assert stream.ledger.closed(read_of(closed)) == [Settle(ack=(1,))]


def test_a_group_whose_sessions_never_all_opened_expires_with_what_was_played() -> None:
    stream = Stream(episode(n=3), turn_job(0, 0), turn_job(1, 0), turn_job(1, 1))
    stream.feed(opened(0), opened(1), played(0, 0, 2), ended(0), played(1, 0, 3))
    closed = the_close(stream.ledger.advance(101.0, 101.0))
    assert closed.reason is CloseReason.EXPIRED
    states = [(e.sample.status, e.session, len(e.turns)) for e in closed.entries]
    assert states == [
        (SampleStatus.SUCCEEDED, name_of(0), 1),
        (SampleStatus.EXPIRED, name_of(1), 1),
        (SampleStatus.EXPIRED, None, 0),
    ]
    texts = [entry.sample.error.message for entry in closed.entries if entry.sample.error]
    assert texts == ["not finished at the group's deadline", "its session was never opened"]
    assert stream.ledger.closed(read_of(closed)) == [
        Settle(delete=(1, 4), abort=GROUP, turns=(turn_call(name_of(1), 1),))
    ]


def test_i6_branches_finish_in_any_order_and_of_each_turn_the_first_finish_counts() -> None:
    stream = Stream(episode(n=1), *(turn_job(0, turn) for turn in (0, 1, 2, 1)))
    stream.feed(opened(0), played(0, 0, 2), forked(0, "b", 0))
    assert stream.feed(played(0, 2, 4, parent=0, branch="b", attempt=3)) == [Settle(ack=(4,))]
    found = stream.feed(played(0, 1, 3, parent=0, attempt=2))
    assert found == [Settle(ack=(3,), delete=(5,), turns=(turn_call(name_of(0), 1),))], "a copy need not start"
    assert stream.feed(played(0, 1, 5, parent=0, attempt=9), played(0, 2, 4, parent=0, branch="b", attempt=9)) == []
    entry = the_close(stream.feed(ended(0))).entries[0]
    assert [(turn.turn, turn.attempt) for turn in entry.turns] == [(0, 1), (1, 2), (2, 3)]
    assert [fork.branch for fork in entry.branches] == ["b"]
    assert stream.ledger.superseded == {"duplicate": 2}
    assert {lost.attempt for lost in stream.ledger.superseded_recent} == {9}


@pytest.mark.parametrize("status", [SampleStatus.FAILED, SampleStatus.CANCELLED, SampleStatus.EXPIRED])
def test_a_lost_turn_ends_no_session_and_is_kept_where_it_has_tokens(status: SampleStatus) -> None:
    error = ErrorInfo(code=ErrorCode.INTERNAL, message="the engine fell over")
    stream = Stream(episode(n=1), *(turn_job(0, turn) for turn in range(3)))
    stream.feed(opened(0))
    lost = played(0, 0, 2, status=status, error=error, token_ids=TokenIds(), logprobs=Floats())
    assert stream.feed(lost) == [Settle(ack=(2,))]
    assert stream.feed(played(0, 1, 3, status=status)) == [Settle(ack=(3,))]
    stream.feed(played(0, 2, 4))
    assert status_of(stream).turns == {0: {0: 2, 1: 3, 2: 4}}
    entry = the_close(stream.feed(ended(0))).entries[0]
    assert entry.sample.status is SampleStatus.SUCCEEDED
    assert [(turn.turn, turn.status) for turn in entry.turns] == [(1, status), (2, SampleStatus.SUCCEEDED)]


def test_opening_again_changes_nothing_and_no_second_session_takes_an_index() -> None:
    stream = Stream(episode(n=1))
    again = opened(0, opened_at=9.0, terms=SessionTerms(policy="other"))
    stream.feed(opened(0), again, opened(0, session="s-of-another"), opened(5))
    stream.feed(
        played(0, 0), finished(Sample(index=0, turn=1, status=SampleStatus.SUCCEEDED), session=Session(session="x"))
    )
    closed = the_close(stream.feed(ended(0, session="x"), ended(0)))
    assert (closed.model, closed.entries[0].session) == ("p@live", name_of(0))
    assert [turn.turn for turn in closed.entries[0].turns] == [0]
    assert stream.ledger.superseded == {"duplicate": 2, "index out of range": 1, "not of this session": 2}


def test_what_comes_before_its_session_opened_does_not_count() -> None:
    stream = Stream(episode(n=1), turn_job(0, 0))
    assert stream.feed(played(0, 0, 2), ended(0)) == [Settle(ack=(2,))]
    assert stream.ledger.open[GROUP].finished == 0
    assert stream.ledger.superseded == {"session is not open": 2}


def test_turns_that_nobody_waits_for_are_let_go() -> None:
    """Behind the session's end, behind the group's close, and without a group: deleted, workers told."""
    stream = Stream(episode(), turn_job(0, 0), turn_job(1, 0))
    stream.feed(opened(0), opened(1))
    call = turn_call(name_of(0), 0)
    assert stream.feed(ended(0)) == [Settle(delete=(2,), turns=(call,))], "it is still being generated"
    assert stream.feed(played(0, 0, 2)) == []
    assert stream.ledger.superseded == {"session has ended": 1}
    late = turn_call(name_of(0), 1)
    assert stream.ledger.job_read(4, turn_job(0, 1), NOW) == [Settle(delete=(4,), turns=(late,))]
    closed = the_close(stream.feed(played(1, 0, 3), ended(1)))
    assert stream.ledger.closed(read_of(closed)) == [Settle(ack=(1,))]
    assert stream.ledger.job_read(5, turn_job(1, 1), NOW) == [Settle(delete=(5,), turns=(turn_call(name_of(1), 1),))]
    stranger = job(group_id="g9", indexes=(0,), session=Session(session=ids.session_id("g9", 0)))
    assert stream.ledger.job_read(6, stranger, NOW) == [
        Settle(delete=(6,), turns=(turn_call(ids.session_id("g9", 0), 0),))
    ]
    assert stream.ledger.open == {}
    assert stream.ledger.held() == 0


def test_a_job_with_a_session_of_the_callers_own_is_a_group_as_any_other() -> None:
    stream = Stream(job(session=Session(session="my-conversation")))
    assert stream.ledger.open[GROUP].held == 1
    closed = the_close(
        stream.feed(
            finished(Sample(index=0, status=SampleStatus.SUCCEEDED)),
            finished(Sample(index=1, status=SampleStatus.SUCCEEDED)),
        )
    )
    assert (closed.reason, closed.entries[0].session) == (CloseReason.COMPLETE, None)


def test_copies_of_the_opening_change_nothing_before_and_after_a_take_over_and_the_close() -> None:
    stream = Stream(episode(n=1, metadata={"first": True}), episode(n=1, metadata={"first": False}, deadline=7.0))
    events: list[Event] = [opened(0), played(0, 0), ended(0)]
    assert stream.ledger.next_deadline == 100.0
    closed = the_close(stream.feed(*events))
    assert closed.metadata == {"first": True}
    heir = Ledger(9)
    for seq in (1, 2):
        heir.job_read(seq, episode(n=1, metadata={"first": seq == 1}), NOW)
    again = [decision for seq, event in enumerate(events, 1) for decision in heir.event_read(seq, event, NOW)]
    assert the_close(again).entries == closed.entries
    assert stream.ledger.closed(read_of(closed)) == [Settle(ack=(1,), delete=(2,))]
    assert stream.ledger.job_read(3, episode(n=1), NOW) == [Settle(delete=(3,))]
    assert stream.ledger.open == {}


def verdict(finished_seq: int, turn: int, value: float, index: int = 0) -> SamplesScored:
    score = Score(scorer="exact", status=ScoreStatus.SCORED, value=value)
    results = (SampleScores(index=index, turn=turn, scores=(score,)),)
    return SamplesScored(**WHO, job_seq=1, finished_seq=finished_seq, results=results)


def test_scorers_act_once_on_the_end_of_a_session() -> None:
    stream = Stream(episode(scorers=SCORERS))
    stream.feed(opened(0), opened(1), played(0, 0), played(0, 1, parent=0))
    stream.feed(ended(0, leaf=1, reward=9.0), ended(0, leaf=0), ended(1, SessionOutcome.EXPIRED, leaf=None))
    for wrong in (verdict(3, 0, 8.0), verdict(5, 0, 8.0), verdict(6, 0, 8.0), verdict(4, 1, 8.0)):
        assert stream.feed(wrong) == [], "a verdict on a turn, on another turn, on an end that lost"
    closed = the_close(stream.feed(verdict(5, 1, 0.25)))
    first, second = closed.entries
    assert (first.reward, first.posted, first.score_status) == (0.25, 9.0, ScoreStatus.SCORED)
    assert (second.reward, second.score_status) == (None, ScoreStatus.NOT_RUN)
    assert stream.ledger.superseded["scores of a superseded finish"] == 4


def test_a_session_without_a_turn_waits_for_no_scorer() -> None:
    stream = Stream(episode(n=1, scorers=SCORERS))
    entry = the_close(stream.feed(opened(0), ended(0, leaf=3))).entries[0]
    assert (entry.sample.status, entry.reward, entry.score_status) == (
        SampleStatus.SUCCEEDED,
        None,
        ScoreStatus.NOT_RUN,
    )


def test_an_unscored_session_closes_at_the_deadline_as_not_run() -> None:
    stream = Stream(episode(n=1, scorers=SCORERS))
    assert stream.feed(opened(0), played(0, 0), ended(0, leaf=0)) == []
    entry = the_close(stream.ledger.advance(101.0, 101.0)).entries[0]
    assert (entry.sample.status, entry.score_status) == (SampleStatus.SUCCEEDED, ScoreStatus.NOT_RUN)


def test_a_cancel_ends_open_sessions_and_keeps_their_turns() -> None:
    stream = Stream(episode(), turn_job(0, 0), turn_job(1, 0))
    stream.feed(opened(0), opened(1), played(0, 0, 2), ended(0), played(1, 0, 3))
    cancel = GroupsCancelled(tenant="acme", run="r1", batch_id="b1", group_ids=(GROUP,), job_seq=3)
    closed = the_close(stream.feed(cancel))
    states = [(entry.sample.status, len(entry.turns)) for entry in closed.entries]
    assert (closed.reason, states) == (
        CloseReason.CANCELLED,
        [(SampleStatus.SUCCEEDED, 1), (SampleStatus.CANCELLED, 1)],
    )


def test_numbers_that_are_none_do_not_become_rewards() -> None:
    stream = Stream(episode(n=1, record_format="json"))
    entry = the_close(stream.feed(opened(0), ended(0, reward=math.nan, turn_rewards={0: math.inf, 1: 1.0}))).entries[0]
    assert (entry.reward, entry.posted, entry.turn_rewards) == (None, None, {1: 1.0})


def test_the_answer_names_turns_open_turns_and_ends() -> None:
    stream = Stream(episode(), turn_job(0, 0), turn_job(0, 1), turn_job(1, 4))
    stream.feed(opened(0), opened(1), played(0, 0, 2))
    assert status_of(stream) == GroupStatus(
        group_id=GROUP,
        batch_id="b1",
        run="r1",
        n=2,
        turns={0: {0: 3}},
        open_turns={0: (1,), 1: (4,)},
        open_jobs={0: {1: 3}, 1: {4: 4}},
    )
    stream.feed(ended(1))
    known = status_of(stream)
    assert (known.open_turns, known.ended, known.closed_seq) == ({0: (1,)}, (1,), 0)
    batch = answer(stream.ledger, LedgerQuery(batch_id="b1", tenant="acme")).batch
    assert batch is not None
    assert (batch.samples, batch.finished) == (2, 1)


def test_nothing_of_an_open_episode_may_be_purged() -> None:
    stream = Stream(episode(n=1), job(group_id="g2"))
    stream.feed(finished(Sample(index=0, status=SampleStatus.SUCCEEDED), group_id="g0", job_seq=1), opened(0))
    assert stream.ledger.need() == 2
    stream.feed(played(0, 0), ended(0, SessionOutcome.CLOSED))
    assert stream.ledger.need() == 2
    closed = stream.ledger.open[GROUP].record()
    stream.ledger.closed(read_of(closed))
    assert stream.ledger.need() == 5


def test_340_turns_are_one_record() -> None:
    stream = Stream(episode(n=1), *(turn_job(0, turn) for turn in range(340)))
    stream.feed(opened(0))
    for turn in range(340):
        stream.feed(played(0, turn, turn + 2, parent=turn - 1 if turn else None))
    assert stream.ledger.held() == 1
    entry = the_close(stream.feed(ended(0))).entries[0]
    assert [turn.turn for turn in entry.turns] == list(range(340))


def test_events_of_sessions_do_nothing_to_other_groups() -> None:
    stream = Stream(job())
    assert stream.feed(opened(0), ended(0), forked(0, "b", None)) == []
    assert stream.ledger.superseded == {"no group of sessions": 3}
    assert [decision for decision in stream.ledger.advance(101.0, 101.0) if isinstance(decision, Close)]


def test_what_lies_on_no_sessions_subject_is_needed_by_plain_groups_and_cancels() -> None:
    stream = Stream(episode(), job(group_id="g2"))
    stream.feed(opened(0), opened(1))
    assert (stream.ledger.need(), stream.ledger.plain_need()) == (1, 3)
    stream.feed(finished(Sample(index=0, status=SampleStatus.SUCCEEDED), group_id="g2", job_seq=2))
    assert stream.ledger.plain_need() == 3
    stream.feed(GroupsCancelled(tenant="acme", run="r1", batch_id="b1", group_ids=("g2",), job_seq=2))
    stream.ledger.closed(read_of(stream.ledger.open["g2"].record()))
    cancel = GroupsCancelled(tenant="acme", run="r1", batch_id="b1", group_ids=(GROUP,), job_seq=2)
    closed = the_close(stream.feed(cancel))
    assert (stream.ledger.need(), stream.ledger.plain_need()) == (1, 5), "a refold must find the cancel"
    stream.ledger.closed(read_of(closed, 2))
    assert list(stream.ledger.sessions_closed) == [
        (5, f"rg.0.samples.*.acme.{name_of(0)}"),
        (5, f"rg.0.samples.*.acme.{name_of(1)}"),
    ]
