"""Values per turn in the archive: a column of their own, and whole again when read back."""

from __future__ import annotations

import json

from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.scoring import Score, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed
from rollgrid_runtime.archive_rows import from_parquet, to_parquet, to_table


def test_turn_values_in_parquet() -> None:
    turns = Score(scorer="steps", status=ScoreStatus.SCORED, value=1.0, turn_values=(0.5, None, 1.0))
    plain = Score(scorer="plain", status=ScoreStatus.SCORED, value=1.0)
    entries = tuple(
        Entry(sample=Sample(index=index, status=SampleStatus.SUCCEEDED), reward=2.0, scores=scores)
        for index, scores in enumerate(((turns, plain), (plain,)))
    )
    group = GroupClosed(
        tenant="t", run="r", batch_id="b", group_id="g", n=2, policy="p", reason=CloseReason.COMPLETE,
        created_at=1.0, closed_at=2.0, entries=entries,
    )  # fmt: skip
    column = to_table([(7, group)])["turn_values"].to_pylist()
    assert json.loads(str(column[0])) == {"steps": [0.5, None, 1.0]}
    assert column[1] is None
    assert from_parquet(to_parquet([(7, group)])) == [(7, group)]
