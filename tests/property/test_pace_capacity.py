"""A39: whatever lags, gets lost or jumps, a paced run keeps its staleness bound, throws nothing away and never stands still."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import PolicyState, Rollout
from rollgrid_contracts.fleet import RunPace
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_ingest import capacity

from tests.support.policies import policy_state

NOW = 100.0


def policy(history: tuple[int, ...] = (0,), **changes: object) -> PolicyState:
    return policy_state(**{"desired": history[-1], "newest": max(history), "history": history} | changes)


@dataclass
class Run:
    """A trainer that takes groups in the order of their admission, `batch` for each version, and a fleet that lags."""

    rng: random.Random
    pace: RunPace
    state: PolicyState
    admitted: list[int] = field(default_factory=list)
    """Of each group that is to be trained on, in order: the oldest version its workers may have run."""
    asked: int = 0
    consumed: int = 0
    batches: int = 0

    def submit(self, groups: int) -> bool:
        self.pace = capacity.seen(self.pace, self.state, NOW)
        if groups > capacity.room(self.pace):
            return False
        self.batches += 1
        self.pace = capacity.admit(self.pace, f"b{self.batches}", groups, NOW)
        least = capacity.floor(self.pace, self.state, NOW)
        assert least is None or least <= self.state.desired, "a job must not wait for a version that is not there"
        ran = [version for version in self.state.history if least is None or version >= least]
        self.admitted += [self.rng.choice(ran) for _ in range(groups)]
        self.asked += groups
        return True

    def lose(self) -> None:
        """A group that is still out closes without a success."""
        if len(self.admitted) > self.consumed:
            self.admitted.pop(self.rng.randrange(self.consumed, len(self.admitted)))
            self.asked -= 1
            self.pace = capacity.give_back(self.pace, 1, self.pace.cursor + 1)

    def train(self) -> bool:
        """One step, and the version it makes.  False when groups are wanting."""
        batch = self.pace.batch
        if len(self.admitted) - self.consumed < batch:
            return False
        history = self.state.history
        for version in self.admitted[self.consumed : self.consumed + batch]:
            behind = len(history) - 1 - history.index(version)
            assert behind <= self.pace.max_staleness, (behind, self.pace)
        self.consumed += batch
        self.state = policy((*history, history[-1] + self.rng.randint(1, 3)))
        return True


@given(seed=st.integers(0, 2**32), batch=st.integers(1, 6), bound=st.integers(0, 4), first=st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_staleness_stays_within_its_bound_and_the_run_goes_on(seed: int, batch: int, bound: int, first: int) -> None:
    rng = random.Random(seed)
    state = policy(tuple(range(first + 1)))
    run = Run(rng, capacity.begun("p", batch, bound, first, cursor=0), state)
    while run.consumed < 12 * batch:
        if rng.random() < 0.2:
            run.lose()
        wanting = batch - (len(run.admitted) - run.consumed)
        sent = run.submit(rng.randint(1, batch) if wanting <= 0 else rng.randint(1, wanting))
        # a trainer that has too little for its next step is never refused what it needs
        assert sent or wanting <= 0, (run.pace, wanting)
        if rng.random() < 0.5 or not sent:
            run.train()
    assert run.consumed <= run.asked == len(run.admitted)


@given(batch=st.integers(1, 50), bound=st.integers(0, 5), jump=st.integers(0, 30), before=st.integers(0, 100))
def test_a_jump_of_versions_is_no_licence_for_a_burst(batch: int, bound: int, jump: int, before: int) -> None:
    pace = capacity.begun("p", batch, bound, 0, cursor=0)
    pace = capacity.admit(pace, "b", min(before, capacity.room(pace)), NOW)
    resumed = capacity.seen(pace, policy(tuple(range(jump + 1))), NOW)
    assert capacity.room(resumed) <= capacity.largest(resumed)
    assert resumed.versions == jump
    assert resumed.admitted >= jump * batch


def test_versions_count_once_and_a_roll_back_takes_none_away() -> None:
    pace = capacity.begun("p", 4, 1, 0, cursor=0)
    pace = capacity.seen(pace, policy((0, 3, 7)), NOW)
    assert (pace.versions, pace.version) == (2, 7)
    back = capacity.seen(pace, policy((0, 3, 7, 3)), NOW)
    assert (back.versions, back.version) == (2, 7)
    assert capacity.floor(capacity.admit(back, "b", 8, NOW), policy((0, 3, 7, 3)), NOW) == 3
    on = capacity.seen(back, policy((0, 3, 7, 3, 9)), NOW)
    assert (on.versions, on.version) == (3, 9)


def test_a_version_on_its_way_counts_once_it_is_everywhere_or_overdue() -> None:
    rolling = policy((0, 1), rollout=Rollout(version=1, previous=0, canary=1, deadline=NOW + 1))
    assert capacity.in_force(rolling, NOW) == 0
    assert capacity.in_force(rolling, NOW + 2) == 1
    assert capacity.in_force(policy((0, 1)), NOW) == 1
    endless = policy((0, 1), rollout=Rollout(version=1, previous=0, canary=1))
    assert capacity.in_force(endless, NOW) == 0


def test_a_batch_that_comes_again_is_counted_once() -> None:
    pace = capacity.begun("p", 8, 0, 0, cursor=0)
    assert capacity.owed(pace, "b", 8, 8) == 8
    pace = capacity.admit(pace, "b", 8, NOW)
    assert capacity.owed(pace, "b", 8, 8) == 0
    # the ledger found that five of the eight became jobs: the other three may be counted again
    pace = capacity.settle(pace, "b", 5)
    assert (pace.admitted, capacity.owed(pace, "b", 8, 3)) == (5, 3)
    pace = capacity.admit(pace, "b", 3, NOW)
    assert (pace.admitted, capacity.owed(pace, "b", 8, 0)) == (8, 0)
    assert capacity.settle(pace, "b", None).admitted == 8


def test_what_the_jobs_of_a_paced_run_ask_for() -> None:
    latest, exact = WeightConstraint(), WeightConstraint(rule=VersionRule.EXACT, value=2)
    fresh = WeightConstraint(rule=VersionRule.MAX_STALENESS, value=1)
    least = WeightConstraint(rule=VersionRule.MIN, value=4)
    assert capacity.constrained(latest, None) == latest
    assert capacity.constrained(latest, 3) == WeightConstraint(rule=VersionRule.MIN, value=3)
    assert capacity.constrained(least, 3) == least
    assert capacity.constrained(least, 6) == WeightConstraint(rule=VersionRule.MIN, value=6)
    assert (capacity.constrained(exact, 3), capacity.constrained(fresh, 3)) == (exact, fresh)
