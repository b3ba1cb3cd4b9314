"""I8: whatever busy tenants hold, the bound holds and who comes new finds room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rollgrid_ingest.admission import Gate
from rollgrid_runtime.errors import RollgridError

STEPS = st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=200)


def refusal(gate: Gate, tenant: str) -> str | None:
    """Take one; the limit that was in the way, if any."""
    try:
        gate.take(tenant)
    except RollgridError as refused:
        return refused.limit
    return None


@given(st.integers(16, 200), st.sampled_from([0.25, 0.5, 0.75]), STEPS)
def test_a_flood_never_takes_the_place_of_a_newcomer(limit: int, share: float, steps: list[tuple[int, bool]]) -> None:
    gate, held = Gate("things", limit, lambda: share), Counter[int]()
    for tenant, asks in steps:
        if asks:
            held[tenant] += refusal(gate, str(tenant)) is None
        elif held[tenant]:
            gate.give(str(tenant))
            held[tenant] -= 1
        assert gate.held == held.total() <= limit
        assert max(held.values(), default=0) <= share * (limit + 1)
    # five tenants at most hold 5s/(1+4s) of it: a sixth gets in even so
    gate.take("newcomer")


@given(st.integers(1, 50))
def test_a_gate_without_shares_is_used_up_by_one(limit: int) -> None:
    gate = Gate("things", limit)
    for _ in range(limit):
        gate.take("only")
    assert refusal(gate, "only") == f"things={limit}"


@given(st.integers(3, 100), st.sampled_from([0.25, 0.5, 0.75]))
def test_alone_a_tenant_gets_its_share(limit: int, share: float) -> None:
    gate, held = Gate("things", limit, lambda: share), 0
    while (limit_broken := refusal(gate, "only")) is None:
        held += 1
    assert held == int(share * (limit + 1))
    assert limit_broken.startswith(f"things={limit}")
