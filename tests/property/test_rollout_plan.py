"""Rollouts over any course of events: who may apply a version, when it ends, and that reading twice is reading once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollgrid_checkpoint_sync import plan, rollout
from rollgrid_contracts.checkpoints import AdoptedVersion, OnDeadline, PolicyState, RolloutRequest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_weights.rollback import roll_back

from tests.support.policies import policy_state

START = policy_state(policy="m")
DEADLINE_S = 100.0
ASKED = st.builds(
    RolloutRequest,
    canary=st.integers(0, 3),
    canary_s=st.sampled_from([0.0, 5.0, 30.0]),
    at_once=st.integers(0, 3),
    on_deadline=st.sampled_from(list(OnDeadline)),
)
NAMES = [f"w-{i}" for i in range(6)]


@dataclasses.dataclass
class Worker:
    """What a worker is told by the state, it does: at some time."""

    version: int
    draining: bool = False
    quarantined: str | None = None
    problem: str | None = None

    def lease(self, name: str) -> WorkerState:
        return WorkerState(
            worker=name,
            incarnation=name,
            pool="pool",
            engine="scripted",
            device="cpu",
            slots=1,
            loaded=(LoadedVersion(policy="m", version=self.version),),
            draining=self.draining,
            quarantined=self.quarantined,
            weights_problem=self.problem,
        )


def fleet(**workers: int) -> dict[str, Worker]:
    return {name: Worker(version) for name, version in workers.items()}


def leases(workers: dict[str, Worker]) -> list[WorkerState]:
    return [worker.lease(name) for name, worker in workers.items()]


def target(state: PolicyState, name: str) -> int:
    """The contract, as a worker reads it."""
    if state.rollout is None:
        return state.desired
    return state.rollout.version if name in state.rollout.workers else state.rollout.previous


def adopt(state: PolicyState, version: int, asked: RolloutRequest, now: float) -> PolicyState:
    return plan.adopt(state, AdoptedVersion(version=version, prefix=f"{version}/"), asked, now, deadline_s=DEADLINE_S)


class Fleet(RuleBasedStateMachine):
    @initialize(count=st.integers(0, 5))
    def begin(self, count: int) -> None:
        self.now, self.state, self.everywhere = 1000.0, START, 0
        self.workers = {name: Worker(0) for name in NAMES[:count]}

    def advance(self) -> None:
        before = self.state
        seen = leases(self.workers)
        self.state = rollout.advance(before, seen, self.now)
        assert rollout.advance(self.state, seen, self.now) == self.state, "level-triggered: twice is once"
        assert rollout.advance(before, list(reversed(seen)), self.now) == self.state, "whatever the order"
        self.check_step(before)

    def check_step(self, before: PolicyState) -> None:
        was, now = before.rollout, self.state.rollout
        assert self.state.history == before.history, "advance names workers; it does not decide versions"
        if was is None or was.failure is not None:
            assert self.state is before
            return
        holding = {n for n, w in self.workers.items() if rollout.holds(before, w.lease(n), was.version)}
        if now is None:
            ready = {n for n, w in self.workers.items() if rollout.ready(before, w.lease(n))}
            late = self.now >= was.deadline and was.on_deadline is OnDeadline.ALARM
            assert ready <= holding or late, "it ends when all have it, or late with an alarm"
            assert late or not was.canary or was.proven_at or self.now - was.held_since >= was.canary_s
            return
        if now.failure is not None:
            assert now.workers == ()
            return
        assert set(now.workers) <= self.workers.keys(), "the dead are dropped"
        kept = [name for name in was.workers if name in self.workers]
        assert list(now.workers[: len(kept)]) == kept, "the version is taken away from nobody that is there"
        new = set(now.workers) - set(was.workers)
        for name in new:
            assert rollout.ready(before, self.workers[name].lease(name)), "only who is ready is named"
        unproven = [n for n in now.workers if n not in holding and not self.workers[n].draining]
        if not now.proven_at:
            staying = [n for n in now.workers if not self.workers[n].draining]
            assert len(staying) <= max(now.canary, len([n for n in was.workers if n in staying]))
        elif now.at_once and new - holding:
            assert len(unproven) <= now.at_once, "never more at once"

    @rule(asked=ASKED)
    def publish(self, asked: RolloutRequest) -> None:
        before = self.state
        if before.rollout is not None and before.rollout.failure is not None:
            with pytest.raises(plan.RollbackPending):
                adopt(before, before.newest + 1, asked, self.now)
            return
        if before.rollout is None:
            self.everywhere = before.desired
        self.state = adopt(before, before.newest + 1, asked, self.now)
        assert self.state.newest > before.newest
        if self.state.rollout is not None:
            assert self.state.rollout.previous == self.everywhere, "what was last everywhere"
        self.advance()

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0, 40.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.advance()

    @rule(name=st.sampled_from(NAMES))
    def joins(self, name: str) -> None:
        self.workers.setdefault(name, Worker(target(self.state, name)))
        self.advance()

    @rule(name=st.sampled_from(NAMES))
    def dies(self, name: str) -> None:
        self.workers.pop(name, None)
        self.advance()

    @rule(name=st.sampled_from(NAMES))
    def applies(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].version = target(self.state, name)
            self.advance()

    @rule(name=st.sampled_from(NAMES))
    def drains(self, name: str) -> None:
        if name in self.workers:
            self.workers[name].draining = True
            self.advance()

    @rule(name=st.sampled_from(NAMES), what=st.sampled_from(["quarantine", "this", "other", "heal"]))
    def complains(self, name: str, what: str) -> None:
        worker, running = self.workers.get(name), self.state.rollout
        if worker is None:
            return
        worker.quarantined = "fingerprint differs" if what == "quarantine" else None
        version = running.version if running is not None else self.state.desired
        problems = {"this": f"version {version}: does not fit", "other": f"version {version}0: does not fit"}
        worker.problem = problems.get(what)
        canaries = [n for n in running.workers if n in self.workers and not self.workers[n].draining] if running else []
        self.advance()
        if running is not None and running.failure is None and name in canaries[: running.canary]:
            failed = self.state.rollout is not None and self.state.rollout.failure is not None
            assert failed or what in ("other", "heal") or self.state.rollout is None
            assert what not in ("quarantine", "this") or failed

    @precondition(lambda self: self.state.rollout is not None and self.state.rollout.failure is not None)
    @rule()
    def reason_recorded(self) -> None:
        before = self.state
        assert before.rollout is not None
        self.state = plan.finished(before)
        assert plan.finished(self.state) == self.state
        assert (self.state.rollout, self.state.desired) == (None, before.rollout.previous)
        assert self.state.newest == before.newest, "the failed one never comes back by itself"
        assert before.rollout.version in self.state.history
        self.everywhere = self.state.desired

    @rule(data=st.data())
    def somebody_rolls_back(self, data: st.DataObject) -> None:
        if self.state.rollout is None or self.state.rollout.failure is None:
            self.state = roll_back(self.state, data.draw(st.sampled_from(self.state.history)))
            self.everywhere = self.state.desired
            assert self.state.rollout is None

    @invariant()
    def desired_is_known(self) -> None:
        state = self.state
        assert state.newest == max(state.history)
        assert state.history[-1] == state.desired
        assert state.desired_prefix == (f"{state.desired}/" if state.desired else None)
        if state.rollout is not None:
            assert (state.rollout.version, state.rollout.previous) == (state.desired, self.everywhere)
            for name in set(NAMES) - set(state.rollout.workers):
                assert target(state, name) == self.everywhere

    def teardown(self) -> None:
        """Whatever happened, past the deadline it is over."""
        self.now += DEADLINE_S
        self.advance()
        assert plan.finished(self.state).rollout is None


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(ASKED, st.integers(1, 6))
def test_healthy_workers_all_get_it_before_the_deadline(asked: RolloutRequest, count: int) -> None:
    workers = {name: Worker(0) for name in NAMES[:count]}
    state, now, steps = adopt(START, 1, asked, 0.0), 0.0, 0
    while True:
        state = rollout.advance(state, leases(workers), now)
        if state.rollout is None:
            break
        for name, worker in workers.items():
            worker.version = target(state, name)
        now, steps = now + 5.0, steps + 1
        assert now < DEADLINE_S
    assert (state.desired, state.history) == (1, (0, 1))
    for name, worker in workers.items():
        worker.version = target(state, name)
    assert rollout.missing(state, leases(workers)) == []
    if asked.at_once:
        assert steps * max(asked.at_once, asked.canary) >= count - asked.canary


def test_a_canary_proves_it_for_its_time_and_starts_again_when_it_falters() -> None:
    workers = fleet(a=0, b=0, c=0)
    asked = RolloutRequest(canary=1, canary_s=10.0, at_once=1)

    def at(now: float) -> PolicyState:
        return rollout.advance(state, leases(workers), now)

    state = adopt(START, 1, asked, 0.0)
    state = at(0.0)
    assert state.rollout is not None
    (canary,) = state.rollout.workers
    workers[canary].version = 1
    state = at(1.0)
    workers[canary].problem = "object storage does not answer"
    state = at(5.0)
    workers[canary].problem = None
    state = at(6.0)
    assert state.rollout is not None
    assert state.rollout.held_since == 6.0
    state = at(15.9)
    assert state.rollout is not None
    assert (state.rollout.workers, state.rollout.proven_at) == ((canary,), 0.0)
    state = at(16.0)
    assert state.rollout is not None
    assert (len(state.rollout.workers), state.rollout.proven_at) == (2, 16.0)


def test_a_canary_that_dies_is_replaced_and_a_joiner_must_have_it() -> None:
    workers = fleet(a=0, b=0)
    state = adopt(START, 1, RolloutRequest(canary=1, at_once=1), 0.0)
    state = rollout.advance(state, leases(workers), 0.0)
    assert state.rollout is not None
    (first,) = state.rollout.workers
    del workers[first]
    state = rollout.advance(state, leases(workers), 1.0)
    assert state.rollout is not None
    (second,) = state.rollout.workers
    assert second != first
    workers[second].version = 1
    workers["late"] = Worker(target(state, "late"))
    assert workers["late"].version == 0, "it loads what is proven"
    state = rollout.advance(state, leases(workers), 2.0)
    assert state.rollout is not None
    assert state.rollout.workers == (second, "late")
    workers["late"].version = 1
    assert rollout.advance(state, leases(workers), 3.0).rollout is None


def test_a_canary_that_has_met_the_version_before_is_believed_at_once() -> None:
    workers = fleet(a=0)
    workers["a"].problem = "version 1: does not fit"
    found = rollout.advance(adopt(START, 1, RolloutRequest(canary=1), 0.0), leases(workers), 0.0).rollout
    assert found is not None
    assert found.failure is not None


def test_the_reasons_name_the_canary_and_the_deadline() -> None:
    workers = fleet(a=0)
    state = rollout.advance(adopt(START, 1, RolloutRequest(canary=1), 0.0), leases(workers), 0.0)
    workers["a"].problem = "version 1: tensor x has another shape"
    failed = rollout.advance(state, leases(workers), 1.0).rollout
    assert failed is not None
    assert failed.failure is not None
    assert (failed.failure.code, failed.failure.field) == (ErrorCode.ENGINE_ERROR, "rollout")
    assert "canary a" in failed.failure.message
    assert "tensor x" in failed.failure.message
    workers["a"].problem = "version 12: tensor x has another shape"
    late = rollout.advance(state, leases(workers), DEADLINE_S).rollout
    assert late is not None
    assert late.failure is not None
    assert (late.failure.code, late.failure.limit) == (ErrorCode.EXPIRED, "deadline_s=100")
    assert "no canary has proven it" in late.failure.message


def test_a_newer_version_goes_to_the_workers_that_had_left_already() -> None:
    workers = fleet(a=0, b=0, c=0, d=0)
    asked = RolloutRequest(canary=1)
    state, seen = START, set()
    for version in range(1, 9):
        state = rollout.advance(adopt(state, version, asked, 0.0), leases(workers), 0.0)
        assert state.rollout is not None
        assert state.rollout.previous == 0
        seen |= set(state.rollout.workers)
        for name in state.rollout.workers:
            workers[name].version = version
    assert len(seen) == 1, "nobody goes back to what was before only to make room"


def test_without_canary_and_limit_there_is_no_rollout() -> None:
    assert adopt(START, 1, RolloutRequest(canary_s=5.0), 0.0).rollout is None
    asked = RolloutRequest(at_once=2, deadline_s=7.0)
    found = adopt(START, 1, asked, 1.0).rollout
    assert found is not None
    assert (found.deadline, found.workers) == (8.0, ())
