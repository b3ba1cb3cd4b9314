"""Sampling parameters: merged, checked, and refused by name (A12, A26)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams
from rollgrid_ingest.sampling import NEUTRAL, SamplingFields, checked, merged
from rollgrid_ingest.settings import Limits
from rollgrid_ingest.wire import decode_json
from rollgrid_runtime.errors import RollgridError

DECODER = msgspec.json.Decoder(SamplingFields)


def check(limits: Limits | None = None, /, **fields: Any) -> SamplingParams:
    parsed = decode_json(msgspec.json.encode(fields), DECODER)
    return checked(parsed, "sampling.", limits or Limits(), vocab_size=100, max_model_len=64, max_tokens=7)


def test_nothing_given_is_the_contracts_defaults() -> None:
    assert check() == SamplingParams(max_tokens=7)


def test_everything_given_arrives() -> None:
    given = {
        "max_tokens": 5,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "seed": 2**63 - 1,
        "stop": ["a", "b"],
        "stop_token_ids": [1, 99],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "bad_words": ["x"],
        "allowed_token_ids": [3],
        "logit_bias": {"5": -100.0},
        "logprobs": 20,
        "skip_special_tokens": False,
    }
    params = check(None, **given)
    for name, value in given.items():
        assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value), name


def test_one_stop_string_and_the_disabled_top_k() -> None:
    params = check(stop="END", top_k=-1)
    assert params.stop == ("END",)
    assert params.top_k == 0


@pytest.mark.parametrize(
    ("fields", "code", "field"),
    [
        ({"max_tokens": 0}, ErrorCode.LIMIT_EXCEEDED, "max_tokens"),
        ({"max_tokens": 64}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        ({"max_tokens": 10**30}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "max_tokens"),
        ({"min_tokens": 8}, ErrorCode.LIMIT_EXCEEDED, "min_tokens"),
        ({"min_tokens": -1}, ErrorCode.LIMIT_EXCEEDED, "min_tokens"),
        ({"temperature": -0.1}, ErrorCode.LIMIT_EXCEEDED, "temperature"),
        ({"temperature": 2.1}, ErrorCode.LIMIT_EXCEEDED, "temperature"),
        ({"top_p": 0}, ErrorCode.LIMIT_EXCEEDED, "top_p"),
        ({"top_k": -2}, ErrorCode.LIMIT_EXCEEDED, "top_k"),
        ({"min_p": 1.5}, ErrorCode.LIMIT_EXCEEDED, "min_p"),
        ({"repetition_penalty": 0}, ErrorCode.LIMIT_EXCEEDED, "repetition_penalty"),
        ({"presence_penalty": 3}, ErrorCode.LIMIT_EXCEEDED, "presence_penalty"),
        ({"seed": -1}, ErrorCode.LIMIT_EXCEEDED, "seed"),
        ({"seed": 2**63}, ErrorCode.LIMIT_EXCEEDED, "seed"),
        ({"logprobs": 21}, ErrorCode.LIMIT_EXCEEDED, "logprobs"),
        ({"logprobs": -1}, ErrorCode.LIMIT_EXCEEDED, "logprobs"),
        ({"stop": ["x"] * 17}, ErrorCode.LIMIT_EXCEEDED, "stop"),
        ({"stop": ["x" * 1025]}, ErrorCode.LIMIT_EXCEEDED, "stop"),
        ({"stop": ""}, ErrorCode.INVALID_REQUEST, "stop"),
        ({"bad_words": [" "]}, ErrorCode.INVALID_REQUEST, "bad_words"),
        ({"stop_token_ids": [100]}, ErrorCode.TOKEN_OUT_OF_RANGE, "stop_token_ids"),
        ({"allowed_token_ids": [-1]}, ErrorCode.TOKEN_OUT_OF_RANGE, "allowed_token_ids"),
        ({"allowed_token_ids": []}, ErrorCode.INVALID_REQUEST, "allowed_token_ids"),
        ({"logit_bias": {"100": 1}}, ErrorCode.TOKEN_OUT_OF_RANGE, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, ErrorCode.TOKEN_OUT_OF_RANGE, "logit_bias"),
        ({"logit_bias": {"x": 1}}, ErrorCode.TOKEN_OUT_OF_RANGE, "logit_bias"),
        ({"logit_bias": {"5": 101}}, ErrorCode.LIMIT_EXCEEDED, "logit_bias.5"),
        ({"temperature": "hot"}, ErrorCode.INVALID_REQUEST, None),
        ({"logprobs": True}, ErrorCode.INVALID_REQUEST, None),
        ({"beam": 3}, ErrorCode.UNKNOWN_FIELD, None),
    ],
)
def test_refusals_name_the_field(fields: dict[str, Any], code: ErrorCode, field: str | None) -> None:
    with pytest.raises(RollgridError) as refused:
        check(None, **fields)
    assert refused.value.code is code
    assert refused.value.field == (f"sampling.{field}" if field else next(iter(fields)))
    if code in (ErrorCode.LIMIT_EXCEEDED, ErrorCode.TOKEN_OUT_OF_RANGE, ErrorCode.CONTEXT_LENGTH_EXCEEDED):
        assert refused.value.limit or "not a token id" in refused.value.message or "no such" in refused.value.message


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_offered_is_refused_unless_it_says_nothing(name: str) -> None:
    check(None, **{name: None})
    for harmless in NEUTRAL[name]:
        check(None, **{name: harmless})
    with pytest.raises(RollgridError) as refused:
        check(None, **{name: ["something"]})
    assert refused.value.code is ErrorCode.UNSUPPORTED
    assert refused.value.field == f"sampling.{name}"


def test_true_is_not_one_and_false_is_not_zero() -> None:
    with pytest.raises(RollgridError):
        check(length_penalty=True)
    with pytest.raises(RollgridError):
        check(use_beam_search=0)


def test_a_tenants_output_limit_is_named() -> None:
    with pytest.raises(RollgridError) as refused:
        check(Limits(max_output_tokens=4), max_tokens=5)
    assert refused.value.limit == "max_output_tokens=4"


def test_merged_takes_the_own_value_first_and_keeps_refusals() -> None:
    both = merged(
        SamplingFields(max_tokens=5, temperature=0.0), SamplingFields(temperature=1.5, structured_outputs={"a": 1})
    )
    assert (both.max_tokens, both.temperature, both.structured_outputs) == (5, 1.5, {"a": 1})
    assert merged(None, None) == SamplingFields()
