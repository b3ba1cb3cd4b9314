"""Rewards as a caller hands them in and reads them back."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from rollgrid import Group, Post, Sample, Standing
from rollgrid.answers import PostItem, PostPage
from rollgrid.errors import Unsendable
from rollgrid.export import posted_rewards_of, sample_row
from rollgrid.rewards import PostReader, post_body, run_body, turn_rewards
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.samples import Sample as SampleRecord
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.trajectories import Entry, PostedReward, RewardsPosted

from .build import closed, entry


def body(*arguments: Any, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(post_body(*arguments, **options))
    return found


def post(cursor: int, group: str, *rewards: PostedReward, source: str = "customer") -> Post:
    record = RewardsPosted(tenant="a", run="r", group_id=group, rewards=rewards, source=source, posted_at=1.5)
    return Post(record, cursor)


def test_every_form_of_a_reward_becomes_one_body() -> None:
    group = Group(closed([entry(0), entry(1)]), 7)
    assert body(group.samples[1], 0.5) == {"rewards": [{"index": 1, "value": 0.5}], "cursor": 7}
    assert body(group.samples[0], [1.0, None])["rewards"] == [{"index": 0, "turn_values": [1.0, None]}]
    assert body(group, {0: 1, 1: [0.0]})["rewards"] == [{"index": 0, "value": 1}, {"index": 1, "turn_values": [0.0]}]
    full = {"index": 1, "name": "tests", "kind": "pass_rate", "value": 0.25}
    assert body("gabc", [full], source="ci", metadata={"sha": "x"}) == {
        "rewards": [full],
        "source": "ci",
        "metadata": {"sha": "x"},
    }
    posted = PostedReward(index=1, name="tests", kind="pass_rate", value=0.25)
    assert body("gabc", [posted])["rewards"] == [full]
    assert body("gabc", {0: 1.0}, name="judge", kind="judge", detail="ok")["rewards"] == [
        {"name": "judge", "kind": "judge", "detail": "ok", "index": 0, "value": 1.0}
    ]
    many = json.loads(run_body([(group, {0: 1.0}), ("gx", [full])], "ci"))
    assert [item["group_id"] for item in many["groups"]] == [group.id, "gx"]
    assert many["groups"][0]["cursor"] == 7


def test_what_cannot_be_meant_is_refused_here() -> None:
    with pytest.raises(Unsendable):
        post_body("gabc", {0: math.nan})
    with pytest.raises(TypeError, match="which sample"):
        post_body("gabc", 1.0)
    with pytest.raises(TypeError, match="mapping"):
        post_body("gabc", [1.0, 2.0])
    with pytest.raises(ValueError, match="does not know its group"):
        post_body(Sample(entry(0)), 1.0)


def test_the_later_of_two_under_one_name_stands_in_whatever_order_they_come() -> None:
    early = post(3, "g", PostedReward(index=0, value=0.0), PostedReward(index=0, name="x", value=2.0))
    late = post(5, "g", PostedReward(index=0, value=1.0), source="again")
    for posts in ([early, late], [late, early]):
        standing = Standing(posts)
        assert [(r.name, r.value, r.cursor) for r in standing.of("g")] == [("reward", 1.0, 5), ("x", 2.0, 3)]
        assert standing.of("g", 1) == standing.of("other") == ()
        assert standing.of("g", 0)[0].source == "again"


def test_a_turns_reward_lies_on_its_tokens() -> None:
    def turn(number: int, tokens: int) -> SampleRecord:
        ids = TokenIds.of(range(tokens))
        return SampleRecord(index=0, turn=number, status=SampleStatus.SUCCEEDED, token_ids=ids)

    ended = SampleRecord(index=0, status=SampleStatus.SUCCEEDED)
    episode = Entry(sample=ended, turns=(turn(0, 3), turn(1, 5), turn(2, 2)))
    assert [tuple(one) for one in turn_rewards(episode, (0.5, None, 1.0))] == [(0.5, 0, 3), (None, 3, 8), (1.0, 8, 10)]
    assert [tuple(one) for one in turn_rewards(entry(0), (2.0,))] == [(2.0, 0, 3)]


def test_rows_carry_what_stands() -> None:
    group = Group(closed([entry(0), entry(1)]), 7)
    standing = Standing([post(9, group.id, PostedReward(index=1, name="steps", kind="turns", turn_values=(0.5,)))])
    assert sample_row(group, group.samples[0], standing)["posted_rewards"] == []
    (reward,) = posted_rewards_of(group, group.samples[1], standing)
    assert (reward["name"], reward["turns"]) == ("steps", [{"value": 0.5, "start": 0, "end": 3}])
    assert sample_row(group, group.samples[1], standing)["posted_rewards"] == [reward]


def test_a_reader_gives_each_post_once_and_ends_where_nothing_is_new() -> None:
    reader = PostReader(lambda *_: None, scope="rewards:r", cursor=4, follow=False)  # type: ignore[arg-type]
    items = tuple(PostItem(cursor=c, post=post(c, "g", PostedReward(index=0, value=c)).record) for c in (3, 5, 6))
    assert [found.cursor for found in reader.accept(PostPage(posts=items, cursor=6))] == [5, 6]
    assert not reader.done
    assert reader.accept(PostPage(cursor=8)) == []
    assert (reader.cursor, reader.done) == (8, True)
