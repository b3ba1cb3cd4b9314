"""The fold's corners that shuffled streams do not reach: refusals, forged or odd events.  Sessions: `test_sessions`."""

from __future__ import annotations

import math
from typing import Any

import pytest
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import LedgerQuery
from rollgrid_contracts.jobs import Job, SampleGroup, SamplingParams
from rollgrid_contracts.samples import GroupsCancelled, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerSpec, ScoreStatus, reward_formula
from rollgrid_contracts.trajectories import CloseReason, GroupClosed, count_statuses
from rollgrid_trajectory_logger.closed_index import ClosedIndex, ClosedRead, format_counts, parse_counts
from rollgrid_trajectory_logger.ledger import Close, Decision, Event, Ledger, Settle
from rollgrid_trajectory_logger.query import answer

NOW = 50.0
WHO: dict[str, Any] = {"tenant": "acme", "run": "r1", "group_id": "g1"}
SUBJECT = "rg.0.trajectories.acme.r1"


def job(**fields: Any) -> SampleGroup:
    base: dict[str, Any] = {
        **WHO,
        "batch_id": "b1",
        "n": 2,
        "indexes": (0, 1),
        "policy": "p",
        "pool": "pool",
        "prompt_token_ids": TokenIds.of([1]),
        "sampling": SamplingParams(max_tokens=4),
        "created_at": 1.0,
        "deadline": 100.0,
    }
    return SampleGroup(**base | fields)


def finished(*samples: Sample, job_seq: int = 1, **fields: Any) -> SamplesFinished:
    base: dict[str, Any] = {**WHO, "batch_id": "b1", "n": 2, "policy": "p", "job_seq": job_seq}
    return SamplesFinished(**base | fields, samples=samples)


def sample(index: int, **fields: Any) -> Sample:
    return Sample(**{"index": index, "status": SampleStatus.SUCCEEDED, **fields})


class Stream:
    """Feeds events under rising sequences."""

    def __init__(self, *jobs: Job) -> None:
        self.ledger = Ledger(3)
        self.seq = 0
        for seq, item in enumerate(jobs, 1):
            assert self.ledger.job_read(seq, item, NOW) == []
        self.ledger.live = True

    def feed(self, *events: Event) -> list[Decision]:
        decisions: list[Decision] = []
        for event in events:
            self.seq += 1
            decisions += self.ledger.event_read(self.seq, event, NOW)
        return decisions


def the_close(decisions: list[Decision]) -> GroupClosed:
    (close,) = [decision for decision in decisions if isinstance(decision, Close)]
    assert close.subject == SUBJECT
    return close.closed


def read_of(closed: GroupClosed, seq: int = 1) -> ClosedRead:
    counts = tuple(count_statuses(closed.entries).values())
    return ClosedRead(closed.group_id, closed.batch_id, SUBJECT, seq, counts, NOW)


@pytest.mark.parametrize("value", [math.nan, math.inf, None])
def test_a_verdict_that_is_no_number_is_a_failure_of_the_verifier(value: float | None) -> None:
    stream = Stream(job(n=1, indexes=(0,), scorers=(ScorerSpec(name="exact", type="exact"),)))
    stream.feed(finished(sample(0), n=1))
    verdict = Score(scorer="exact", status=ScoreStatus.SCORED, value=value)
    scored = SamplesScored(**WHO, job_seq=1, finished_seq=1, results=(SampleScores(index=0, scores=(verdict,)),))
    entry = the_close(stream.feed(scored)).entries[0]
    assert (entry.reward, entry.score_status) == (None, ScoreStatus.VERIFIER_ERROR)


def test_unasked_and_repeated_verdicts_change_nothing() -> None:
    stream = Stream(job(n=1, indexes=(0,), scorers=(ScorerSpec(name="exact", type="exact"),)))
    stream.feed(finished(sample(0), n=1))

    def scored(scorer: str, value: float) -> SamplesScored:
        verdict = Score(scorer=scorer, status=ScoreStatus.SCORED, value=value)
        return SamplesScored(**WHO, job_seq=1, finished_seq=1, results=(SampleScores(index=0, scores=(verdict,)),))

    assert stream.feed(scored("other", 9.0)) == []
    closed = the_close(stream.feed(scored("exact", 1.0), scored("exact", 2.0)))
    assert [score.value for score in closed.entries[0].scores] == [1.0]


def test_i7_events_of_another_tenant_or_run_are_not_folded() -> None:
    stream = Stream(job())
    stream.feed(finished(sample(0), sample(1), tenant="globex"), finished(sample(0), run="r2"))
    stream.feed(GroupsCancelled(tenant="globex", run="r1", batch_id="b1", group_ids=("g1",), job_seq=1))
    assert list(stream.ledger.open) == ["g1"]
    assert stream.ledger.open["g1"].winners == {}


def test_indexes_outside_the_group_are_superseded() -> None:
    stream = Stream(job())
    stream.feed(finished(sample(2), sample(-1)))
    assert stream.ledger.superseded == {"index out of range": 2}


def test_a_refusal_needs_all_its_samples_failed_and_no_job() -> None:
    error = ErrorInfo(code=ErrorCode.EMPTY_PROMPT, message="empty")
    failed = [Sample(index=index, status=SampleStatus.FAILED, error=error) for index in range(2)]
    stream = Stream()
    assert stream.feed(finished(failed[0], job_seq=0)) == []
    assert stream.feed(finished(sample(0), sample(1), job_seq=0)) == []
    assert stream.ledger.settled_to() == 2
    closed = the_close(stream.feed(finished(*failed, job_seq=0)))
    assert (closed.reason, closed.error) == (CloseReason.REJECTED, error)
    assert stream.ledger.settled_to() == 2, "nothing but this event remembers the refusal until it is closed"
    assert stream.ledger.need() == 3
    assert stream.ledger.closed(read_of(closed)) == [Settle()]
    assert stream.ledger.settled_to() == 3


def test_events_behind_one_that_waits_keep_their_order() -> None:
    stream = Stream(job())
    assert stream.feed(finished(sample(0, attempt=9), job_seq=2), finished(sample(0), job_seq=1)) == []
    assert (stream.ledger.blocked_on, stream.ledger.waiting) == (2, 2)
    stream.ledger.job_read(2, job(), NOW)
    assert stream.ledger.open["g1"].winners[0][0].sample.attempt == 9


def test_an_event_that_is_delivered_again_is_no_duplicate() -> None:
    stream = Stream(job())
    event = finished(sample(0))
    assert stream.feed(event) == []
    assert stream.ledger.event_read(1, event, NOW) == []
    assert stream.ledger.superseded == {}


def test_a_cancel_is_needed_until_its_close_is_stored() -> None:
    stream = Stream(job(), job(group_id="g2"))
    stream.feed(finished(sample(0), sample(1), group_id="g0", job_seq=1))
    cancel = GroupsCancelled(tenant="acme", run="r1", batch_id="b1", group_ids=("g1",), job_seq=2)
    closed = the_close(stream.feed(cancel))
    stream.feed(finished(sample(0), group_id="g2", job_seq=2))
    assert (closed.reason, stream.ledger.need()) == (CloseReason.CANCELLED, 2)
    stream.ledger.closed(read_of(closed))
    assert stream.ledger.need() == 3


def test_a_job_that_comes_after_its_close_is_deleted_and_one_that_came_back_is_acknowledged() -> None:
    stream = Stream(job(n=1, indexes=(0,)))
    closed = the_close(stream.feed(finished(sample(0), n=1)))
    stream.ledger.closed(read_of(closed))
    assert stream.ledger.job_read(2, job(n=1, indexes=(0,)), NOW) == [Settle(delete=(2,))]
    heir = Ledger(4)
    heir.closed(read_of(closed))
    assert heir.job_read(1, job(n=1, indexes=(0,)), NOW) == [Settle(ack=(1,))]


def test_a_second_close_of_a_group_is_noticed() -> None:
    ledger = Ledger(1)
    read = ClosedRead("g1", "b1", SUBJECT, 5, (2, 0, 0, 0), NOW)
    ledger.closed(read)
    ledger.closed(read)
    assert ledger.double_closes == 0
    ledger.closed(read._replace(seq=6))
    assert ledger.double_closes == 1


def test_formula_says_what_combine_does() -> None:
    exact, fmt = ScorerSpec(name="exact", type="a"), ScorerSpec(name="fmt", type="b", weight=0.5)
    gate = ScorerSpec(name="safe", type="c", gate=True)
    assert reward_formula(()) is None
    assert reward_formula((exact, fmt)) == "1*exact + 0.5*fmt"
    assert reward_formula((exact, gate, fmt)) == "(1*exact + 0.5*fmt) * gate(safe)"


def test_counts_survive_their_header() -> None:
    assert parse_counts(format_counts((5, 1, 2, 0))) == (5, 1, 2, 0)
    assert format_counts((8, 0, 0, 0)) == "succeeded=8,failed=0,cancelled=0,expired=0"
    assert parse_counts("failed=1,of_tomorrow=3") == (0, 1, 0, 0)


def test_old_closes_are_forgotten_with_their_batches() -> None:
    index = ClosedIndex()
    for number in range(4):
        index.closed(
            ClosedRead(f"g{number}", f"b{number // 2}", SUBJECT, number + 1, (1, 0, 0, 0), float(number)), None
        )
    assert index.forget(before=1.5, at_most=100) == 0
    assert (sorted(index.groups), sorted(index.batches)) == (["g2", "g3"], ["b1"])
    assert index.forget(before=0.0, at_most=1) == 1
    assert sorted(index.groups) == ["g3"]


def test_an_answer_names_what_is_done_and_no_other_tenants_groups() -> None:
    stream = Stream(job())
    stream.feed(finished(sample(1)))
    known = answer(stream.ledger, LedgerQuery(group_ids=("g1", "nope"), batch_id="b1", tenant="acme"))
    assert (known.groups[0].done, known.groups[1].known, known.folded_to) == ({1: 1}, False, 1)
    assert known.batch is not None
    assert (known.batch.samples, known.batch.finished, known.batch.open_groups) == (2, 1, ("g1",))
    foreign = answer(stream.ledger, LedgerQuery(group_ids=("g1",), batch_id="b1", tenant="globex"))
    assert (foreign.groups[0].known, foreign.batch) == (False, None)


def test_timers_of_closed_groups_do_not_pile_up_and_open_ones_still_end() -> None:
    """Groups close long before their deadline: what the ledger keeps follows what is open."""
    ledger = Ledger(3)
    ledger.job_read(1, job(group_id="slow", deadline=90.0), NOW)
    for seq in range(2, 6000):
        ledger.job_read(seq, job(group_id=f"g{seq}", deadline=100.0), NOW)
        ledger.closed(ClosedRead(f"g{seq}", "b1", SUBJECT, seq, (2, 0, 0, 0), NOW))
    assert ledger.timers < 2000
    assert ledger.next_deadline == 90.0
    expired = [decision for decision in ledger.advance(95.0, 95.0) if isinstance(decision, Close)]
    assert [close.group_id for close in expired] == ["slow"]
