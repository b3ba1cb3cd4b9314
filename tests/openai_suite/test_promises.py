"""What rollgrid promises an OpenAI client beyond vLLM: idempotent calls, answers equal to records, versions."""

from __future__ import annotations

import json
import uuid
from typing import Any

import openai
import pytest
from openai import OpenAI

from .asking import FREE, PROMPT, Joined, chat, complete, extra_of, ids_of
from .endpoints import ROLLGRID, Endpoint
from .model import MODEL
from .records import samples_of
from .test_tools import CALL, TOOLS, forced

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ENDPOINTS = (ROLLGRID,)


def headers(**more: str) -> dict[str, str]:
    """A run of this test's own."""
    return {"X-Rollgrid-Run": f"run-{uuid.uuid4().hex[:12]}", **more}


def test_I2_the_same_key_and_body_are_one_call(client: OpenAI, endpoint: Endpoint) -> None:
    own = headers(**{"Idempotency-Key": uuid.uuid4().hex})
    first, second = (complete(client, FREE, n=3, max_tokens=16, extra_headers=own) for _ in range(2))
    assert first.id == second.id
    assert [ids_of(choice) for choice in first.choices] == [ids_of(choice) for choice in second.choices]
    assert len(samples_of(endpoint, own["X-Rollgrid-Run"], 3)) == 3


def test_I2_a_key_with_another_body_is_a_conflict(client: OpenAI) -> None:
    own = headers(**{"Idempotency-Key": uuid.uuid4().hex})
    chat(client, extra_headers=own)
    with pytest.raises(openai.ConflictError):
        chat(client, max_tokens=9, extra_headers=own)


def test_I2_a_streamed_call_may_be_read_again_under_its_key(client: OpenAI) -> None:
    own = headers(**{"Idempotency-Key": uuid.uuid4().hex})
    first, second = (
        Joined(chat(client, FREE, stream=True, n=2, max_tokens=24, extra_headers=own), is_chat=True) for _ in range(2)
    )
    assert (first.text, first.token_ids, first.finish) == (second.text, second.token_ids, second.finish)


def test_I2_calls_without_a_key_are_calls_of_their_own(client: OpenAI, endpoint: Endpoint) -> None:
    own = headers()
    assert complete(client, extra_headers=own).id != complete(client, extra_headers=own).id
    samples_of(endpoint, own["X-Rollgrid-Run"], 2)


def test_I2_a_plain_answer_equals_its_record(client: OpenAI, endpoint: Endpoint) -> None:
    own = headers()
    body = chat(client, FREE, n=2, logprobs=True, top_logprobs=1, max_tokens=12, extra_headers=own)
    for choice, record in zip(body.choices, samples_of(endpoint, own["X-Rollgrid-Run"], 2), strict=True):
        assert record["token_ids"] == ids_of(choice)
        assert record["logprobs"] == pytest.approx([entry.logprob for entry in choice.logprobs.content], abs=1e-6)
        assert record["finish_reason"] == choice.finish_reason
        assert extra_of(choice, "weight_versions") == [{"version": 0, "start": 0, "end": 12}]


def test_I2_a_stream_equals_its_record(client: OpenAI, endpoint: Endpoint) -> None:
    own = headers()
    stream = complete(client, FREE, stream=True, n=3, logprobs=0, max_tokens=40, extra_headers=own)
    found = Joined(stream, is_chat=False)
    for index, record in enumerate(samples_of(endpoint, own["X-Rollgrid-Run"], 3)):
        assert record["token_ids"] == found.token_ids[index]
        assert record["logprobs"] == pytest.approx(found.logprobs[index], abs=1e-6)
        assert record["text"] == found.text[index]


def test_C39_tool_calls_are_recorded_as_they_were_answered(client: OpenAI, endpoint: Endpoint) -> None:
    own = headers()
    body = chat(client, forced(CALL), tools=TOOLS, max_tokens=200, extra_headers=own)
    (call,) = body.choices[0].message.tool_calls
    (record,) = samples_of(endpoint, own["X-Rollgrid-Run"], 1)
    (recorded,) = record["parsed"]["tool_calls"]
    assert recorded["id"] == call.id
    assert json.loads(recorded["function"]["arguments"]) == json.loads(call.function.arguments)
    assert record["parsed"]["parse_status"] == "ok"


def test_C39_a_malformed_call_is_reported(client: OpenAI) -> None:
    broken = '<tool_call>\n{"name": "weather", "arguments"\n</tool_call>'
    (choice,) = chat(client, forced(broken), tools=TOOLS, max_tokens=200).choices
    assert extra_of(choice, "parse_status") == "malformed"


def test_I4_a_version_may_be_pinned_in_the_models_name(client: OpenAI) -> None:
    body = complete(client, model=f"{MODEL}@0")
    assert extra_of(body.choices[0], "weight_versions") == [
        {"version": 0, "start": 0, "end": body.usage.completion_tokens}
    ]
    with pytest.raises(openai.APIStatusError) as caught:
        complete(client, model=f"{MODEL}@9")
    assert caught.value.status_code in (404, 409)


def test_A26_max_tokens_zero_samples_nothing_and_scores_the_prompt(client: OpenAI) -> None:
    body = complete(client, {"prompt_logprobs": 0}, max_tokens=0)
    assert body.usage.completion_tokens == 0
    assert len(extra_of(body.choices[0], "prompt_logprobs")) == len(PROMPT)


def test_A26_the_bound_really_used_is_in_the_answer(client: OpenAI) -> None:
    body = client.completions.create(model=MODEL, prompt=PROMPT, logit_bias={"2": 100})
    assert extra_of(body.choices[0], "max_tokens") == 2048 - len(PROMPT)


def test_I7_ids_of_samples_and_modes_are_in_the_answer(client: OpenAI) -> None:
    body: Any = chat(client, n=2)
    assert body.model_extra["logprobs_mode"] == "processed_logprobs"
    assert len({extra_of(choice, "sample_id") for choice in body.choices}) == 2
