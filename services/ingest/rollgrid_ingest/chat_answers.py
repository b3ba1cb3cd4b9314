"""Finished samples as chat completions."""

from __future__ import annotations

import time
from typing import Any

from rollgrid_contracts.jobs import ParsingSpec
from rollgrid_contracts.samples import FinishReason, Sample
from rollgrid_rendering.renderer import Renderer

from .answers import spans_of, text_of, turn_fields, usage_of
from .chat_schema import ChatChoice, ChatMessage, ChatRequest, ChatResponse
from .logprob_shapes import TokenNames, chat_logprobs, prompt_logprobs
from .replies import Collected
from .streaming import alternatives_of
from .submission import Accepted, GroupSpec, Submission
from .tools import AUTO, REQUIRED

MALFORMED = "malformed"


def chat_answer(
    request: ChatRequest, submission: Submission, accepted: Accepted, collected: Collected, renderer: Renderer
) -> ChatResponse:
    """Blocks for as long as detokenising takes where the sampler sent no text."""
    group_id, group = accepted.group_ids[0], submission.groups[0]
    samples = collected.samples(group_id)
    names = TokenNames(renderer, bool(request.return_tokens_as_token_ids))
    prompt = group.prompt_token_ids.tolist()
    of_prompt = next((each.prompt_logprobs for each in samples if each.prompt_logprobs is not None), None)
    return ChatResponse(
        id=f"chatcmpl-{accepted.batch_id}",
        object="chat.completion",
        created=int(time.time()),
        model=submission.model,
        choices=[
            _choice(request, submission.sample_id(group_id, sample.index), group, sample, names, renderer)
            for sample in samples
        ],
        usage=usage_of(submission, collected),
        logprobs_mode=collected.logprobs_mode,
        prompt_token_ids=prompt if request.return_token_ids else None,
        prompt_text=group.prompt_text if request.return_prompt_text else None,
        prompt_logprobs=prompt_logprobs(prompt, of_prompt, names) if request.prompt_logprobs is not None else None,
        **turn_fields(submission),
    )


def _choice(
    request: ChatRequest, name: str, group: GroupSpec, sample: Sample, names: TokenNames, renderer: Renderer
) -> ChatChoice:
    ids, shown = sample.token_ids.tolist(), shows_tokens(request, group)
    return ChatChoice(
        index=sample.index,
        message=_message(request, group, sample, renderer),
        logprobs=chat_logprobs(
            ids,
            sample.logprobs.tolist(),
            alternatives_of(sample.top_logprobs, len(ids)),
            names,
            request.top_logprobs or 0,
        )
        if request.logprobs and shown
        else None,
        finish_reason=finish_reason(sample, group.parsing),
        stop_reason=sample.stop_reason,
        sample_id=name,
        weight_versions=spans_of(sample),
        max_tokens=group.sampling.max_tokens,
        parse_status=parse_status(sample),
        token_ids=ids if request.return_token_ids and shown else None,
        seed=sample.seed,
        weight_fingerprint=sample.weight_fingerprint,
    )


def _message(request: ChatRequest, group: GroupSpec, sample: Sample, renderer: Renderer) -> ChatMessage:
    parsed = sample.parsed
    if parsed is None:
        return ChatMessage(role=role_of(request), content=text_of(sample, group, renderer))
    reasoning = parsed.reasoning if request.include_reasoning is not False else None
    calls = [openai_call(call) for call in parsed.tool_calls]
    return ChatMessage(
        role=role_of(request),
        content=parsed.content if calls or parsed.content is not None else "",
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=kept_calls(calls, request) or None,
    )


def role_of(request: ChatRequest) -> str:
    """The assistant's, or that of the message which is continued."""
    if not request.continue_final_message and request.add_generation_prompt is not False:
        return "assistant"
    return str(request.messages[-1]["role"])


def openai_call(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name in ("id", "type", "function")}


def kept_calls(calls: list[dict[str, Any]], request: ChatRequest) -> list[dict[str, Any]]:
    """Only the first where the caller wants no parallel ones."""
    return calls[:1] if request.parallel_tool_calls is False else calls


def finish_reason(sample: Sample, parsing: ParsingSpec | None) -> str | None:
    """As the engine said; a stop with calls is `tool_calls`, unless the caller named the function (as OpenAI has it)."""
    reason = sample.finish_reason
    if reason is None:
        return None
    if (
        reason is FinishReason.STOP
        and sample.parsed is not None
        and sample.parsed.tool_calls
        and parsing is not None
        and parsing.tool_choice in (AUTO, REQUIRED)
    ):
        return "tool_calls"
    return reason.value


def parse_status(sample: Sample) -> str | None:
    """ok or malformed, None where nothing was to be parsed."""
    return sample.parsed.parse_status if sample.parsed is not None and sample.parsed.parse_status != "none" else None


def shows_tokens(request: ChatRequest, group: GroupSpec) -> bool:
    """Who hides the reasoning gets no tokens either: they would spell it out."""
    return request.include_reasoning is not False or group.parsing is None
