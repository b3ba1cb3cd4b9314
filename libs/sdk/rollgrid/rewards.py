"""Rewards posted onto ended samples: what a caller may hand in, and what has been posted."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.trajectories import Entry, PostedReward, RewardsPosted

from .answers import PostPage, StandingReward
from .following import Reader
from .results import Group, Sample
from .tasks import json_body

Value: TypeAlias = "float | Sequence[float | None]"
"""A number, or one per turn (None = no verdict)."""

RewardsLike: TypeAlias = "Value | Mapping[int, Value] | Iterable[Mapping[str, Any] | PostedReward]"
"""For a sample its value; for a group values by index, or rewards in full (`index`, `name`, `kind`, `value` or
`turn_values`, `detail`).  A sequence of numbers for a group would be ambiguous and is refused."""

PostTarget: TypeAlias = "Group | Sample | str"
"""A group by itself or by its id, or one of its samples."""


class Post:
    """Rewards posted onto one group at once, and the cursor behind them."""

    __slots__ = ("cursor", "record")

    def __init__(self, record: RewardsPosted, cursor: int) -> None:
        self.record = record
        self.cursor = cursor

    @property
    def group_id(self) -> str:
        return self.record.group_id

    @property
    def rewards(self) -> tuple[PostedReward, ...]:
        return self.record.rewards

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible: the wire record and the cursor."""
        return {"cursor": self.cursor, **codec.to_builtins(self.record)}

    def __repr__(self) -> str:
        return f"Post({self.group_id!r}, {len(self.rewards)} rewards, cursor={self.cursor})"


class PostReader(Reader[PostPage, Post]):
    """Reads posts."""

    def accept(self, page: PostPage) -> list[Post]:
        fresh = [Post(item.post, item.cursor) for item in page.posts if item.cursor > self.cursor]
        self.cursor = max(self.cursor, page.cursor, *(post.cursor for post in fresh))
        self.done = not self._follow and not page.posts
        return fresh


class TurnReward(NamedTuple):
    """A turn's reward and the sampled tokens [start, end) it is about."""

    value: float | None
    start: int
    end: int


def turn_spans(entry: Entry) -> list[tuple[int, int]]:
    """[start, end) of each turn in the sample's sampled tokens, turns joined in order; one for a single generation."""
    lengths = [len(turn.token_ids) for turn in entry.turns] or [len(entry.sample.token_ids)]
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def turn_rewards(entry: Entry, values: Sequence[float | None]) -> list[TurnReward]:
    """Each value on the tokens of its turn; turns behind the last value have none."""
    return [TurnReward(value, *span) for value, span in zip(values, turn_spans(entry), strict=False)]


class Standing:
    """What stands after a number of posts: of two under one name onto one sample, the later."""

    def __init__(self, posts: Iterable[Post] = ()) -> None:
        self._rewards: dict[str, dict[tuple[int, str], StandingReward]] = {}
        for post in posts:
            self.add(post)

    def add(self, post: Post) -> None:
        group = self._rewards.setdefault(post.group_id, {})
        for reward in post.rewards:
            known = group.get((reward.index, reward.name))
            if known is not None and known.cursor > post.cursor:
                continue
            fields = msgspec.structs.asdict(reward)
            record = post.record
            group[(reward.index, reward.name)] = StandingReward(
                **fields, source=record.source, posted_at=record.posted_at, cursor=post.cursor
            )

    def of(self, group_id: str, index: int | None = None) -> tuple[StandingReward, ...]:
        """Rewards of a group (or of its sample `index`), by index and name."""
        found = self._rewards.get(group_id, {})
        return tuple(found[key] for key in sorted(found) if index is None or key[0] == index)

    def __iter__(self) -> Iterator[tuple[str, StandingReward]]:
        return ((group, reward) for group in self._rewards for reward in self.of(group))


def group_of(target: PostTarget) -> tuple[str, int]:
    """Id of the group, and the cursor of its close where it is known (else 0).

    Raises ValueError for a sample that came from no group.
    """
    if isinstance(target, str):
        return target, 0
    if isinstance(target, Group):
        return target.id, target.cursor
    if not target.group_id:
        raise ValueError("this sample does not know its group: post onto the group")
    return target.group_id, target.cursor


def post_body(
    target: PostTarget,
    rewards: RewardsLike,
    *,
    name: str | None = None,
    kind: str | None = None,
    detail: str | None = None,
    source: str | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> bytes:
    """The JSON body of one post.  Raises Unsendable for NaN, TypeError for rewards of no known form."""
    _, cursor = group_of(target)
    index = target.index if isinstance(target, Sample) else None
    shared = _given(name=name, kind=kind, detail=detail)
    items = [{**shared, **item} for item in reward_items(rewards, index)]
    more = _given(cursor=cursor or None, source=source, metadata=None if metadata is None else dict(metadata))
    return json_body({"rewards": items, **more})


def run_body(rewards: Iterable[tuple[Group | str, RewardsLike]], source: str | None) -> bytes:
    """The JSON body of a post onto several groups.  Raises as `post_body`."""
    groups = []
    for target, values in rewards:
        group_id, cursor = group_of(target)
        groups.append({"group_id": group_id, "rewards": reward_items(values), **_given(cursor=cursor or None)})
    return json_body({"groups": groups, **_given(source=source)})


def reward_items(rewards: RewardsLike, index: int | None = None) -> list[dict[str, Any]]:
    """Rewards as the server takes them; `index` when they are one sample's."""
    if index is not None and not isinstance(rewards, Mapping):
        if isinstance(rewards, (int, float)):
            return [{"index": index, "value": rewards}]
        return [{"index": index, "turn_values": list(rewards)}]
    if isinstance(rewards, Mapping):
        return [item for key, value in rewards.items() for item in reward_items(value, int(key))]
    if isinstance(rewards, (int, float)):
        raise TypeError("a number alone says not which sample it is for: give {index: value}, or post onto the sample")
    return [_item(reward) for reward in rewards]


def _item(reward: object) -> dict[str, Any]:
    if isinstance(reward, PostedReward):
        found: dict[str, Any] = msgspec.to_builtins(reward)
        return found
    if isinstance(reward, Mapping):
        return dict(reward)
    raise TypeError(f"a reward is a mapping with index and value, not {type(reward).__name__}")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
