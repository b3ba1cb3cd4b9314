"""`rollgrid trajectories export` of sessions: a row per path, masks and logprobs in step, shared turns trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rollgrid.export import from_jsonl, to_jsonl, to_parquet
from rollgrid.results import Group
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed


def turn(
    number: int, parent: int | None, branch: str = "main", status: SampleStatus = SampleStatus.SUCCEEDED
) -> Sample:
    node = TurnNode(parent=parent, branch=branch, observation=TokenIds.of([90 + number]))
    return Sample(
        index=0, turn=number, status=status, token_ids=TokenIds.of([number, number]), logprobs=Floats.of([-0.5, -0.25]),
        version_spans=(VersionSpan(version=number, start=0, end=2),), node=node,
    )  # fmt: skip


@pytest.fixture
def group() -> Group:
    turns = (turn(0, None), turn(1, 0), turn(2, 0, "b"), turn(3, 1, status=SampleStatus.CANCELLED))
    entries = (
        Entry(sample=Sample(index=0, turn=1, status=SampleStatus.SUCCEEDED), turns=turns, session="s0", reward=1.0, turn_rewards={2: 0.5}),
        Entry(sample=Sample(index=1, status=SampleStatus.EXPIRED), session="s1"),
        Entry(sample=Sample(index=2, status=SampleStatus.SUCCEEDED, token_ids=TokenIds.of([5]), logprobs=Floats.of([-1.0]))),
    )  # fmt: skip
    closed = GroupClosed(
        tenant="acme", run="r", batch_id="b", group_id="g", n=3, policy="p", reason=CloseReason.COMPLETE,
        created_at=1.0, closed_at=2.0, entries=entries, prompt_token_ids=TokenIds.of([7]),
    )  # fmt: skip
    return Group(closed, cursor=4)


def test_a_session_is_a_row_per_path(group: Group, tmp_path: Path) -> None:
    assert to_parquet([group], tmp_path / "out.parquet") == 4
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [(row["index"], row["session"], row["branch"], row["turns"]) for row in rows] == [
        (0, "s0", "main", [0, 1]),
        (0, "s0", "b", [0, 2]),
        (1, "s1", None, []),
        (2, None, None, []),
    ]
    main, forked, unplayed, single = rows
    assert (main["prompt_token_ids"], main["token_ids"]) == ([90], [0, 0, 91, 1, 1])
    assert main["mask"] == main["train_mask"] == [True, True, False, True, True]
    assert main["logprobs"] == [-0.5, -0.25, 0.0, -0.5, -0.25]
    assert main["version_spans"] == [{"version": 0, "start": 0, "end": 2}, {"version": 1, "start": 3, "end": 5}]
    assert main["token_rewards"] == [0.0, 0.0, 0.0, 0.0, 1.0]
    assert forked["train_mask"] == [False, False, False, True, True], "turn 0 is trained in the first path"
    assert forked["token_rewards"] == [0.0, 0.0, 0.0, 0.0, 1.5]
    assert (unplayed["token_ids"], unplayed["mask"], unplayed["reward"], unplayed["status"]) == (
        [],
        [],
        None,
        "expired",
    )
    assert (single["prompt_token_ids"], single["token_ids"], single["mask"]) == ([7], [5], [True])


def test_json_lines_keep_the_tree(group: Group, tmp_path: Path) -> None:
    assert to_jsonl([group], tmp_path / "out.jsonl") == 1
    [back] = from_jsonl(tmp_path / "out.jsonl")
    assert back.closed == group.closed
