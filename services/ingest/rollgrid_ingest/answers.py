"""Finished samples as OpenAI-like JSON.  Token lists never pass through a validating model."""

from __future__ import annotations

import time
from typing import Any

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.samples import PromptLogprobs, Sample
from rollgrid_rendering.renderer import Renderer
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Versioned

from .logprob_shapes import (
    TokenNames,
    completion_logprobs,
    generate_logprobs,
    prompt_logprobs,
    prompt_rows,
    rows_of,
)
from .openai_schema import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
    GenerateChoice,
    GenerateRequest,
    GenerateResponse,
    ModelCard,
    ModelList,
    ScoredTokens,
    ScoreResponse,
    SpanAnswer,
    TokenLogprob,
    TurnAnswer,
    Usage,
)
from .replies import Collected
from .streaming import alternatives_of
from .submission import Accepted, GroupSpec, Submission


def completion_answer(
    request: CompletionRequest, submission: Submission, accepted: Accepted, collected: Collected, renderer: Renderer
) -> CompletionResponse:
    """Blocks for as long as detokenising takes where the sampler sent no text."""
    names = TokenNames(renderer, bool(request.return_tokens_as_token_ids))
    choices: list[CompletionChoice] = []
    for group_id, group in zip(accepted.group_ids, submission.groups, strict=True):
        samples = collected.samples(group_id)
        for sample in samples:
            choices.append(
                _choice(request, submission, group_id, group, samples, sample, len(choices), names, renderer)
            )
    return CompletionResponse(
        id=f"cmpl-{accepted.batch_id}",
        object="text_completion",
        created=int(time.time()),
        model=submission.model,
        choices=choices,
        usage=usage_of(submission, collected),
        logprobs_mode=collected.logprobs_mode,
        **turn_fields(submission),
    )


def _choice(
    request: CompletionRequest,
    submission: Submission,
    group_id: str,
    group: GroupSpec,
    samples: list[Sample],
    sample: Sample,
    index: int,
    names: TokenNames,
    renderer: Renderer,
) -> CompletionChoice:
    token_ids = sample.token_ids.tolist()
    text = text_of(sample, group, renderer)
    if request.echo:
        text = echoed(group, renderer) + text
    prompt = group.prompt_token_ids.tolist() if request.return_token_ids or request.prompt_logprobs is not None else []
    return CompletionChoice(
        index=index,
        text=text,
        logprobs=None if request.logprobs is None else _logprobs(request, group, samples, sample, names),
        finish_reason=sample.finish_reason.value if sample.finish_reason else None,
        stop_reason=sample.stop_reason,
        sample_id=submission.sample_id(group_id, sample.index),
        weight_versions=spans_of(sample),
        max_tokens=group.sampling.max_tokens,
        token_ids=token_ids if request.return_token_ids else None,
        prompt_token_ids=prompt if request.return_token_ids else None,
        prompt_logprobs=prompt_logprobs(prompt, _of_prompt(samples), names)
        if request.prompt_logprobs is not None
        else None,
        seed=sample.seed,
        weight_fingerprint=sample.weight_fingerprint,
    )


def text_of(sample: Sample, group: GroupSpec, renderer: Renderer) -> str:
    """As the sampler wrote it; an engine without text is detokenised here."""
    if sample.text is not None:
        return sample.text
    return renderer.decode(sample.token_ids.tolist(), skip_special_tokens=group.sampling.skip_special_tokens)


def echoed(group: GroupSpec, renderer: Renderer) -> str:
    """The prompt's text as it was given, or that of its ids."""
    if group.prompt_text is not None:
        return group.prompt_text
    return renderer.decode(group.prompt_token_ids.tolist(), skip_special_tokens=False)


def _logprobs(
    request: CompletionRequest, group: GroupSpec, samples: list[Sample], sample: Sample, names: TokenNames
) -> CompletionLogprobs:
    ids = sample.token_ids.tolist()
    rows = rows_of(ids, sample.logprobs.tolist(), alternatives_of(sample.top_logprobs, len(ids)))
    if request.echo:
        rows = prompt_rows(group.prompt_token_ids.tolist(), _of_prompt(samples)) + rows
    return completion_logprobs(rows, names)


def _of_prompt(samples: list[Sample]) -> PromptLogprobs | None:
    """All samples of a group share the prompt; the first of each job carries its logprobs."""
    return next((sample.prompt_logprobs for sample in samples if sample.prompt_logprobs is not None), None)


def generate_answer(
    request: GenerateRequest,
    submission: Submission,
    accepted: Accepted,
    collected: Collected,
    request_id: str,
    renderer: Renderer,
) -> GenerateResponse:
    group_id, group = accepted.group_ids[0], submission.groups[0]
    fields = request.sampling_params
    samples, prompt = collected.samples(group_id), group.prompt_token_ids.tolist()
    return GenerateResponse(
        request_id=request.request_id or request_id,
        model=submission.model,
        created=int(time.time()),
        choices=[
            _generate_choice(submission.sample_id(group_id, sample.index), sample, fields.logprobs is not None)
            for sample in samples
        ],
        prompt_token_ids=prompt,
        usage=usage_of(submission, collected),
        logprobs_mode=collected.logprobs_mode,
        prompt_logprobs=prompt_logprobs(prompt, _of_prompt(samples), TokenNames(renderer, as_ids=False))
        if fields.prompt_logprobs is not None
        else None,
        **turn_fields(submission),
    )


def _generate_choice(name: str, sample: Sample, with_logprobs: bool) -> GenerateChoice:
    ids = sample.token_ids.tolist()
    others = alternatives_of(sample.top_logprobs, len(ids)) if with_logprobs else []
    return GenerateChoice(
        index=sample.index,
        token_ids=ids,
        logprobs=generate_logprobs(ids, sample.logprobs.tolist(), others) if with_logprobs else None,
        finish_reason=sample.finish_reason.value if sample.finish_reason else None,
        stop_reason=sample.stop_reason,
        weight_versions=spans_of(sample),
        sample_id=name,
        seed=sample.seed,
        weight_fingerprint=sample.weight_fingerprint,
    )


def score_answer(top: bool, submission: Submission, accepted: Accepted, collected: Collected) -> ScoreResponse:
    """Raises RollgridError when a record lacks what was asked for."""
    data: list[ScoredTokens] = []
    mode = "raw_logprobs"
    for index, (group_id, group) in enumerate(zip(accepted.group_ids, submission.groups, strict=True)):
        sample = collected.samples(group_id)[0]
        ids, found = group.prompt_token_ids.tolist(), sample.prompt_logprobs
        if found is None and len(ids) > 1:
            raise RollgridError(
                ErrorCode.ENGINE_ERROR, "the engine returned no prompt logprobs", boundary=Boundary.ENGINE
            )
        if found is not None:
            mode = found.mode
        rows = prompt_rows(ids, found)
        ranks: list[int | None] = [] if found is None else [*found.ranks]
        data.append(
            ScoredTokens(
                index=index,
                token_ids=ids,
                logprobs=[logprob for _, logprob, _ in rows],
                ranks=[None, *(ranks or [None] * (len(ids) - 1))],
                sample_id=submission.sample_id(group_id, sample.index),
                weight_versions=spans_of(sample),
                top_logprobs=[
                    None if at == 0 else [TokenLogprob(token_id=token, logprob=value) for token, value in others]
                    for at, (_, _, others) in enumerate(rows)
                ]
                if top
                else None,
                weight_fingerprint=sample.weight_fingerprint,
            )
        )
    return ScoreResponse(
        id=f"score-{accepted.batch_id}",
        object="score_tokens",
        created=int(time.time()),
        model=submission.model,
        data=data,
        usage=usage_of(submission, collected),
        logprobs_mode=mode,
    )


def turn_fields(submission: Submission) -> dict[str, Any]:
    """What a session's turn says of itself beside its answer; nothing of any other call."""
    if submission.turn is None:
        return {}
    session = submission.turn.session
    node = session.node
    found = TurnAnswer(
        session=session.session,
        turn=session.turn,
        branch=node.branch,
        parent=node.parent,
        fork=None if node.fork is None else node.fork.value,
        fork_detail=node.fork_detail,
    )
    return {"session": found}


def spans_of(sample: Sample) -> list[SpanAnswer]:
    return [SpanAnswer(version=span.version, start=span.start, end=span.end) for span in sample.version_spans]


def usage_of(submission: Submission, collected: Collected) -> Usage:
    prompt = sum(len(group.prompt_token_ids) for group in submission.groups)
    completion = sum(len(sample.token_ids) for sample in collected.everything())
    return Usage(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion)


def models_answer(policies: list[Versioned[PolicyState]], started_at: int) -> ModelList:
    """Every policy under its own name first, then its aliases as models of their own."""
    cards = [model_card(entry.value, entry.value.policy, started_at) for entry in policies]
    taken = {card.id for card in cards}
    for entry in policies:
        for alias in entry.value.aliases:
            if alias not in taken:
                taken.add(alias)
                cards.append(model_card(entry.value, alias, started_at))
    return ModelList(object="list", data=cards)


def model_card(state: PolicyState, name: str, started_at: int) -> ModelCard:
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
