"""The JSON shapes of `/v1/completions`, `/v1/models`, `/inference/v1/generate` and `/v1/score_tokens`."""

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


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: also in every chunk.

    `include_obfuscation` is accepted and ignored.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Any = None


COMPLETION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "best_of": (1,),
    "prompt_embeds": (),
    "truncation_side": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


class CompletionRequest(SamplingFields, kw_only=True):
    """`POST /v1/completions`.  `prompt`: a text, texts, token ids, or lists of token ids.

    `echo` puts the prompt before the answer, with its logprobs if `logprobs` are asked for; `max_tokens` may then be 0.
    `user`, `request_id`, `session_id`, `priority`, `mm_payload`, `return_mm_kwargs`, `return_token_offsets`, `store` and
    `service_tier` are accepted and ignored.
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
    pin: bool | None = None
    on_refresh: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    echo: bool | None = None
    # refused unless neutral
    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None
    truncation_side: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    # ignored
    user: Any = None
    request_id: Any = None
    session_id: Any = None
    priority: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    store: Any = None
    service_tier: Any = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of generate: vLLM's, `n` among them."""

    n: int | None = None


GENERATE_NEUTRAL: dict[str, tuple[Any, ...]] = {
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
    pin: bool | None = None
    on_refresh: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # refused unless neutral
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


class ScoreRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/score_tokens`: logprobs of given tokens, nothing is sampled.

    Either `token_ids` (one list, or several) or `prompt` (a text, or texts).  `user` is accepted and ignored.
    """

    model: str | None = None
    token_ids: list[int | list[int]] | None = None
    prompt: str | list[str] | None = None
    add_special_tokens: bool | None = None
    top_logprobs: int | None = None
    weights: WeightsRequest | None = None
    pin: bool | None = None
    on_refresh: str | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None
    user: Any = None


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """One entry per sampled token in each list; with `echo` also per prompt token, the first of which has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
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
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    seed: int | None = None
    weight_fingerprint: str | None = None


class TurnAnswer(msgspec.Struct, kw_only=True):
    """Where a session's turn stands: `parent` is the turn it goes on behind (null: the root), `fork` why not the last one."""

    session: str
    turn: int
    branch: str
    parent: int | None
    fork: str | None = None
    fork_detail: str | None = None


class TurnFields(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Of a session's turn only."""

    session: TurnAnswer | None = None


class CompletionResponse(TurnFields, kw_only=True, omit_defaults=True):
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


class GenerateResponse(TurnFields, kw_only=True, omit_defaults=True):
    request_id: str
    model: str
    created: int
    choices: list[GenerateChoice]
    prompt_token_ids: list[int]
    usage: Usage
    logprobs_mode: str
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class ScoredTokens(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry per token in each list; the first token has no predecessor, so null.

    `ranks` count from 1 = the most likely.  `top_logprobs` are the likeliest tokens in each place.
    """

    index: int
    token_ids: list[int]
    logprobs: list[float | None]
    ranks: list[int | None]
    sample_id: str
    weight_versions: list[SpanAnswer]
    top_logprobs: list[list[TokenLogprob] | None] | None = None
    weight_fingerprint: str | None = None


class TokenLogprob(msgspec.Struct, kw_only=True):
    token_id: int
    logprob: float


class ScoreResponse(msgspec.Struct, kw_only=True):
    """`logprobs_mode` is raw_logprobs: those of the model before temperature and cut-offs."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoredTokens]
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
