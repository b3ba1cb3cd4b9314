"""Sizing: the parts of a refresh add up, and what is larger or slower never comes sooner (A51)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import CheckpointKind
from rollgrid_weights.sizing import Fleet, Speeds, adapter_bytes, delta_bytes, refresh

FULL = 269_030_016
MBIT = 1e6


def test_A51_smollm2_over_100_mbit() -> None:
    """Worked by hand: 269 MB both ways at 100 Mbit/s, two nodes behind a store of 150 Mbit/s."""
    fleet = Fleet(nodes=2, uplink_rate=100 * MBIT, node_rate=100 * MBIT, store_rate=150 * MBIT, cadence_s=30)
    speeds = Speeds(rebuild=0.5e9, load=1e9)
    full = refresh(CheckpointKind.FULL, FULL, FULL, fleet, speeds)
    assert full.upload_s == pytest.approx(21.52, abs=0.01)
    assert full.fetch_s == pytest.approx(28.70, abs=0.01)
    assert full.rebuild_s == 0
    assert full.load_s == pytest.approx(0.269, abs=0.001)
    assert full.cadence_share == pytest.approx(28.70 / 30, abs=0.001)
    delta = refresh(CheckpointKind.DELTA, 463_000, FULL, fleet, speeds)
    assert delta.total_s == pytest.approx(0.037 + 0.049 + 0.538 + 0.269, abs=0.001)
    lora = refresh(CheckpointKind.LORA, 9_768_960, FULL, fleet, speeds)
    assert lora.total_s == pytest.approx(0.782 + 1.042 + 0.010, abs=0.001)


@given(
    st.sampled_from(CheckpointKind), st.integers(1, 10**12), st.integers(1, 10**12), st.integers(1, 1000),
    st.floats(1e3, 1e12), st.floats(1e3, 1e12), st.floats(1.0, 10.0),
)  # fmt: skip
def test_more_bytes_or_nodes_or_less_bandwidth_is_never_sooner(
    kind: CheckpointKind, payload: int, full: int, nodes: int, rate: float, store: float, factor: float
) -> None:
    base = refresh(kind, payload, full, Fleet(nodes, rate, rate, store, 60.0))
    parts = base.upload_s + base.fetch_s + base.rebuild_s + base.load_s
    assert base.total_s == pytest.approx(parts)
    for worse in (
        refresh(kind, int(payload * factor), full, Fleet(nodes, rate, rate, store, 60.0)),
        refresh(kind, payload, full, Fleet(int(nodes * factor), rate, rate, store, 60.0)),
        refresh(kind, payload, full, Fleet(nodes, rate / factor, rate, store, 60.0)),
        refresh(kind, payload, full, Fleet(nodes, rate, rate / factor, store, 60.0)),
        refresh(kind, payload, full, Fleet(nodes, rate, rate, store / factor, 60.0)),
    ):
        assert worse.total_s >= base.total_s * (1 - 1e-9)
        assert worse.cadence_share >= base.cadence_share * (1 - 1e-9)


def test_bytes_of_deltas_and_adapters() -> None:
    assert delta_bytes(134_515_008, 0.003868) == pytest.approx(463_000, rel=0.05)  # measured at lr 1e-6
    assert adapter_bytes([(576, 576), (192, 576)], 16) == 2 * 16 * (576 + 576 + 192 + 576)


@pytest.mark.parametrize("wrong", [Fleet(0, 1, 1), Fleet(1, 0, 1), Fleet(1, 1, -1)])
def test_a_fleet_that_cannot_be_is_refused(wrong: Fleet) -> None:
    with pytest.raises(ValueError, match="positive"):
        refresh(CheckpointKind.FULL, 1, 1, wrong)
    with pytest.raises(ValueError, match="share"):
        delta_bytes(1, 1.5)
