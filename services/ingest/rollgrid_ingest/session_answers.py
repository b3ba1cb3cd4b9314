"""A session as its caller sees it: what it was opened with, its tree, its end."""

from __future__ import annotations

from typing import Any

from rollgrid_contracts.episodes import MAIN_BRANCH, SessionEnded
from rollgrid_contracts.ids import turn_id
from rollgrid_contracts.samples import Sample
from rollgrid_episodes import Branch, Lost, Node, answer_of

from .answers import spans_of
from .session_episode import Episode
from .sessions_schema import (
    BranchAnswer,
    CallAnswer,
    CloseAnswer,
    LostTurnAnswer,
    NodeAnswer,
    OpenTurnAnswer,
    SessionAnswer,
    SessionState,
    TurnTimes,
)

OPEN = "open"
ENDED = "ended"
"""With its group, at the deadline or by a cancel, and without an end of its own: the record says which."""


def base_path(session: str, branch: str = MAIN_BRANCH) -> str:
    """Of the base URL for OpenAI clients."""
    return f"/s/{session}/v1" if branch == MAIN_BRANCH else f"/s/{session}~{branch}/v1"


def status_of(episode: Episode, now: float) -> str:
    if episode.ended is not None:
        return episode.ended.outcome.value
    return ENDED if episode.over(now) else OPEN


def opened_answer(episode: Episode, batch_id: str, cursor: int, now: float) -> SessionAnswer:
    opened, terms = episode.opened, episode.terms
    return SessionAnswer(
        session=opened.session,
        status=status_of(episode, now),
        turns=len(episode.tree.nodes),
        run=opened.run,
        group_id=opened.group_id,
        batch_id=batch_id,
        index=opened.index,
        n=opened.n,
        policy=terms.policy,
        model=terms.model or terms.policy,
        base_path=base_path(opened.session),
        expires_at=episode.expires_at,
        deadline=terms.deadline,
        cursor=cursor,
    )


def close_answer(episode: Episode, ended: SessionEnded) -> CloseAnswer:
    return CloseAnswer(
        session=ended.session,
        group_id=ended.group_id,
        index=ended.index,
        outcome=ended.outcome.value,
        ended_at=ended.ended_at,
        turns=len(episode.tree.nodes),
        leaf=ended.leaf,
        reward=ended.reward,
    )


def session_state(episode: Episode, worker: str | None, now: float, *, with_ids: bool) -> SessionState:
    """The whole tree; `with_ids` also the ids and logprobs of every node."""
    opened, terms, tree = episode.opened, episode.terms, episode.tree
    lengths: dict[int | None, int] = {None: 0}
    nodes: list[NodeAnswer] = []
    for turn, node in sorted(tree.nodes.items()):  # a parent's number is below its child's
        prompt = lengths[node.node.parent] + len(node.node.observation)
        lengths[turn] = prompt + len(node.sample.token_ids)
        nodes.append(_node(episode, node, prompt, with_ids))
    open_turns = [] if episode.over(now) else sorted(episode.live_turns(now).items())
    return SessionState(
        session=opened.session,
        run=opened.run,
        group_id=opened.group_id,
        index=opened.index,
        n=opened.n,
        policy=terms.policy,
        model=terms.model or terms.policy,
        status=status_of(episode, now),
        hold=terms.hold.value,
        reasoning_history=terms.reasoning_history.value,
        on_concurrent_turn=terms.on_concurrent_turn,
        ttl_s=terms.ttl_s,
        max_turns=terms.max_turns,
        max_tokens=terms.max_tokens,
        metadata=terms.metadata,
        opened_at=opened.opened_at,
        expires_at=episode.expires_at,
        worker=worker,
        turns=len(tree.nodes),
        tokens=tree.tokens,
        depth=tree.depth,
        leaves=list(tree.leaves()),
        branches=[_branch(episode, branch) for branch in tree.branches.values()],
        nodes=nodes,
        open_turns=[OpenTurnAnswer(turn=turn, parent=one.parent, branch=one.branch) for turn, one in open_turns],
        lost_turns=[_lost(lost) for _, lost in sorted(tree.lost.items())],
        outcome=None if episode.ended is None else close_answer(episode, episode.ended),
    )


def _branch(episode: Episode, branch: Branch) -> BranchAnswer:
    fork = episode.tree.forks.get(branch.name)
    return BranchAnswer(
        branch=branch.name,
        head=branch.head,
        parent=branch.parent,
        base_path=base_path(episode.opened.session, branch.name),
        reason=None if branch.reason is None else branch.reason.value,
        detail=None if fork is None else fork.detail,
        metadata={} if fork is None else fork.metadata,
    )


def _node(episode: Episode, node: Node, prompt_tokens: int, with_ids: bool) -> NodeAnswer:
    place, sample, opened = node.node, node.sample, episode.opened
    message = answer_of(sample)
    parsed = sample.parsed
    return NodeAnswer(
        turn=node.turn,
        parent=place.parent,
        branch=place.branch,
        messages=list(place.messages),
        roles=[str(message.get("role", "")) for message in place.messages],
        observation_tokens=len(place.observation),
        closing_tokens=place.closing,
        tokens=len(sample.token_ids),
        prompt_tokens=prompt_tokens,
        cached_tokens=sample.cached_tokens,
        finish_reason=None if sample.finish_reason is None else sample.finish_reason.value,
        stop_reason=sample.stop_reason,
        parse_status=None if parsed is None else parsed.parse_status,
        tool_calls=[_call(call) for call in message.get("tool_calls", ())],
        weight_versions=spans_of(sample),
        worker=sample.worker,
        attempt=sample.attempt,
        times=_times(sample, place.gap_s),
        sample_id=turn_id(opened.group_id, opened.index, node.turn),
        fork=None if place.fork is None else place.fork.value,
        fork_detail=place.fork_detail,
        content=message["content"],
        reasoning=message.get("reasoning"),
        approvals=list(place.approvals),
        deliverables=list(place.deliverables),
        observation_ids=place.observation.tolist() if with_ids else None,
        token_ids=sample.token_ids.tolist() if with_ids else None,
        logprobs=sample.logprobs.tolist() if with_ids else None,
    )


def _call(call: dict[str, Any]) -> CallAnswer:
    function = call.get("function") or {}
    return CallAnswer(id=call.get("id"), name=function.get("name"), arguments=function.get("arguments"))


def _times(sample: Sample, gap_s: float) -> TurnTimes:
    times = sample.timings
    return TurnTimes(
        dequeued_at=times.dequeued_at,
        started_at=times.started_at,
        first_token_at=times.first_token_at,
        finished_at=times.finished_at,
        gap_s=gap_s,
    )


def _lost(lost: Lost) -> LostTurnAnswer:
    return LostTurnAnswer(
        turn=lost.turn, parent=lost.parent, branch=lost.branch, status=lost.status.value, detail=lost.detail
    )
