"""Finished samples as OpenAI-like JSON.  Token lists never pass through a validating model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.ids import sample_id
from rollgrid_contracts.samples import Sample
from rollgrid_rendering.renderer import Renderer
from rollgrid_runtime.kv import Versioned

from .openai_schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    GenerateChoice,
    GenerateLogprob,
    GenerateLogprobEntry,
    GenerateLogprobs,
    GenerateRequest,
    GenerateResponse,
    ModelCard,
    ModelList,
    SpanAnswer,
    Usage,
)
from .replies import Collected
from .submission import Accepted, GroupSpec, Submission


def completion_answer(
    request: CompletionRequest, submission: Submission, accepted: Accepted, collected: Collected, renderer: Renderer
) -> CompletionResponse:
    """Blocks for as long as detokenising takes where the sampler sent no text."""
    choices: list[CompletionChoice] = []
    for group_id, group in zip(accepted.group_ids, submission.groups, strict=True):
        prompt_ids = group.prompt_token_ids.tolist() if request.return_token_ids else None
        for sample in collected.samples(group_id):
            choices.append(_choice(request, group_id, group, sample, len(choices), prompt_ids, renderer))
    return CompletionResponse(
        id=f"cmpl-{accepted.batch_id}",
        object="text_completion",
        created=int(time.time()),
        model=submission.model,
        choices=choices,
        usage=_usage(submission, collected),
        logprobs_mode=collected.logprobs_mode,
    )


def _choice(
    request: CompletionRequest,
    group_id: str,
    group: GroupSpec,
    sample: Sample,
    index: int,
    prompt_ids: list[int] | None,
    renderer: Renderer,
) -> CompletionChoice:
    token_ids = sample.token_ids.tolist()
    text = sample.text
    if text is None:
        text = renderer.decode(token_ids, skip_special_tokens=group.sampling.skip_special_tokens)
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=None
        if request.logprobs is None
        else _completion_logprobs(sample, token_ids, bool(request.return_tokens_as_token_ids), renderer),
        finish_reason=sample.finish_reason.value if sample.finish_reason else None,
        stop_reason=sample.stop_reason,
        sample_id=sample_id(group_id, sample.index),
        weight_versions=_spans(sample),
        max_tokens=group.sampling.max_tokens,
        token_ids=token_ids if request.return_token_ids else None,
        prompt_token_ids=prompt_ids,
        seed=sample.seed,
        weight_fingerprint=sample.weight_fingerprint,
    )


def _completion_logprobs(sample: Sample, token_ids: list[int], as_ids: bool, renderer: Renderer) -> CompletionLogprobs:
    def named(ids: list[int]) -> list[str]:
        return [f"token_id:{token}" for token in ids] if as_ids else renderer.pieces(ids)

    tokens = named(token_ids)
    logprobs = sample.logprobs.tolist()
    offsets, position = [], 0
    for piece in tokens:
        offsets.append(position)
        position += len(piece)
    top: list[dict[str, float]] = []
    for token, name, logprob, others in zip(token_ids, tokens, logprobs, _alternatives(sample), strict=True):
        entry = {name: logprob}
        names = named([other for other, _ in others])
        for (other, value), other_name in zip(others, names, strict=True):
            if other != token:
                entry.setdefault(other_name, value)
        top.append(entry)
    return CompletionLogprobs(tokens=tokens, token_logprobs=logprobs, top_logprobs=top, text_offset=offsets)


def generate_answer(
    request: GenerateRequest, submission: Submission, accepted: Accepted, collected: Collected, request_id: str
) -> GenerateResponse:
    group_id, group = accepted.group_ids[0], submission.groups[0]
    with_logprobs = request.sampling_params.logprobs is not None
    return GenerateResponse(
        request_id=request.request_id or request_id,
        model=submission.model,
        created=int(time.time()),
        choices=[_generate_choice(group_id, sample, with_logprobs) for sample in collected.samples(group_id)],
        prompt_token_ids=group.prompt_token_ids.tolist(),
        usage=_usage(submission, collected),
        logprobs_mode=collected.logprobs_mode,
    )


def _generate_choice(group_id: str, sample: Sample, with_logprobs: bool) -> GenerateChoice:
    return GenerateChoice(
        index=sample.index,
        token_ids=sample.token_ids.tolist(),
        logprobs=GenerateLogprobs(content=_generate_logprobs(sample)) if with_logprobs else None,
        finish_reason=sample.finish_reason.value if sample.finish_reason else None,
        stop_reason=sample.stop_reason,
        weight_versions=_spans(sample),
        sample_id=sample_id(group_id, sample.index),
        seed=sample.seed,
        weight_fingerprint=sample.weight_fingerprint,
    )


def _generate_logprobs(sample: Sample) -> list[GenerateLogprobEntry]:
    content: list[GenerateLogprobEntry] = []
    for token, logprob, others in zip(sample.token_ids, sample.logprobs, _alternatives(sample), strict=True):
        name = f"token_id:{token}"
        top = [GenerateLogprob(token=name, token_id=token, logprob=logprob)]
        top += [
            GenerateLogprob(token=f"token_id:{other}", token_id=other, logprob=value)
            for other, value in others
            if other != token
        ]
        content.append(GenerateLogprobEntry(token=name, token_id=token, logprob=logprob, top_logprobs=top))
    return content


def _alternatives(sample: Sample) -> Iterator[list[tuple[int, float]]]:
    """Per sampled token, the alternatives beside it, in rank order."""
    top = sample.top_logprobs
    if top is None:
        for _ in range(len(sample.token_ids)):
            yield []
        return
    offsets, ids, values = top.offsets.tolist(), top.token_ids.tolist(), top.logprobs.tolist()
    for start, end in pairwise(offsets):
        yield list(zip(ids[start:end], values[start:end], strict=True))


def _spans(sample: Sample) -> list[SpanAnswer]:
    return [SpanAnswer(version=span.version, start=span.start, end=span.end) for span in sample.version_spans]


def _usage(submission: Submission, collected: Collected) -> Usage:
    prompt = sum(len(group.prompt_token_ids) for group in submission.groups)
    completion = sum(len(sample.token_ids) for sample in collected.everything())
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def models_answer(policies: list[Versioned[PolicyState]], started_at: int) -> ModelList:
    """Every policy under its own name first, then its aliases as models of their own."""
    cards = [_card(entry.value, entry.value.policy, started_at) for entry in policies]
    taken = {card.id for card in cards}
    for entry in policies:
        for alias in entry.value.aliases:
            if alias not in taken:
                taken.add(alias)
                cards.append(_card(entry.value, alias, started_at))
    return ModelList(object="list", data=cards)


def _card(state: PolicyState, name: str, started_at: int) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=started_at,
        owned_by="rollgrid",
        root=state.policy,
        parent=None if name == state.policy else state.policy,
        max_model_len=state.max_model_len,
        vocab_size=state.vocab_size,
        aliases=list(state.aliases),
    )
