"""Archived rewards hold a post without loss, and say in columns what the post says."""

from __future__ import annotations

import pyarrow.parquet as pq
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import BufferReader
from rollgrid_contracts.columns import REWARD_COLUMNS
from rollgrid_contracts.trajectories import PostedReward, RewardsPosted
from rollgrid_runtime import archive_rewards

from .test_archive_rows import BODY, TEXT

VALUES = st.none() | st.floats(allow_nan=False, allow_infinity=False)
REWARDS = st.builds(
    PostedReward,
    index=st.integers(0, 9),
    name=TEXT,
    kind=TEXT,
    value=VALUES,
    turn_values=st.lists(VALUES, max_size=4).map(tuple),
    detail=st.none() | TEXT,
)
POSTS = st.builds(
    RewardsPosted,
    tenant=st.sampled_from(["acme", "globex"]),
    run=st.sampled_from(["run-1", "run-2"]),
    group_id=TEXT,
    closed_seq=st.integers(0, 2**40),
    rewards=st.lists(REWARDS, min_size=1, max_size=3).map(tuple),
    source=TEXT,
    metadata=BODY,
    posted_at=st.floats(0, 1e10),
    traceparent=st.none() | TEXT,
)
NUMBERED = st.lists(POSTS, min_size=1, max_size=6).map(lambda posts: list(enumerate(posts, 7)))


@settings(max_examples=50, deadline=None)
@given(NUMBERED)
def test_posts_come_back_as_they_were(posts: list[tuple[int, RewardsPosted]]) -> None:
    data = archive_rewards.to_parquet(posts)
    assert archive_rewards.from_parquet(data) == posts
    wanted = [(seq, post) for seq, post in posts if (post.tenant, post.run) == ("acme", "run-2") and seq > 8]
    assert archive_rewards.from_parquet(data, "acme", "run-2", 8) == wanted
    assert archive_rewards.from_parquet(data, "acme", "run-2", 8, 1) == wanted[:1]


@settings(max_examples=20, deadline=None)
@given(NUMBERED)
def test_columns_say_what_the_rewards_say(posts: list[tuple[int, RewardsPosted]]) -> None:
    table = pq.read_table(BufferReader(archive_rewards.to_parquet(posts)))
    assert table.column_names == [column.name for column in REWARD_COLUMNS]
    rewards = [(seq, post, reward) for seq, post in posts for reward in post.rewards]
    for row, (seq, post, reward) in zip(table.to_pylist(), rewards, strict=True):
        assert (row["sequence"], row["group_id"], row["closed_sequence"]) == (seq, post.group_id, post.closed_seq)
        assert (row["index"], row["name"], row["value"]) == (reward.index, reward.name, reward.value)
        assert tuple(row["turn_values"]) == reward.turn_values
