"""Sampling parameters: what a request may say, and the checked contract they become."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams

from .settings import Limits
from .structured import structured_output
from .wire import INT64, Refusable, invalid, over_limit

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logprob_token_ids": ([],),
    "prompt_logprob_token_ids": ([],),
    "prompt_logprob_start": (0,),
    "trace_decode_token_ids": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0, 1),
    "watermarking": (False,),
    "vllm_xargs": ({},),
    "extra_args": ({},),
    "routed_experts_prompt_start": (0,),
    "truncate_prompt_tokens": (-1,),
}
"""Known fields that change the result and are not offered yet: refused by name unless neutral."""

IGNORED = (
    "detokenize",
    "flat_logprobs",
    "output_kind",
    "skip_clone",
    "skip_reading_prefix_cache",
    "spaces_between_special_tokens",
    "stream_interval",
)
"""Known fields without any influence on ids and logprobs: accepted and ignored."""


class SamplingFields(Refusable, forbid_unknown_fields=True, kw_only=True):
    """Under vLLM's names; None = not given.  `logprobs` counts alternatives beside the sampled token's own.

    `structured_output` is another name of `structured_outputs`.  `max_tokens` may be 0 with `prompt_logprobs`.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    structured_outputs: dict[str, Any] | None = None
    structured_output: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    # refused unless neutral
    logprob_token_ids: Any = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: Any = None
    trace_decode_token_ids: Any = None
    repetition_detection: Any = None
    thinking_token_budget: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    watermarking: Any = None
    vllm_xargs: Any = None
    extra_args: Any = None
    routed_experts_prompt_start: Any = None
    truncate_prompt_tokens: Any = None
    # ignored
    detokenize: Any = None
    flat_logprobs: Any = None
    output_kind: Any = None
    skip_clone: Any = None
    skip_reading_prefix_cache: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None


_OWN = ("max_tokens", "logprobs", "structured_outputs", "structured_output", "response_format")
"""Fields that become something else, or nothing, in the contract."""

FIELDS = tuple(
    field
    for field in SamplingFields.__struct_fields__
    if field not in NEUTRAL and field not in IGNORED and field not in _OWN
)


def merged(base: SamplingFields | None, own: SamplingFields | None) -> SamplingFields:
    """`own` over `base`, field by field."""
    if own is None or base is None:
        return own or base or SamplingFields()
    return SamplingFields(
        **{
            name: value if (value := getattr(own, name)) is not None else getattr(base, name)
            for name in SamplingFields.__struct_fields__
        }
    )


class Overrides(NamedTuple):
    """What a door says in words of its own: `max_tokens` under another name, `logprobs` as a count."""

    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    logprobs: int | None = None
    logprobs_field: str = "logprobs"
    prompt_logprobs: int | None = None


def checked(
    fields: SamplingFields,
    prefix: str,
    limits: Limits,
    *,
    vocab_size: int,
    max_model_len: int,
    max_tokens: int,
    own: Overrides | None = None,
) -> SamplingParams:
    """The contract for `fields`; `max_tokens` stands in where none is given.

    Raises RollgridError naming `prefix` + field and the limit it broke.
    """
    fields.refuse(NEUTRAL, prefix)
    if own is None:
        own = Overrides(fields.max_tokens, "max_tokens", fields.logprobs, "logprobs")
    values: dict[str, Any] = {name: value for name in FIELDS if (value := getattr(fields, name)) is not None}
    if own.logprobs is not None:
        values["logprobs"] = own.logprobs
    if own.prompt_logprobs is not None:
        values["prompt_logprobs"] = own.prompt_logprobs
    wanted = max_tokens if own.max_tokens is None else own.max_tokens
    least = 1 if values.get("prompt_logprobs") is None else 0
    _check_lengths(wanted, values.get("min_tokens", 0), prefix, own.max_tokens_field, least, limits, max_model_len)
    if fields.structured_outputs or fields.structured_output or fields.response_format:
        constraint = _constraint(fields, prefix, limits)
        if constraint is not None:
            values["structured_output"] = constraint
    _check_numbers(values, prefix)
    _check_seed_and_logprobs(values, prefix, own.logprobs_field, limits)
    _check_texts(values, prefix, limits)
    _check_ids(values, prefix, limits, vocab_size)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    return SamplingParams(max_tokens=wanted, **values)


def _constraint(fields: SamplingFields, prefix: str, limits: Limits) -> dict[str, Any] | None:
    outputs, name = fields.structured_outputs, "structured_outputs"
    if fields.structured_output:
        if outputs and outputs != fields.structured_output:
            raise invalid(f"{prefix}structured_outputs and {prefix}structured_output differ", f"{prefix}{name}")
        outputs, name = fields.structured_output, "structured_output"
    return structured_output(outputs, fields.response_format, prefix, limits, outputs_field=name)


def _check_lengths(
    max_tokens: int, min_tokens: int, prefix: str, name: str, least: int, limits: Limits, max_model_len: int
) -> None:
    if max_tokens < least:
        raise over_limit(f"{prefix}{name}", max_tokens, f"{name}>={least}")
    if limits.max_output_tokens is not None and max_tokens > limits.max_output_tokens:
        raise over_limit(f"{prefix}{name}", max_tokens, f"max_output_tokens={limits.max_output_tokens}")
    if max_tokens >= max_model_len:
        limit = f"max_model_len={max_model_len}"
        raise invalid(
            f"{prefix}{name} is {max_tokens}: with any prompt it exceeds {limit}",
            f"{prefix}{name}",
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
            limit=limit,
        )
    if not 0 <= min_tokens <= max_tokens:
        raise over_limit(f"{prefix}min_tokens", min_tokens, f"0<=min_tokens<=max_tokens={max_tokens}")


_RANGES = {
    "temperature": (0.0, 2.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "top_k": (-1, 2**31 - 1, False),
}
"""name → (low, high, low excluded), as vLLM accepts them."""


def _check_numbers(values: dict[str, Any], prefix: str) -> None:
    for name, (low, high, excluded) in _RANGES.items():
        value = values.get(name)
        # written so that NaN fails it
        if value is not None and not (low < value <= high if excluded else low <= value <= high):
            raise over_limit(f"{prefix}{name}", value, f"{low}{'<' if excluded else '<='}{name}<={high}")


def _check_seed_and_logprobs(values: dict[str, Any], prefix: str, logprobs_field: str, limits: Limits) -> None:
    if "seed" in values and not 0 <= values["seed"] < INT64:
        raise over_limit(f"{prefix}seed", values["seed"], "0<=seed<2**63")
    for name, field in (("logprobs", logprobs_field), ("prompt_logprobs", "prompt_logprobs")):
        if name in values and not 0 <= values[name] <= limits.max_logprobs:
            raise over_limit(f"{prefix}{field}", values[name], f"max_logprobs={limits.max_logprobs}")


def _check_texts(values: dict[str, Any], prefix: str, limits: Limits) -> None:
    stop = values.get("stop")
    if stop is not None:
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        values["stop"] = stop
        _check_count(stop, f"{prefix}stop", "max_stop", limits.max_stop)
        for text in stop:
            if not text:
                raise invalid(f"{prefix}stop holds an empty string", f"{prefix}stop")
            if len(text) > limits.max_stop_chars:
                raise over_limit(f"{prefix}stop", f"{len(text)} characters", f"max_stop_chars={limits.max_stop_chars}")
    words = values.get("bad_words")
    if words is not None:
        values["bad_words"] = tuple(words)
        _check_count(words, f"{prefix}bad_words", "max_bad_words", limits.max_bad_words)
        if not all(word.strip() for word in words):
            raise invalid(f"{prefix}bad_words holds an empty string", f"{prefix}bad_words")


def _check_ids(values: dict[str, Any], prefix: str, limits: Limits, vocab_size: int) -> None:
    for name, limit in (
        ("stop_token_ids", limits.max_stop_token_ids),
        ("allowed_token_ids", limits.max_allowed_token_ids),
    ):
        ids = values.get(name)
        if ids is None:
            continue
        _check_count(ids, f"{prefix}{name}", f"max_{name}", limit)
        check_token_ids(ids, f"{prefix}{name}", vocab_size)
        values[name] = tuple(ids)
    if values.get("allowed_token_ids") == ():
        raise invalid(f"{prefix}allowed_token_ids is empty: nothing could be sampled", f"{prefix}allowed_token_ids")
    bias = values.get("logit_bias")
    if bias is not None:
        field = f"{prefix}logit_bias"
        _check_count(bias, field, "max_logit_bias", limits.max_logit_bias)
        for key, value in bias.items():
            if not key.isascii() or not key.isdigit():
                raise invalid(f"{field}: {key!r} is not a token id", field, code=ErrorCode.TOKEN_OUT_OF_RANGE)
            if not -100.0 <= value <= 100.0:
                raise over_limit(f"{field}.{key}", value, "-100<=logit_bias<=100")
        if any(len(key) > 10 for key in bias):
            raise invalid(f"{field} holds no such token id", field, code=ErrorCode.TOKEN_OUT_OF_RANGE)
        check_token_ids([int(key) for key in bias], field, vocab_size)


def _check_count(items: Any, field: str, name: str, limit: int) -> None:
    if len(items) > limit:
        raise over_limit(field, f"{len(items)} entries", f"{name}={limit}")


def check_token_ids(ids: list[int], field: str, vocab_size: int) -> None:
    """Raises token_out_of_range naming the first id outside [0, vocab_size)."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    bad = next(token for token in ids if not 0 <= token < vocab_size)
    limit = f"vocab_size={vocab_size}"
    raise invalid(
        f"{field} holds the token id {bad}, outside [0, {vocab_size})",
        field,
        code=ErrorCode.TOKEN_OUT_OF_RANGE,
        limit=limit,
    )


def with_seed(params: SamplingParams, seed: int | None) -> SamplingParams:
    return params if params.seed == seed else msgspec.structs.replace(params, seed=seed)
