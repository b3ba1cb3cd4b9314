"""The label `consumer` stays small whatever tenants, workers and epochs there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts import ids, topology
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.queue_lag import by_kind, reader_kind
from rollgrid_runtime.reading import ConsumerLag

names = st.from_regex(ids.NAME_PATTERN, fullmatch=True)
labels = st.from_regex(ids.LABEL_PATTERN, fullmatch=True)


@given(
    tenant=names,
    worker=labels,
    priority=st.sampled_from(Priority),
    epoch=st.integers(0, 10**6),
    scorer=st.sampled_from(ScorerKind),
)
def test_every_durable_of_the_topology_has_a_kind_without_names(
    tenant: str, worker: str, priority: Priority, epoch: int, scorer: ScorerKind
) -> None:
    pool = ids.pool_id(tenant, "float32", "cpu", "local")
    found = {
        reader_kind(consumer.durable)
        for consumer in (
            topology.ledger_consumer(epoch),
            topology.closes_consumer(epoch),
            topology.pool_consumer(PoolLane(pool, priority, tenant)),
            topology.lane_consumer(worker),
            topology.tenant_consumer(tenant),
            topology.submit_consumer(tenant),
            topology.scorer_consumer(scorer),
            topology.ARCHIVER,
            topology.CHECKPOINT_WATCH,
        )
    }
    assert found == {
        "ledger", "closes", f"pool-{priority.value}", "lane", "tenant", "submit", f"scorer-{scorer.value}", "archiver",
        "checkpoint-sync",
    }  # fmt: skip


@pytest.mark.parametrize("durable", ["", "_", "pool", "pool_", "pool_x", "ledger", "somebody-elses", "a" * 300])
def test_what_is_not_ours_makes_no_series_of_its_own(durable: str) -> None:
    assert reader_kind(durable) in {"other", "pool"}


def test_lanes_of_one_priority_are_one() -> None:
    lags = {f"pool_p1_bulk_{tenant}": ConsumerLag(n, 1) for n, tenant in enumerate("abc")}
    assert {kind: sum(lag.pending for lag in found) for kind, found in by_kind(lags).items()} == {"pool-bulk": 3}
