"""The JSON shapes of posted rewards."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from rollgrid_contracts.trajectories import RewardsPosted

from .rollout_schema import PageItem
from .wire import INT64

Cursor = Annotated[int, msgspec.Meta(ge=1, le=INT64 - 1)]


class RewardItem(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One reward of the sample `index`: `value`, or `turn_values` with one number (or null) per turn.

    `name` (default "reward") tells rewards of one sample apart; `kind` (default scalar, or turns) is free.
    """

    index: int
    name: str | None = None
    kind: str | None = None
    value: float | None = None
    turn_values: list[float | None] | None = None
    detail: str | None = None


class RewardsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/groups/{group_id}/rewards`.

    `cursor` is that of the group's close: with it even a group of long ago is found, without it those
    of the last day.
    """

    rewards: list[RewardItem]
    cursor: Cursor | None = None
    source: str | None = None
    metadata: dict[str, Any] | None = None


class GroupRewards(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The rewards of one group in a post onto several; `cursor` as in `RewardsRequest`."""

    group_id: str
    rewards: list[RewardItem]
    cursor: Cursor | None = None
    metadata: dict[str, Any] | None = None


class RunRewardsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/runs/{run}/rewards`: all groups are checked before anything is stored."""

    groups: list[GroupRewards]
    source: str | None = None


class PostedAnswer(msgspec.Struct, kw_only=True):
    """The post is stored durably at `cursor`; `duplicate` when it was before."""

    group_id: str
    run: str
    cursor: int
    duplicate: bool


class RunPostedAnswer(msgspec.Struct, kw_only=True):
    """One entry per group, in the order of the request; `cursor` is the last of theirs."""

    run: str
    posts: list[PostedAnswer]
    cursor: int


class PostItem(msgspec.Struct, kw_only=True):
    """A post under its cursor, the RG_TRAJECTORIES sequence."""

    cursor: int
    post: RewardsPosted


class PostPageAnswer(msgspec.Struct, kw_only=True):
    """Posts in order; read on behind `cursor`; `done` is always false, a run has no end."""

    posts: list[PostItem]
    cursor: int
    done: bool


class StandingReward(msgspec.Struct, kw_only=True):
    """The latest reward under one name onto one sample, and the post that said so."""

    index: int
    name: str
    kind: str
    value: float | None
    turn_values: list[float | None]
    detail: str | None
    source: str
    posted_at: float
    cursor: int


class GroupAnswer(PageItem, kw_only=True):
    """A closed group and what has been posted onto it since."""

    posted_rewards: list[StandingReward]
