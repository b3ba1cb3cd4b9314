"""Subjects can be parsed back, streams do not overlap, consumers read inside their stream."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts import ids, subjects, topology
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.subjects import PoolLane

NAMES = st.from_regex(ids.NAME_PATTERN, fullmatch=True)
LABELS = st.from_regex(ids.LABEL_PATTERN, fullmatch=True)
LANES = st.builds(
    PoolLane,
    st.builds(ids.pool_id, LABELS, st.just("float32"), st.just("cpu"), LABELS),
    st.sampled_from(Priority),
    NAMES,
)
NATS_DURABLE = re.compile(r"[^\s.*>/\\\x00-\x1f]+")


def matches(pattern: str, subject: str) -> bool:
    """NATS matching of a literal subject by a pattern."""
    wanted, got = pattern.split("."), subject.split(".")
    for position, token in enumerate(wanted):
        if token == ">":
            return len(got) > position
        if position >= len(got) or token not in ("*", got[position]):
            return False
    return len(wanted) == len(got)


def covers(outer: str, inner: str) -> bool:
    """Whether every subject that matches `inner` matches `outer`."""
    wide, narrow = outer.split("."), inner.split(".")
    for position, token in enumerate(wide):
        if token == ">":
            return len(narrow) > position
        if position >= len(narrow) or narrow[position] == ">":
            return False
        if token != "*" and token != narrow[position]:
            return False
    return len(wide) == len(narrow)


def overlaps(one: str, other: str) -> bool:
    for left, right in itertools.zip_longest(one.split("."), other.split(".")):
        if ">" in (left, right) and None not in (left, right):
            return True
        if left is None or right is None:
            return False
        if "*" not in (left, right) and left != right:
            return False
    return True


def every_subject(tenant: str, label: str, lane: PoolLane) -> dict[str, str]:
    """Every durable subject with the stream it must land in."""
    return {
        subjects.submit(tenant): "RG_SUBMIT",
        subjects.jobs_pool(*lane): "RG_JOBS",
        subjects.jobs_worker(label): "RG_JOBS",
        subjects.jobs_episode(tenant): "RG_JOBS",
        subjects.samples(ScorerKind.REWARD_MODEL, tenant, label): "RG_SAMPLES",
        subjects.samples(ScorerKind.DONE, tenant): "RG_SAMPLES",
        subjects.trajectories(tenant, label): "RG_TRAJECTORIES",
        subjects.trajectories(tenant, ids.REJECTED_RUN): "RG_TRAJECTORIES",
        subjects.checkpoints(tenant, label): "RG_CHECKPOINTS",
        subjects.audit(tenant): "RG_AUDIT",
    }


@given(tenant=NAMES, label=LABELS, lane=LANES)
def test_every_subject_lands_in_exactly_its_stream(tenant: str, label: str, lane: PoolLane) -> None:
    for subject, stream in every_subject(tenant, label, lane).items():
        owners = [s.name for s in topology.STREAMS if any(matches(pattern, subject) for pattern in s.subjects)]
        assert owners == [stream], subject
        assert all(token and not set(token) & set("*> \t\r\n") for token in subject.split("."))


def test_streams_do_not_overlap() -> None:
    for one, other in itertools.combinations(topology.STREAMS, 2):
        assert not any(overlaps(a, b) for a in one.subjects for b in other.subjects), (one.name, other.name)


@given(lane=LANES, worker=LABELS)
def test_consumers_read_inside_their_stream_under_names_nats_accepts(lane: PoolLane, worker: str) -> None:
    streams = {stream.name: stream for stream in topology.STREAMS}
    consumers = [
        topology.ledger_consumer(0),
        topology.ledger_consumer(17),
        topology.ledger_samples_consumer(3),
        topology.pool_consumer(lane),
        topology.lane_consumer(worker),
        *map(topology.scorer_consumer, [kind for kind in ScorerKind if kind is not ScorerKind.DONE]),
        topology.ARCHIVER,
        topology.submit_consumer(lane.tenant),
        topology.tenant_consumer(lane.tenant),
        topology.CHECKPOINT_WATCH,
    ]
    for consumer in consumers:
        assert any(covers(s, consumer.filter_subject) for s in streams[consumer.stream].subjects), consumer
        assert NATS_DURABLE.fullmatch(consumer.durable), consumer
    names = [(consumer.stream, consumer.durable) for consumer in consumers]
    assert len(set(names)) == len(names)


@given(one=LANES, other=LANES)
def test_lanes_share_neither_durable_nor_jobs(one: PoolLane, other: PoolLane) -> None:
    first, second = topology.pool_consumer(one), topology.pool_consumer(other)
    assert (first.durable == second.durable) == (one == other)
    assert overlaps(first.filter_subject, second.filter_subject) == (one == other)


@given(lane=LANES, pool=st.builds(ids.pool_id, LABELS, LABELS, LABELS, LABELS))
def test_a_sampler_finds_its_own_lanes_by_prefix_only(lane: PoolLane, pool: str) -> None:
    durable = topology.pool_consumer(lane).durable
    assert durable.startswith(topology.pool_durable_prefix(lane.pool))
    assert durable.startswith(topology.pool_durable_prefix(pool)) == (pool == lane.pool)


@given(tenant=NAMES, run=LABELS)
def test_tenant_and_run_come_back_out_of_their_subjects(tenant: str, run: str) -> None:
    assert subjects.tenant_of_submit(subjects.submit(tenant)) == tenant
    assert subjects.run_of_trajectory(subjects.trajectories(tenant, run)) == (tenant, run)
    assert matches(subjects.trajectories_of(tenant), subjects.trajectories(tenant, run))


@given(tenant=NAMES, other=NAMES, run=LABELS)
def test_i7_a_tenants_trajectory_filter_matches_no_other_tenant(tenant: str, other: str, run: str) -> None:
    assert matches(subjects.trajectories_of(tenant), subjects.trajectories(other, run)) == (tenant == other)


@pytest.mark.parametrize(
    "text",
    ["", "a.b", "a*", ">", "a b", "-a", "_a", "a\n", "ä", "a" * 64, "a/b", "..", "a\x00", "ａ"],
)
def test_names_that_could_inject_a_subject_are_refused(text: str) -> None:
    assert not ids.is_name(text)
    assert not ids.is_label(text)


def test_the_rejected_run_is_no_run_a_tenant_can_name() -> None:
    assert not ids.is_label(ids.REJECTED_RUN)
    assert not ids.is_label(ids.NO_SESSION)


def test_jobs_wait_for_the_ledger_longer_than_any_deadline() -> None:
    assert topology.ledger_consumer(1).ack_wait_s == topology.LEDGER_ACK_WAIT_S
    assert topology.LEDGER_ACK_WAIT_S > 7 * 24 * 3600
    assert topology.ledger_consumer(1).max_ack_pending == -1
    assert topology.JOBS.retention is topology.Retention.INTEREST


def test_nothing_is_thrown_away_when_full() -> None:
    for stream in topology.STREAMS:
        assert stream.max_bytes > 0, "unbounded"
        assert not stream.discard_old or stream is topology.CHECKPOINTS
