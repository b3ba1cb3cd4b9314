"""Turns of sessions in the archive: the very groups come back, and a shared prefix is stored once."""

from __future__ import annotations

import json
import math
from typing import Any

import msgspec
import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import BufferReader
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.columns import TURN_COLUMNS
from rollgrid_contracts.episodes import ForkReason, SessionForked, TurnNode
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import Parsed, Sample, SampleStatus
from rollgrid_contracts.scoring import Score, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed
from rollgrid_episodes import paths
from rollgrid_runtime import archive_rows, archive_turns

from .test_archive_rows import BODY, GROUPS, SAMPLES, TEXT, TOKENS

NODES = st.builds(
    TurnNode,
    parent=st.none() | st.integers(0, 9),
    branch=TEXT,
    observation=TOKENS,
    closing=st.integers(0, 2),
    messages=st.lists(BODY, max_size=2).map(tuple),
    fork=st.none() | st.sampled_from(ForkReason),
    fork_detail=st.none() | TEXT,
    gap_s=st.floats(0, 9),
    approvals=st.lists(BODY, max_size=1).map(tuple),
)
TURNS = st.builds(
    lambda sample, turn, node: msgspec.structs.replace(sample, turn=turn, node=node),
    SAMPLES,
    st.integers(0, 9),
    st.none() | NODES,
)


def with_turns(group: GroupClosed, turns: list[list[Sample]]) -> GroupClosed:
    """Each entry under an index of its own, as in every close."""
    entries = tuple(
        msgspec.structs.replace(
            entry, sample=msgspec.structs.replace(entry.sample, index=index), turns=tuple(played), session="s" * index
        )
        for index, (entry, played) in enumerate(zip(group.entries, turns, strict=False))
    )
    return msgspec.structs.replace(group, entries=entries)


PLAYED = st.builds(with_turns, GROUPS, st.lists(st.lists(TURNS, max_size=3), min_size=4, max_size=4))
BATCHES = st.lists(PLAYED, min_size=1, max_size=3).map(lambda groups: [(10 + 3 * i, g) for i, g in enumerate(groups)])


def read_back(groups: list[Any], after: int = 0) -> list[Any]:
    found = archive_rows.from_parquet(archive_rows.to_parquet(groups), after=after)
    data = archive_turns.to_parquet(archive_turns.rows_of(groups))
    return archive_turns.joined(found, archive_turns.from_parquet(data, [seq for seq, _ in found]))


@settings(max_examples=15, deadline=None)
@given(groups=BATCHES, after=st.sampled_from([0, 10, 12, 13]))
def test_the_very_groups_come_back(groups: list[Any], after: int) -> None:
    assert read_back(groups, after) == [(seq, group) for seq, group in groups if seq > after]


@settings(max_examples=10, deadline=None)
@given(groups=BATCHES)
def test_columns_say_what_the_turns_say(groups: list[Any]) -> None:
    table = pq.read_table(BufferReader(archive_turns.to_parquet(archive_turns.rows_of(groups))))
    assert table.column_names == [column.name for column in TURN_COLUMNS]
    rows, wanted = table.to_pylist(), archive_turns.rows_of(groups)
    assert len(rows) == len(wanted)
    for row, (seq, group, entry, turn) in zip(rows, wanted, strict=True):
        node = turn.node or TurnNode()
        assert (row["sequence"], row["tenant"], row["group_id"]) == (seq, group.tenant, group.group_id)
        assert (row["index"], row["session"], row["turn"]) == (entry.sample.index, entry.session, turn.turn)
        assert (row["parent"], row["branch"], row["fork"]) == (node.parent, node.branch, node.fork)
        assert row["observation_token_ids"] == node.observation.tolist()
        assert row["token_ids"] == turn.token_ids.tolist()
        assert all(a == b or math.isnan(a) for a, b in zip(row["logprobs"], turn.logprobs, strict=True))
        for column in TURN_COLUMNS:
            assert column.nullable or row[column.name] is not None, column.name


def test_i3_a_tree_of_depth_4_and_width_4_stores_each_turn_once_and_gives_256_paths() -> None:
    """Turn k hangs behind (k - 1) // 4; the four roots share nothing."""
    turns = []
    for number in range(4 + 16 + 64 + 256):
        parent = (number - 4) // 4 if number >= 4 else None
        node = TurnNode(
            parent=parent, branch="main" if number == 0 else f"b{number}", observation=TokenIds.of([1000 + number] * 3),
            messages=({"role": "tool", "content": f"result {number}"},),
        )  # fmt: skip
        turns.append(
            Sample(
                index=0,
                turn=number,
                status=SampleStatus.SUCCEEDED,
                token_ids=TokenIds.of([number] * 5),
                text=f"t{number}",
                logprobs=Floats.of([-0.5] * 5),
                node=node,
                version_spans=(VersionSpan(version=number % 3, start=0, end=5),),
                parsed=Parsed(content="x", tool_calls=({"id": "1"},), parse_status="ok"),
            )
        )
    steps = Score(scorer="steps", status=ScoreStatus.SCORED, value=1.0, turn_values=(None, 0.25))
    who: dict[str, Any] = {"tenant": "t", "run": "r", "group_id": "g"}
    entry = Entry(
        sample=Sample(index=0, turn=339, status=SampleStatus.SUCCEEDED), turns=tuple(turns), session="s", reward=1.0,
        scores=(steps,), turn_rewards={7: 0.5}, branches=(SessionForked(**who, index=0, session="s", branch="b1"),),
    )  # fmt: skip
    group = GroupClosed(
        **who,
        batch_id="b",
        n=1,
        policy="p",
        reason=CloseReason.COMPLETE,
        created_at=1.0,
        closed_at=2.0,
        entries=(entry,),
    )
    [(_, back)] = read_back([(7, group)])
    assert back == group
    table = pq.read_table(BufferReader(archive_turns.to_parquet(archive_turns.rows_of([(7, group)]))))
    rows = table.to_pylist()
    assert sum(len(row["token_ids"]) + len(row["observation_token_ids"]) for row in rows) == 340 * 8
    assert [row["turn"] for row in rows if row["reward"] is not None] == [7]
    assert json.loads(rows[1]["turn_values"]) == {"steps": 0.25}
    assert rows[0]["turn_values"] is None
    found = paths(back.entries[0])
    assert len(found) == 256
    for path in found:
        assert len(path.turns) == 4
        ids = [*path.prompt_ids, *path.completion_ids]
        by_rows = [
            token for turn in path.turns for token in rows[turn]["observation_token_ids"] + rows[turn]["token_ids"]
        ]
        assert ids == by_rows, "the rows from the root down are the path"
        assert path.mask == b"\1\1\1\1\1" + b"\0\0\0\1\1\1\1\1" * 3
    assert sum(span.first for path in found for span in path.spans) == 340, "each turn is trained once"
