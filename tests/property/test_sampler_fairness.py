"""Fair turns: nothing lost, order kept within a lane, shares by weight, no starvation (I8)."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.jobs import Priority
from rollgrid_sampler.fair import WEIGHTS, FairQueue

jobs = st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 12)), max_size=60)


@given(jobs)
@settings(deadline=None)
def test_every_sample_comes_out_once_and_jobs_in_their_lanes_order(pushed: list[tuple[str, int]]) -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, (lane, samples) in enumerate(pushed):
        queue.push(lane, number, samples, weight="abcde".index(lane) + 1)
    assert queue.cost == sum(samples for _, samples in pushed)
    out: list[int] = []
    while (head := queue.peek()) is not None:
        assert queue.take() == head, "peek names what take gives"
        out.append(head)
    assert Counter(out) == Counter({number: samples for number, (_, samples) in enumerate(pushed)})
    assert (queue.cost, len(queue)) == (0, 0)
    by_lane: dict[str, list[int]] = defaultdict(list)
    for number in out:
        by_lane[pushed[number][0]].append(number)
    assert all(numbers == sorted(numbers) for numbers in by_lane.values())


@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 16), min_size=2),
    sizes=st.lists(st.integers(1, 24), min_size=1, max_size=8),
    served=st.integers(50, 400),
)
@settings(deadline=None)
def test_busy_lanes_get_shares_by_weight(weights: dict[str, int], sizes: list[int], served: int) -> None:
    """For lanes that always have work, samples per weight differ by no more than one sample of each."""
    queue: FairQueue[str, str] = FairQueue()
    turns: Counter[str] = Counter()

    def refill(lane: str) -> None:
        queue.push(lane, lane, sizes[turns[lane] % len(sizes)], weights[lane])
        turns[lane] += 1

    for lane in weights:
        for _ in range(3):
            refill(lane)
    got: Counter[str] = Counter()
    for _ in range(served):
        chosen = queue.take()
        assert chosen is not None
        got[chosen] += 1
        if queue.depth(chosen) < 3:
            refill(chosen)
    shares = {lane: got[lane] / weight for lane, weight in weights.items()}
    for one in weights:
        for other in weights:
            assert shares[one] - shares[other] <= 1 / weights[one] + 1 / weights[other] + 1e-6


@given(
    floods=st.lists(st.sampled_from(list(Priority)), min_size=1, max_size=6),
    samples=st.integers(1, 64),
    taken=st.integers(0, 200),
    priority=st.sampled_from(list(Priority)),
)
@settings(deadline=None)
def test_who_comes_new_waits_for_one_sample_of_each_lane_at_most(
    floods: list[Priority], samples: int, taken: int, priority: Priority
) -> None:
    queue: FairQueue[int, str] = FairQueue()
    for lane, flood in enumerate(floods):
        for _ in range(10):
            queue.push(lane, "flood", samples, WEIGHTS[flood])
    for _ in range(min(taken, queue.cost - len(floods))):
        queue.take()
    queue.push(99, "new", 1, WEIGHTS[priority])
    before = 0
    while queue.take() != "new":
        before += 1
    assert before <= len(floods)


@given(st.integers(1, 50))
def test_a_lane_that_empties_and_comes_back_gains_nothing(rounds: int) -> None:
    queue: FairQueue[str, str] = FairQueue()
    for _ in range(rounds + 1):
        queue.push("steady", "steady", 1)
    got: Counter[str] = Counter()
    for _ in range(rounds):
        queue.push("restless", "restless", 1)
        while queue.depth("restless"):
            got[str(queue.take())] += 1
    assert got["restless"] <= got["steady"] + 1


@given(jobs, st.sets(st.integers(0, 59)))
@settings(deadline=None)
def test_removed_jobs_are_gone_and_the_rest_stays(pushed: list[tuple[str, int]], unwanted: set[int]) -> None:
    queue: FairQueue[str, int] = FairQueue()
    for number, (lane, samples) in enumerate(pushed):
        queue.push(lane, number, samples)
    removed = queue.remove(lambda number: number in unwanted)
    assert set(removed) == unwanted & set(range(len(pushed)))
    rest = []
    while (left := queue.take()) is not None:
        rest.append(left)
    assert set(rest) == set(range(len(pushed))) - unwanted
    assert queue.cost == 0


@given(jobs, st.sampled_from("abcde"))
@settings(deadline=None)
def test_only_what_may_start_is_taken(pushed: list[tuple[str, int]], wanted: str) -> None:
    queue: FairQueue[str, str] = FairQueue()
    for lane, samples in pushed:
        queue.push(lane, lane, samples)
    count = sum(samples for lane, samples in pushed if lane == wanted)
    for _ in range(count):
        assert queue.take(lambda lane: lane == wanted) == wanted
    assert queue.take(lambda lane: lane == wanted) is None
