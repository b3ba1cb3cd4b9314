"""What records say of versions: why nobody could serve a job, and how stale what was served is."""

from __future__ import annotations

import pytest
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import CheckpointKind, PolicyState, staleness
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_contracts.jobs import SampleGroup, VersionRule, VersionSpan, WeightConstraint
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed
from rollgrid_trajectory_logger.policies import stamped, unmet

from tests.support.policies import policy_state

from .test_fold import Stream, finished, job, sample, the_close


def state(*history: int, newest: int | None = None) -> PolicyState:
    newest = max(history) if newest is None else newest
    return policy_state(tenant="acme", desired=history[-1], newest=newest, history=history)


def worker(*versions: int, pool: str = "pool", policy: str = "p", quarantined: str | None = None) -> WorkerState:
    loaded = tuple(
        LoadedVersion(policy=policy, tenant="acme", version=version, kind=CheckpointKind.LORA) for version in versions
    )
    return WorkerState(
        worker="w",
        incarnation="w/1",
        pool=pool,
        engine="scripted",
        device="cpu",
        slots=1,
        loaded=loaded,
        quarantined=quarantined,
    )


def asking(rule: VersionRule, value: int) -> SampleGroup:
    return job(weights=WeightConstraint(rule=rule, value=value))


@pytest.mark.parametrize(
    ("rule", "value", "workers", "met"),
    [
        (VersionRule.EXACT, 2, [worker(3)], False),
        (VersionRule.EXACT, 2, [worker(3), worker(2, 3)], True),
        (VersionRule.MIN, 4, [worker(3), worker(1)], False),
        (VersionRule.MIN, 3, [worker(3)], True),
        (VersionRule.MAX_STALENESS, 0, [worker(2)], False),
        (VersionRule.MAX_STALENESS, 1, [worker(2)], True),
        (VersionRule.LATEST, 0, [worker(1)], True),
        # who does not serve the job says nothing of it, and without anybody it is no matter of versions
        (VersionRule.EXACT, 2, [worker(3), worker(2, pool="other"), worker(2, policy="q")], False),
        (VersionRule.EXACT, 2, [worker(3), worker(2, quarantined="wrong")], False),
        (VersionRule.EXACT, 2, [], True),
    ],
)
def test_a_job_is_unmet_when_no_serving_worker_has_a_version_for_it(
    rule: VersionRule, value: int, workers: list[WorkerState], met: bool
) -> None:
    why = unmet(asking(rule, value), state(0, 1, 2, 3), workers)
    assert (why is None) is met, why
    assert met or f"{rule.value} {value}" in str(why)


def test_what_was_never_begun_for_want_of_a_version_ends_as_that() -> None:
    stream = Stream(asking(VersionRule.MIN, 9))
    assert stream.ledger.constrained(101.0)
    assert not stream.ledger.constrained(99.0)
    closed = the_close(stream.ledger.advance(101.0, 101.0, lambda job: f"nobody has {job.weights.value}"))
    assert (closed.reason, closed.n) == (CloseReason.EXPIRED, 2)
    for entry in closed.entries:
        error = entry.sample.error
        assert error is not None
        assert (entry.sample.status, error.code, error.retryable) == (
            SampleStatus.EXPIRED,
            ErrorCode.VERSION_UNAVAILABLE,
            True,
        )
        assert (error.message, error.field) == ("nobody has 9", "weights")


def test_what_was_begun_or_asks_for_nothing_expires_plainly() -> None:
    begun = Stream(asking(VersionRule.MIN, 9))
    begun.feed(finished(sample(0)))
    plain = Stream(job())
    for stream in (begun, plain):
        assert not stream.ledger.constrained(101.0)
        closed = the_close(stream.ledger.advance(101.0, 101.0, lambda _: "nobody"))
        error = closed.entries[1].sample.error
        assert error is not None
        assert error.code is ErrorCode.EXPIRED


def test_staleness_counts_changes_of_what_is_desired() -> None:
    now = state(0, 1, 2, 5)
    assert [staleness(now, version) for version in (5, 2, 1, 0)] == [0, 1, 2, 3]
    assert staleness(now, 7) == 0  # newer than all: not heard of yet
    assert staleness(now, 4) == 4  # no version that ever ran: older than all
    back = state(0, 1, 2, 1)
    assert [staleness(back, version) for version in (1, 2, 0)] == [0, 1, 3]
    on = state(0, 1, 2, 1, 3)
    assert [staleness(on, version) for version in (3, 1, 2)] == [0, 1, 2]


def spans(*versions: int) -> tuple[VersionSpan, ...]:
    return tuple(VersionSpan(version=version, start=at, end=at + 1) for at, version in enumerate(versions))


def test_a_record_says_how_stale_its_oldest_token_was() -> None:
    fresh = Sample(index=0, status=SampleStatus.SUCCEEDED, token_ids=TokenIds.of([1, 2]), version_spans=spans(2, 3))
    turns = (
        Sample(index=1, status=SampleStatus.SUCCEEDED, version_spans=spans(1)),
        Sample(index=1, status=SampleStatus.SUCCEEDED, version_spans=spans(3)),
    )
    closed = GroupClosed(
        tenant="acme",
        run="r",
        batch_id="b",
        group_id="g",
        n=3,
        policy="p",
        reason=CloseReason.COMPLETE,
        created_at=0.0,
        closed_at=1.0,
        entries=(
            Entry(sample=fresh),
            Entry(sample=Sample(index=1, status=SampleStatus.SUCCEEDED), turns=turns),
            Entry(sample=Sample(index=2, status=SampleStatus.EXPIRED)),
        ),
    )
    told = stamped(closed, state(0, 1, 2, 3)).entries
    assert [entry.staleness for entry in told] == [1, 2, None]
    assert [entry.versions for entry in told] == [(2, 3), (1, 3), ()]
