"""Deficit round robin: nothing lost, order kept within a lane, shares by weight, no starvation."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_sampler.fair import FairQueue

jobs = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 40)), max_size=60)


@given(jobs)
@settings(deadline=None)
def test_every_job_comes_out_once_and_in_its_lanes_order(pushed: list[tuple[str, int]]) -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, (lane, cost) in enumerate(pushed):
        queue.push(lane, number, cost, weight="abcde".index(lane) + 1)
    assert queue.cost == sum(cost for _, cost in pushed)
    out: list[int] = []
    while (head := queue.peek()) is not None:
        assert queue.pop() == head, "peek names what pop takes"
        out.append(head)
    assert sorted(out) == list(range(len(pushed)))
    assert (queue.cost, len(queue)) == (0, 0)
    by_lane: dict[str, list[int]] = defaultdict(list)
    for number in out:
        by_lane[pushed[number][0]].append(number)
    assert all(numbers == sorted(numbers) for numbers in by_lane.values())


@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 16), min_size=2),
    costs=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    served=st.integers(50, 400),
)
@settings(deadline=None)
def test_busy_lanes_get_shares_by_weight(weights: dict[str, int], costs: list[int], served: int) -> None:
    """For lanes that always have work, service per weight differs by no more than a turn and a job."""
    quantum = 8
    queue: FairQueue[str, str] = FairQueue(quantum)
    turns: Counter[str] = Counter()

    def refill(lane: str) -> None:
        queue.push(lane, lane, costs[turns[lane] % len(costs)], weights[lane])
        turns[lane] += 1

    for lane in weights:
        for _ in range(3):
            refill(lane)
    got: Counter[str] = Counter()
    for _ in range(served):
        before = queue.cost
        chosen = queue.pop()
        assert chosen is not None
        got[chosen] += before - queue.cost
        refill(chosen)
    bound = 2 * (quantum + max(costs))
    normalised = [got[lane] / weight for lane, weight in weights.items()]
    assert max(normalised) - min(normalised) <= bound


@given(flood=st.integers(10, 200), cost=st.integers(1, 16))
@settings(deadline=None)
def test_a_late_job_waits_for_at_most_one_turn_of_the_flood(flood: int, cost: int) -> None:
    queue: FairQueue[str, str] = FairQueue(8)
    for _ in range(flood):
        queue.push("flood", "flood", cost, 4)
    queue.pop()
    queue.push("small", "small", cost, 4)
    before = 0
    while queue.pop() != "small":
        before += cost
    assert before <= 2 * 4 * 8 + cost


@given(jobs, st.sets(st.integers(0, 59)))
@settings(deadline=None)
def test_removed_jobs_are_gone_and_the_rest_stays(pushed: list[tuple[str, int]], unwanted: set[int]) -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, (lane, cost) in enumerate(pushed):
        queue.push(lane, number, cost)
    removed = queue.remove(lambda number: number in unwanted)
    assert set(removed) == unwanted & set(range(len(pushed)))
    rest = []
    while (left := queue.pop()) is not None:
        rest.append(left)
    assert sorted(rest) == sorted(set(range(len(pushed))) - unwanted)
    assert queue.cost == 0
