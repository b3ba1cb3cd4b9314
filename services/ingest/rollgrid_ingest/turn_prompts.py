"""A turn's prompt: the tokens of its session so far, exactly as they are, and what the request adds to them.

Where the request does not go on behind the last turn of its branch, or cannot without other tokens, the turn forks:
its node says from where and why.  Nothing is tokenized again in silence.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.episodes import ForkReason, TurnNode
from rollgrid_contracts.samples import Sample
from rollgrid_episodes import Node, Tree, answer_of, match, match_ids
from rollgrid_rendering.bridge import Bridge, NoBridge, PastTurn
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, TooManyTokens

from .conversation import check_messages
from .prompts import Prompt, Prompts, token_ids, too_long
from .session_episode import Episode
from .sessions_schema import ChatTurnRequest, CompletionTurnRequest, GenerateTurnRequest
from .settings import Limits
from .terms import payload
from .tools import ToolPlan
from .wire import check_payload, invalid

TurnRequest = ChatTurnRequest | CompletionTurnRequest | GenerateTurnRequest


class Planned(NamedTuple):
    """Where a turn will stand, and the whole prompt it is asked with."""

    node: TurnNode
    prompt: Prompt


class TurnPrompts:
    """One method per door.  All raise RollgridError naming the field."""

    def __init__(self, prompts: Prompts, threads: RenderThreads, limits: Limits) -> None:
        self._prompts, self._threads, self._limits = prompts, threads, limits
        self._bridges: dict[str, Bridge] = {}

    async def of_chat(
        self,
        request: ChatTurnRequest,
        episode: Episode,
        branch: str,
        policy: PolicyState,
        plan: ToolPlan,
        variables: dict[str, Any],
        renderer: Renderer,
    ) -> Planned:
        if request.continue_final_message or request.add_generation_prompt is False:
            field = "continue_final_message" if request.continue_final_message else "add_generation_prompt"
            raise invalid(f"{field}: a session's turn answers its last message", field)
        messages = check_messages(request.messages, "messages", self._limits)
        check_payload(request.documents or [], "documents", self._limits.max_depth)
        documents = request.documents or []
        given = _digest(plan.tools, documents, variables)

        def work() -> _Found:
            return self._found(episode, branch, messages, given, request, renderer, plan, documents, variables, policy)

        try:
            found = await self._threads.run(work)
        except TooManyTokens as error:
            raise too_long(f"{error.least} tokens or more", "messages", policy) from error
        node = msgspec.structs.replace(self._node(request, found.node, episode), rendered_with=given)
        if found.observation is None:
            whole = await self._prompts.of_chat(request, plan.tools, variables, policy)
            node = msgspec.structs.replace(node, observation=TokenIds.of(whole.token_ids))
            return Planned(node, whole)
        before = episode.tree.token_ids(node.parent).tolist()
        return Planned(node, Prompt(before + found.observation, None, messages))

    async def of_completion(
        self, request: CompletionTurnRequest, episode: Episode, branch: str, policy: PolicyState, renderer: Renderer
    ) -> Planned:
        if request.observation_token_ids is not None:
            if request.prompt != "":
                raise invalid("prompt and observation_token_ids exclude each other", "observation_token_ids")
            return self._behind(request, request.observation_token_ids, episode, branch, policy)
        if isinstance(request.prompt, list) and request.prompt and all(type(one) is int for one in request.prompt):
            return self._whole(request, request.prompt, "prompt", episode, branch, policy)
        prompts = await self._prompts.of_completion(request, policy)
        if len(prompts) != 1:
            raise invalid("a session's turn has one prompt: fork, and sample each branch", "prompt")
        text = prompts[0].text
        if text is None:
            return self._whole(request, prompts[0].token_ids, "prompt", episode, branch, policy)
        return await self._threads.run(lambda: self._of_text(request, text, prompts[0], episode, branch, renderer))

    async def of_generate(
        self, request: GenerateTurnRequest, episode: Episode, branch: str, policy: PolicyState
    ) -> Planned:
        if request.observation_token_ids is None:
            return self._whole(request, request.token_ids, "token_ids", episode, branch, policy)
        if request.token_ids:
            raise invalid("token_ids and observation_token_ids exclude each other", "observation_token_ids")
        return self._behind(request, request.observation_token_ids, episode, branch, policy)

    # -- conversations ------------------------------------------------------------------------

    def _found(
        self,
        episode: Episode,
        branch: str,
        messages: Sequence[Mapping[str, Any]],
        given: str,
        request: ChatTurnRequest,
        renderer: Renderer,
        plan: ToolPlan,
        documents: Sequence[Mapping[str, str]],
        variables: dict[str, Any],
        policy: PolicyState,
    ) -> _Found:
        """Blocks for as long as matching and bridging take."""
        tree = episode.tree
        answer = _Answers(renderer, only_first_call=request.parallel_tool_calls is False)
        matched = match(tree, branch, messages, answer=answer)
        node = TurnNode(parent=matched.turn, branch=branch, messages=matched.new_messages)
        if matched.edited is not None:
            node = _forked(node, ForkReason.EDITED_HISTORY, matched.edited)
        if matched.turn is None:
            return _Found(node, None)
        if tree.nodes[matched.turn].node.rendered_with != given:
            why = f"tools, documents or template variables are not those of turn {matched.turn}"
            return _Found(_anew(node, messages, ForkReason.EDITED_HISTORY, why), None)
        if not matched.new_messages:
            raise invalid(f"messages end with the answer of turn {matched.turn}: nothing follows it", "messages")
        history = [_past(one, answer) for one in tree.path(matched.turn)]
        bridged = self._bridge(renderer).extend(
            history,
            matched.new_messages,
            tools=plan.tools,
            documents=documents,
            options=variables,
            history=episode.terms.reasoning_history,
            at_most=policy.max_model_len,
        )
        if isinstance(bridged, NoBridge):
            return _Found(_anew(node, messages, bridged.reason, bridged.detail), None)
        node = msgspec.structs.replace(node, observation=bridged.observation, closing=bridged.closing)
        return _Found(node, bridged.observation.tolist())

    def _bridge(self, renderer: Renderer) -> Bridge:
        found = self._bridges.get(renderer.digest)
        if found is None:
            found = self._bridges[renderer.digest] = Bridge(renderer)
        return found

    # -- token ids and texts ------------------------------------------------------------------

    def _whole(
        self, request: TurnRequest, ids: list[Any], field: str, episode: Episode, branch: str, policy: PolicyState
    ) -> Planned:
        """The whole prompt is given: what it adds is what follows the tokens it begins with."""
        checked = token_ids(ids, field, policy)
        matched = match_ids(episode.tree, branch, TokenIds.of(checked))
        node = TurnNode(parent=matched.turn, branch=branch, observation=matched.new_ids)
        if matched.edited is not None:
            node = _forked(node, ForkReason.EDITED_HISTORY, matched.edited)
        return Planned(self._node(request, node, episode), Prompt(checked))

    def _behind(
        self, request: TurnRequest, ids: list[int], episode: Episode, branch: str, policy: PolicyState
    ) -> Planned:
        """Only what is new is given: it follows the last turn of the branch."""
        head = episode.tree.branches[branch].head
        new = token_ids(ids, "observation_token_ids", policy)
        node = TurnNode(parent=head, branch=branch, observation=TokenIds.of(new))
        return Planned(self._node(request, node, episode), Prompt(episode.tree.token_ids(head).tolist() + new))

    def _of_text(
        self,
        request: CompletionTurnRequest,
        text: str,
        whole: Prompt,
        episode: Episode,
        branch: str,
        renderer: Renderer,
    ) -> Planned:
        """A text goes on where it begins with the texts of the branch; only the rest is tokenized."""
        tree = episode.tree
        head = tree.branches[branch].head
        node = TurnNode(parent=head, branch=branch)
        if head is None:
            observation = whole.token_ids
        else:
            so_far = _text_of(tree, head, renderer)
            if text.startswith(so_far):
                rest = text[len(so_far) :]
                observation = renderer.encode(rest, add_special_tokens=False) if rest else []
            else:
                why = f"the prompt does not begin with the text of turn {head}"
                node = _anew(node, (), ForkReason.EDITED_HISTORY, why)
                observation = whole.token_ids
        node = msgspec.structs.replace(node, observation=TokenIds.of(observation))
        before = tree.token_ids(node.parent).tolist()
        return Planned(self._node(request, node, episode), Prompt(before + observation, text))

    # -- both ---------------------------------------------------------------------------------

    def _node(self, request: TurnRequest, node: TurnNode, episode: Episode) -> TurnNode:
        gap_s = 0.0
        if node.parent is not None:
            gap_s = max(0.0, time.time() - episode.tree.nodes[node.parent].sample.timings.finished_at)
        return msgspec.structs.replace(
            node,
            gap_s=round(gap_s, 3),
            approvals=self._objects(request.approvals, "approvals"),
            deliverables=self._objects(request.deliverables, "deliverables"),
        )

    def _objects(self, given: list[dict[str, Any]] | None, field: str) -> tuple[dict[str, Any], ...]:
        return tuple(payload(one, f"{field}[{i}]", self._limits) for i, one in enumerate(given or ()))


class _Found(NamedTuple):
    """`observation` None: the whole conversation is to be rendered."""

    node: TurnNode
    observation: list[int] | None


class _Answers:
    """The message that was returned for a sample, its text decoded where the sampler sent none."""

    def __init__(self, renderer: Renderer, *, only_first_call: bool) -> None:
        self._renderer, self._only_first_call = renderer, only_first_call
        self._made: dict[int, Mapping[str, Any]] = {}

    def __call__(self, sample: Sample) -> Mapping[str, Any]:
        found = self._made.get(id(sample))
        if found is None:
            found = self._made[id(sample)] = self._answer(sample)
        return found

    def _answer(self, sample: Sample) -> Mapping[str, Any]:
        if sample.text is None and sample.parsed is None:
            sample = msgspec.structs.replace(sample, text=self._renderer.decode(sample.token_ids.tolist()))
        found = answer_of(sample)
        if self._only_first_call and "tool_calls" in found:
            found["tool_calls"] = found["tool_calls"][:1]
        return found


def _past(node: Node, answer: _Answers) -> PastTurn:
    place, sample = node.node, node.sample
    return PastTurn(
        observation=place.observation,
        sampled=sample.token_ids,
        messages=place.messages,
        answer=answer(sample),
        closing=place.closing,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
    )


def _forked(node: TurnNode, reason: ForkReason, detail: str) -> TurnNode:
    return msgspec.structs.replace(node, fork=reason, fork_detail=detail)


def _anew(node: TurnNode, messages: Sequence[Mapping[str, Any]], reason: ForkReason, detail: str) -> TurnNode:
    """From the root, with the whole conversation."""
    whole = tuple(dict(message) for message in messages)
    return _forked(msgspec.structs.replace(node, parent=None, messages=whole), reason, detail)


def _text_of(tree: Tree, turn: int, renderer: Renderer) -> str:
    """What a client that sends texts has seen of a path."""
    parts: list[str] = []
    for node in tree.path(turn):
        parts.append(renderer.decode(node.node.observation.tolist()))
        text = node.sample.text
        parts.append(renderer.decode(node.sample.token_ids.tolist()) if text is None else text)
    return "".join(parts)


def _digest(tools: Sequence[Any], documents: Sequence[Any], variables: Mapping[str, Any]) -> str:
    """Empty where the template gets nothing but messages."""
    if not (tools or documents or variables):
        return ""
    canonical = msgspec.json.encode([tools, documents, variables], order="sorted")
    return hashlib.sha256(canonical).hexdigest()[:16]
