"""`/v1/sessions`: open, look, fork, close, delete.  The calls below `/s/<session>` are in `routes_turns`."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason, SessionEnded, SessionOutcome
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import CancelWork
from rollgrid_contracts.jobs import turn_call
from rollgrid_episodes import answer_of
from rollgrid_runtime import telemetry
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger

from .auth import Principal, Scope
from .door import Parts, caller_of, json_response, parts, principal
from .openapi import described
from .session_answers import base_path, close_answer, opened_answer, session_state
from .session_episode import Episode
from .session_openings import finite, turn_rewards
from .session_refusals import has_ended, no_session
from .session_store_ending import ending_of
from .sessions_schema import (
    CloseAnswer,
    CloseRequest,
    ForkAnswer,
    ForkRequest,
    SessionAnswer,
    SessionRequest,
    SessionState,
)
from .terms import bounded_text, member, payload
from .wire import decode_json, invalid

log = get_logger(__name__)
router = APIRouter()
_OPEN = msgspec.json.Decoder(SessionRequest)
_FORK = msgspec.json.Decoder(ForkRequest)
_CLOSE = msgspec.json.Decoder(CloseRequest)
Detail = Annotated[str | None, Query(description="why, for the record")]
WithIds = Annotated[bool, Query(description="the ids and logprobs of every node, too")]
ASKED_FOR = frozenset(
    {
        ForkReason.REQUESTED, ForkReason.BEST_OF_N, ForkReason.EXPLORE, ForkReason.RETRY, ForkReason.SUB_AGENT,
        ForkReason.COMPACTION,
    }
)  # fmt: skip
"""Reasons a caller may give; the others are found."""


@router.post("/v1/sessions", **described("Open a session", body=SessionRequest, answer=SessionAnswer, status=201))
async def open_session(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked = decode_json(body, _OPEN) if body.strip() else SessionRequest()
    caller = caller_of(request, who, body)
    opened, group = door.openings.of(asked, caller)
    cursor = await door.handler.cursor()
    unnamed = asked.group is None and not caller.idempotent
    first = await door.turns.store.open(opened, group, fresh=unnamed)
    episode = await door.turns.store.read(who.tenant, opened.session)
    fresh = first.opened_at == opened.opened_at
    if not fresh:
        episode = await door.turns.store.with_group(episode)
    return json_response(opened_answer(episode, group.batch_id, cursor, time.time()), 201 if fresh else 200)


@router.get("/v1/sessions/{session}", **described("A session's tree and state", answer=SessionState))
async def get_session(request: Request, session: str, token_ids: WithIds = False) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    episode = await door.turns.store.with_group(await episode_of(door, who, session))
    entry = door.catalog.policy(who.tenant, episode.terms.policy)
    worker = None
    if entry is not None and not episode.over(time.time()):
        worker = await door.turns.affinity.bound_to(entry.value.pool, who.tenant, session)

    def written() -> Response:
        return json_response(session_state(episode, worker, time.time(), with_ids=token_ids))

    return await door.threads.run(written)


@router.post(
    "/v1/sessions/{session}/fork",
    **described(
        "Fork a session: a branch behind any turn", body=ForkRequest, answer=ForkAnswer, status=201, optional_body=True
    ),
)
async def fork_session(request: Request, session: str) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked = decode_json(body, _FORK) if body.strip() else ForkRequest()
    reason = member(ForkReason, asked.reason, "reason", ForkReason.REQUESTED)
    if reason not in ASKED_FOR:
        raise invalid(f"reason {reason.value} is found, not asked for", "reason", limit=", ".join(sorted(ASKED_FOR)))
    detail = bounded_text(asked.detail, "detail", door.settings.max_detail_chars)
    metadata = payload(asked.metadata, "metadata", door.settings)
    key = request.headers.get("idempotency-key")
    name = asked.name
    if name is not None and not ids.is_label(name):
        raise invalid("name is not a usable branch", "name", limit=ids.LABEL_PATTERN)
    if name is None and key is not None:
        name = ids.post_id(session, key, 0)
    episode = await episode_of(door, who, session)
    parent = _parent(asked, episode)
    branch = await door.turns.store.fork(who.tenant, session, parent, reason, detail, metadata, name=name)
    answer = ForkAnswer(
        session=session, branch=branch, parent=parent, reason=reason.value, base_path=base_path(session, branch)
    )
    return json_response(answer, 201)


@router.post(
    "/v1/sessions/{session}/close",
    **described("End a session", body=CloseRequest, answer=CloseAnswer, optional_body=True),
)
async def close_session(request: Request, session: str) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    body = await request.body()
    asked = decode_json(body, _CLOSE) if body.strip() else CloseRequest()
    episode = await episode_of(door, who, session)
    ended = _ending(asked, episode, door)
    ended = await door.turns.store.end(ended, idle=episode if episode.ended is None else None)
    if episode.ended is None:
        await _leave(door, who, episode)
    return json_response(close_answer(episode, ended))


@router.delete("/v1/sessions/{session}", **described("Cancel a session: it ends as failed", answer=CloseAnswer))
async def delete_session(request: Request, session: str, detail: Detail = None) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    why = bounded_text(detail, "detail", door.settings.max_detail_chars) or "cancelled by the caller"
    episode = await episode_of(door, who, session)
    if episode.ended is None:
        ended = _bare(episode, SessionOutcome.FAILED, why)
        try:
            await door.turns.store.end(ended)
        except RollgridError as error:
            if error.code is not ErrorCode.SESSION_ENDED:
                raise
        await _leave(door, who, episode)
        episode = await episode_of(door, who, session)
    if episode.ended is None:
        raise has_ended(session)  # with its group, without an end of its own
    return json_response(close_answer(episode, episode.ended))


async def episode_of(door: Parts, who: Principal, session: str) -> Episode:
    """The tenant's own session.  Raises not_found for every other name."""
    if not ids.is_label(session):
        raise no_session(session)
    return await door.turns.store.read(who.tenant, session)


def _parent(asked: ForkRequest, episode: Episode) -> int | None:
    """The turn a fork begins behind; None = the root."""
    given = asked.from_turn if asked.from_turn is not msgspec.UNSET else asked.from_
    if asked.from_turn is not msgspec.UNSET and asked.from_ is not msgspec.UNSET and asked.from_turn != asked.from_:
        raise invalid("from and from_turn differ", "from")
    branch = asked.branch or MAIN_BRANCH
    if branch not in episode.tree.branches:
        raise no_session(episode.opened.session, branch)
    if isinstance(given, msgspec.UnsetType):
        return episode.tree.branches[branch].head
    if given is not None and given not in episode.tree.nodes:
        raise invalid(f"from_turn {given} is no turn of this session", "from_turn")
    return given


def _ending(asked: CloseRequest, episode: Episode, door: Parts) -> SessionEnded:
    tree, limits = episode.tree, door.settings
    outcome = member(SessionOutcome, asked.outcome, "outcome", SessionOutcome.CLOSED)
    if outcome is SessionOutcome.EXPIRED:
        raise invalid("outcome is closed or failed", "outcome", limit="closed, failed")
    leaf = asked.leaf if asked.leaf is not None else tree.branches[MAIN_BRANCH].head
    if leaf is not None and leaf not in tree.nodes:
        raise invalid(f"leaf {leaf} is no turn of this session", "leaf")
    deliverables = asked.deliverables or []
    ended = msgspec.structs.replace(
        _bare(episode, outcome, bounded_text(asked.detail, "detail", limits.max_detail_chars)),
        reward=None if asked.reward is None else finite(asked.reward, "reward"),
        turn_rewards=turn_rewards(asked.turn_rewards, tree.nodes),
        leaf=leaf,
        deliverables=tuple(payload(one, f"deliverables[{i}]", limits) for i, one in enumerate(deliverables)),
    )
    scorers = episode.terms.scorers
    if not scorers or leaf is None or outcome is not SessionOutcome.CLOSED:
        return ended
    return msgspec.structs.replace(
        ended,
        messages=tree.messages(leaf),
        text=str(answer_of(tree.nodes[leaf].sample)["content"] or ""),
        scorers=scorers,
        task=episode.terms.task,
    )


def _bare(episode: Episode, outcome: SessionOutcome, detail: str | None) -> SessionEnded:
    return ending_of(episode.opened, outcome, detail, time.time(), telemetry.current().traceparent)


async def _leave(door: Parts, who: Principal, episode: Episode) -> None:
    """Behind the end: turns still under way are stopped, the worker's place is free, and so is the version that was kept.

    All of it ends by itself, too.
    """
    session = episode.opened.session
    open_turns = tuple(turn_call(session, turn) for turn in episode.live_turns(time.time()))
    entry = door.catalog.policy(who.tenant, episode.terms.policy)
    if entry is not None:
        await door.turns.affinity.release(entry.value.pool, who.tenant, session)
        if (version := episode.keeps) is not None:
            await door.handler.let_go(entry.value, version, session)
    if open_turns:
        try:
            command = CancelWork(group_ids=(), turns=open_turns)
            await door.turns.bus.publish_core(subjects.worker_control(subjects.EVERY_WORKER), command)
        except RollgridError as error:
            log.warning("turns_not_cancelled", session=session, error=error.message)
