"""Rendezvous order: alike for everybody, fair by weight, and hardly moved by whoever comes or goes."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rollgrid_runtime.rendezvous import ranked

NAMES = st.text("abcdefgh0123456789-", min_size=1, max_size=12)
FLEETS = st.dictionaries(NAMES, st.integers(1, 512), min_size=1, max_size=12)


@given(key=st.text(max_size=40), fleet=FLEETS, data=st.data())
def test_every_replica_has_the_same_order(key: str, fleet: dict[str, int], data: st.DataObject) -> None:
    shuffled = dict(data.draw(st.permutations(list(fleet.items()))))
    order = ranked(key, fleet)
    assert order == ranked(key, shuffled)
    assert sorted(order) == sorted(fleet)


@given(key=st.text(max_size=40), fleet=FLEETS, data=st.data())
def test_who_leaves_or_comes_changes_nobody_elses_place(key: str, fleet: dict[str, int], data: st.DataObject) -> None:
    """Minimal movement: a key moves only from a worker that left, or to one that came."""
    leaves = data.draw(st.sampled_from(sorted(fleet)))
    order = ranked(key, fleet)
    assert ranked(key, {name: slots for name, slots in fleet.items() if name != leaves}) == [
        name for name in order if name != leaves
    ]


@given(key=st.text(max_size=40), fleet=FLEETS, data=st.data())
def test_more_weight_never_moves_a_name_back(key: str, fleet: dict[str, int], data: st.DataObject) -> None:
    grows = data.draw(st.sampled_from(sorted(fleet)))
    before = ranked(key, fleet).index(grows)
    assert ranked(key, {**fleet, grows: fleet[grows] + data.draw(st.integers(1, 512))}).index(grows) <= before


def test_a_name_is_first_for_its_share_of_the_keys() -> None:
    fleet = {"small": 8, "large": 24, "same": 8}
    first = Counter(ranked(f"session-{number}", fleet)[0] for number in range(4000))
    for name, slots in fleet.items():
        assert abs(first[name] / 4000 - slots / 40) < 0.03


def test_no_two_pairs_of_key_and_name_are_one_text() -> None:
    orders = {key: ranked(key, {f"w{number}": 1 for number in range(64)}) for key in ("s1", "s12", "s1\x1f", "1s")}
    assert len({tuple(order) for order in orders.values()}) == len(orders)
