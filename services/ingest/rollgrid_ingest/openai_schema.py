"""The JSON shapes of the OpenAI-like doors: `/v1/completions`, `/v1/models`, `/inference/v1/generate`."""

from __future__ import annotations

from typing import Any

import msgspec

from .sampling import SamplingFields
from .wire import Refusable


class WeightsRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Which checkpoint versions may serve: one of the three, or `rule` and `value`."""

    rule: str | None = None
    value: int | None = None
    exact_version: int | None = None
    min_version: int | None = None
    max_staleness: int | None = None


COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
    "truncation_side": (),
    "return_mm_kwargs": (False,),
    "return_token_offsets": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`.  `prompt`: a text, texts, token ids, or lists of token ids.

    `user`, `request_id`, `session_id`, `priority`, `mm_payload`, `store` and `service_tier` are
    accepted and ignored.
    """

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None
    weights: WeightsRequest | None = None
    # refused unless neutral
    stream: Any = None
    stream_options: Any = None
    echo: Any = None
    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None
    truncation_side: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # ignored
    user: Any = None
    request_id: Any = None
    session_id: Any = None
    priority: Any = None
    mm_payload: Any = None
    store: Any = None
    service_tier: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of generate: vLLM's, `n` among them."""

    n: int | None = None


GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "stream": (False,),
    "stream_options": (),
    "output_mode": ("tokens",),
    "features": ({},),
    "content_parts": ([],),
    "reasoning_ended": (False,),
    "reasoning_parser_kwargs": ({},),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


class GenerateRequest(Refusable, forbid_unknown_fields=True, kw_only=True):
    """`POST /inference/v1/generate`, token in and token out; `sampling_params.max_tokens` is required.

    `priority`, `token_offsets`, `session_id` and `user` are accepted and ignored.
    """

    token_ids: list[int]
    sampling_params: GenerateSampling
    model: str | None = None
    n: int | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None
    weights: WeightsRequest | None = None
    # refused unless neutral
    stream: Any = None
    stream_options: Any = None
    output_mode: Any = None
    features: Any = None
    content_parts: Any = None
    reasoning_ended: Any = None
    reasoning_parser_kwargs: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # ignored
    priority: Any = None
    token_offsets: Any = None
    session_id: Any = None
    user: Any = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per sampled token in each list."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class SpanAnswer(msgspec.Struct, kw_only=True):
    """Tokens [start, end) were computed by checkpoint `version`."""

    version: int
    start: int
    end: int


class CompletionChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    sample_id: str
    weight_versions: list[SpanAnswer]
    max_tokens: int
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    seed: int | None = None
    weight_fingerprint: str | None = None


class CompletionResponse(msgspec.Struct, kw_only=True):
    """Choices in prompt-major order: prompt p, sample i is choice p * n + i."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    logprobs_mode: str


class GenerateLogprob(msgspec.Struct, kw_only=True):
    """Both forms of the id, as clients of either generation read them."""

    token: str
    token_id: int
    logprob: float


class GenerateLogprobEntry(msgspec.Struct, kw_only=True):
    """`top_logprobs` begins with the sampled token, the rest in rank order."""

    token: str
    token_id: int
    logprob: float
    top_logprobs: list[GenerateLogprob]


class GenerateLogprobs(msgspec.Struct, kw_only=True):
    content: list[GenerateLogprobEntry]


class GenerateChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int
    token_ids: list[int]
    logprobs: GenerateLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[SpanAnswer]
    sample_id: str
    seed: int | None = None
    weight_fingerprint: str | None = None


class GenerateResponse(msgspec.Struct, kw_only=True):
    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    prompt_token_ids: list[int]
    usage: Usage
    logprobs_mode: str


class ModelCard(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`root` is the policy an alias stands for."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    vocab_size: int
    aliases: list[str]


class ModelList(msgspec.Struct, kw_only=True):
    object: str
    data: list[ModelCard]
