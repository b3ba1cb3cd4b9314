"""Posting rewards onto groups, and reading what was posted."""

from __future__ import annotations

import contextlib

import msgspec
from fastapi import APIRouter, Request, Response
from rollgrid_contracts import codec, ids

from .auth import Scope
from .door import caller_of, json_response, msgpack_response, parts, principal
from .openapi import described
from .rewards import Posted
from .rewards_schema import (
    GroupRewards,
    PostedAnswer,
    PostItem,
    PostPageAnswer,
    RewardsRequest,
    RunPostedAnswer,
    RunRewardsRequest,
)
from .routes_rollouts import PAGE, Cursor, Limit, Wait
from .wire import at_most, decode_json, invalid

router = APIRouter()
_REWARDS = msgspec.json.Decoder(RewardsRequest)
_RUN_REWARDS = msgspec.json.Decoder(RunRewardsRequest)


@router.post(
    "/v1/groups/{group_id}/rewards", **described("Post rewards onto a group", body=RewardsRequest, answer=PostedAnswer)
)
async def post_rewards(request: Request, group_id: str) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked = decode_json(body, _REWARDS)
    group = GroupRewards(group_id=group_id, rewards=asked.rewards, cursor=asked.cursor, metadata=asked.metadata)
    (posted,) = await door.rewards.post(caller_of(request, who, body), [group], asked.source)
    return json_response(_answer(posted))


@router.post(
    "/v1/runs/{run}/rewards",
    **described("Post rewards onto groups of a run", body=RunRewardsRequest, answer=RunPostedAnswer),
)
async def post_run_rewards(request: Request, run: str) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    _check_run(run)
    body = await request.body()
    asked = decode_json(body, _RUN_REWARDS)
    if not asked.groups:
        raise invalid("groups is empty", "groups")
    at_most(len(asked.groups), "groups", "max_groups", door.settings.max_groups)
    at_most(sum(len(group.rewards) for group in asked.groups), "groups", "max_rewards", door.settings.max_rewards)
    posted = await door.rewards.post(caller_of(request, who, body), asked.groups, asked.source, run)
    posts = [_answer(one) for one in posted]
    return json_response(RunPostedAnswer(run=run, posts=posts, cursor=max(post.cursor for post in posts)))


@router.get("/v1/runs/{run}/rewards", **described("Rewards posted onto groups of a run", answer=PostPageAnswer))
async def run_rewards(
    request: Request, run: str, cursor: Cursor = None, limit: Limit = PAGE, wait_s: Wait = 0.0
) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    _check_run(run)
    limit, wait_s = min(limit, door.settings.max_page), min(wait_s, door.settings.max_wait_s)
    with door.readers.holding(who.tenant) if wait_s > 0 else contextlib.nullcontext():
        page = await door.posts.page(who.tenant, run, cursor or 0, limit, wait_s)
    posts = [PostItem(cursor=sequence, post=post) for sequence, post in page.posts]
    answer = PostPageAnswer(posts=posts, cursor=page.cursor, done=False)
    packed = codec.MSGPACK in request.headers.get("accept", "")
    return msgpack_response(answer) if packed else json_response(answer)


def _check_run(run: str) -> None:
    if not ids.is_label(run):
        raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)


def _answer(posted: Posted) -> PostedAnswer:
    return PostedAnswer(group_id=posted.group_id, run=posted.run, cursor=posted.cursor, duplicate=posted.duplicate)
