"""The JSON shapes of `/v1/chat/completions`."""

from __future__ import annotations

from typing import Any

import msgspec

from .openai_schema import SpanAnswer, StreamOptions, TurnFields, Usage, WeightsRequest
from .sampling import SamplingFields

CHAT_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "best_of": (1,),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "truncation_side": (),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
}


class ChatRequest(SamplingFields, kw_only=True):
    """`POST /v1/chat/completions`.  `max_completion_tokens` wins over `max_tokens`.

    `logprobs` asks for the sampled tokens' own, `top_logprobs` for so many of the likeliest in each place.
    `user`, `request_id`, `session_id`, `priority`, `mm_payload`, `return_mm_kwargs`, `return_token_offsets`, `store`,
    `service_tier`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention` and `verbosity` are accepted
    and ignored.
    """

    messages: list[dict[str, Any]]
    model: str | None = None
    n: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, str]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    cache_salt: str | None = None
    metadata: dict[str, Any] | None = None
    deadline_s: float | None = None
    weights: WeightsRequest | None = None
    pin: bool | None = None
    on_refresh: str | None = None
    # refused unless neutral
    echo: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    best_of: Any = None
    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
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
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None


class ChatLogprob(msgspec.Struct, kw_only=True):
    """`bytes` is the token's text in UTF-8."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprobEntry(ChatLogprob, kw_only=True):
    """`top_logprobs` begins with the sampled token, the rest in rank order."""

    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[ChatLogprobEntry]


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`reasoning_content` is another name of `reasoning`."""

    role: str
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(msgspec.Struct, kw_only=True, omit_defaults=True):
    """`parse_status` is ok or malformed: then a call was begun and could not be read, its text is in the content."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    sample_id: str
    weight_versions: list[SpanAnswer]
    max_tokens: int
    parse_status: str | None = None
    token_ids: list[int] | None = None
    seed: int | None = None
    weight_fingerprint: str | None = None


class ChatResponse(TurnFields, kw_only=True, omit_defaults=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    logprobs_mode: str
    prompt_token_ids: list[int] | None = None
    prompt_text: str | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None
