"""Shares of webhooks: a flood for a slow one leaves room for every other, and comes back as fast as it is worked on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_scorer.turns import MAX_DELAY_S, MIN_DELAY_S, Turns

KEYS = st.sampled_from("abcdef")


def test_a_flood_of_one_key_leaves_room() -> None:
    turns = Turns(total=24, per_key=8, running=2)
    assert [turns.admit("slow", 0.0) for _ in range(20)] == [True] * 8 + [False] * 12
    for key in range(30):  # newcomers are let in, whatever is held
        assert turns.admit(key, 0.0)
    assert not turns.admit("slow", 0.0)
    assert turns.holds("slow") == 8


def test_events_come_back_as_fast_as_they_are_worked_on() -> None:
    """Each refused event waits for half to all of what is before it: 2 s of work, four at a time."""
    turns = Turns(total=64, per_key=4, running=4)
    for _ in range(4):
        assert turns.admit("k", 0.0)
    for _ in range(200):
        turns.leave("k", 2.0)
        assert turns.admit("k", 0.0)
    for before in range(4, 500):
        needed_s = before * 2.0 / 4
        assert min(MAX_DELAY_S, 0.49 * needed_s) <= turns.delay_s("k", 0.0) <= min(MAX_DELAY_S, 1.01 * needed_s)


def test_returns_that_are_due_are_not_waited_for() -> None:
    turns = Turns(total=8, per_key=1, running=1)
    turns.admit("k", 0.0)
    for _ in range(50):
        turns.delay_s("k", 0.0)
    assert turns.delay_s("k", 1000.0) <= 1.0  # all fifty have come back; one is held


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(KEYS, st.sampled_from(["come", "end"])), max_size=200))
def test_counts_balance_and_bounds_hold(steps: list[tuple[str, str]]) -> None:
    turns, held = Turns(total=6, per_key=3, running=2), dict[str, int]()
    for now, (key, step) in enumerate(steps):
        if step == "come":
            if turns.admit(key, float(now)):
                held[key] = held.get(key, 0) + 1
            else:
                assert held.get(key, 0) >= 1  # nobody without an event in hand is refused
                assert turns.delay_s(key, float(now)) >= MIN_DELAY_S
        elif held.get(key):
            turns.leave(key, 0.1)
            held[key] -= 1
        assert turns.held == sum(held.values())
        assert all(turns.holds(key) == count for key, count in held.items())
        assert all(count <= 3 for count in held.values())
        assert turns.held <= 6 + len(held)


def test_idle_keys_are_forgotten() -> None:
    turns = Turns(total=8, per_key=2, running=1)
    for key in range(5000):
        turns.admit(key, 0.0)
        turns.leave(key, None)
    assert len(turns._shares) <= 1026
