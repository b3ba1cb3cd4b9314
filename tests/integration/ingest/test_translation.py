"""Whatever a client sends to the calls that wait becomes a job or a typed refusal; never a 5xx (A49)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.servers import SeaweedServer
from tests.support.tiny_models import TinyModel, tiny_model

from .door import Door, door, policy_state
from .test_doors import refusal


@pytest.fixture(scope="module")
def ingest(s3_server: SeaweedServer) -> Iterator[Door]:
    """Nobody works here: what is accepted expires at once."""
    env = {"ROLLGRID_INGEST_REPLY_GRACE_S": "0", "ROLLGRID_INGEST_REPLY_POLL_S": "60"}
    state = policy_state(tiny_model(TinyModel()), tool_parser="hermes")
    with door(s3_server, env, (state,)) as running:
        yield running


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**66), 2**66) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
TEXT = st.text(max_size=8)
TOOL = st.fixed_dictionaries(
    {"type": st.sampled_from(("function", "custom"))},
    optional={"function": st.fixed_dictionaries({"name": st.sampled_from(("add", "auto", "ü"))}, optional={"parameters": JSON})},
)  # fmt: skip
PART = st.fixed_dictionaries({"type": st.sampled_from(("text", "image_url", "refusal", "x"))}, optional={"text": TEXT})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "system", "developer", "assistant", "tool", ""))},
    optional={
        "content": TEXT | st.lists(PART, max_size=2) | JSON,
        "name": TEXT,
        "tool_calls": st.lists(
            st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": TEXT}, optional={"arguments": TEXT | JSON})}),
            max_size=2,
        ),
        "reasoning_content": TEXT,
    },
)  # fmt: skip
SMALL = st.integers(-2, 600)
SHARED: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(-1, 4),
    "max_tokens": SMALL,
    "min_tokens": SMALL,
    "temperature": st.floats(-1, 3),
    "top_p": st.floats(-1, 2),
    "top_k": SMALL,
    "seed": st.integers(-1, 2**64),
    "stop": TEXT | st.lists(TEXT, max_size=3),
    "logit_bias": st.dictionaries(st.sampled_from(("5", "x", "9999999999")), st.floats(-200, 200), max_size=2),
    "prompt_logprobs": st.integers(-1, 30),
    "response_format": JSON | st.fixed_dictionaries({"type": st.sampled_from(("text", "json_object", "json_schema"))}),
    "structured_outputs": JSON | st.fixed_dictionaries({"regex": TEXT}),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans(), "x": st.none()}),
    "weights": st.fixed_dictionaries({}, optional={"exact_version": st.integers(-1, 2), "max_staleness": st.integers(-1, 2)}),
    "cache_salt": TEXT,
    "metadata": JSON,
    "return_token_ids": st.booleans(),
    "suffix": TEXT,
    "user": JSON,
}  # fmt: skip
CHAT = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3)},
    optional={
        **SHARED,
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(-1, 22),
        "max_completion_tokens": SMALL,
        "tools": st.lists(TOOL, max_size=2),
        "tool_choice": st.sampled_from(("none", "auto", "required", "x", {"function": {"name": "add"}}, {})),
        "parallel_tool_calls": st.booleans(),
        "chat_template_kwargs": JSON,
        "reasoning_effort": st.sampled_from(("none", "high", "x")),
        "continue_final_message": st.booleans(),
        "add_generation_prompt": st.booleans(),
        "documents": JSON,
    },
)  # fmt: skip
COMPLETION = st.fixed_dictionaries(
    {"prompt": TEXT | st.lists(st.integers(-1, 600), max_size=4) | st.lists(st.lists(st.integers(0, 600), max_size=3), max_size=3) | JSON},
    optional={**SHARED, "logprobs": st.integers(-1, 22), "echo": st.booleans()},
)  # fmt: skip
SCORE = st.fixed_dictionaries(
    {}, optional={"token_ids": st.lists(st.integers(-1, 600), max_size=4) | JSON, "prompt": TEXT | JSON, "top_logprobs": SMALL}
)  # fmt: skip


def answered(ingest: Door, path: str, body: dict[str, Any]) -> None:
    """Accepted (and expired: nobody is there), or refused with a code and, where a field is at fault, its name."""
    with httpx2.Client(base_url=ingest.url, timeout=30) as client:
        answer = client.post(path, json={"model": "tiny", "deadline_s": 0.001, **body})
    error = refusal(answer)
    if answer.status_code == 504:
        assert error["code"] == "expired"
        return
    assert answer.status_code in (400, 409), answer.text
    assert error["code"] not in ("internal", "engine_error")
    assert error["message"]


CALM = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@CALM
@given(body=CHAT)
def test_chats_become_jobs_or_typed_refusals(ingest: Door, body: dict[str, Any]) -> None:
    answered(ingest, "/v1/chat/completions", body)


@CALM
@given(body=COMPLETION)
def test_completions_become_jobs_or_typed_refusals(ingest: Door, body: dict[str, Any]) -> None:
    answered(ingest, "/v1/completions", body)


@CALM
@given(body=SCORE)
def test_scoring_becomes_jobs_or_typed_refusals(ingest: Door, body: dict[str, Any]) -> None:
    answered(ingest, "/v1/score_tokens", body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/score_tokens"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff", b"[" * 100_000, b'{"messages": [{}]}', b'{"prompt": 1e999}']
)
def test_what_is_no_request_is_refused(ingest: Door, path: str, content: bytes) -> None:
    with httpx2.Client(base_url=ingest.url, timeout=30) as client:
        answer = client.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert refusal(answer)["code"] in ("invalid_request", "unknown_field")


def test_a_forced_call_becomes_a_schema_and_the_parsing_travels(ingest: Door) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required", "max_tokens": 3}
    answered(ingest, "/v1/chat/completions", {**body, "metadata": {"mark": "forced"}})
    job = next(job for job in ingest.jobs() if job.metadata == {"mark": "forced"})
    assert job.sampling.structured_output is not None
    assert job.sampling.structured_output["json"]["items"]["anyOf"][0]["properties"]["name"]["enum"] == ["add"]
    assert job.parsing is not None
    assert (job.parsing.tool_choice, job.parsing.tools, job.parsing.tool_parser) == ("required", (tool,), "hermes")
    with httpx2.Client(base_url=ingest.url, timeout=30) as client:
        task = {"messages": body["messages"], "tools": [tool]}
        batch = {"run": "parsed", "model": "tiny", "sampling": {"max_tokens": 3}, "tasks": [task, {"prompt": "x"}]}
        accepted = client.post("/v1/rollouts", json=batch).json()
    parsing = {job.position: job.parsing for job in ingest.jobs() if job.batch_id == accepted["batch_id"]}
    assert parsing[0] is not None
    assert (parsing[0].tool_choice, parsing[0].tools) == ("auto", (tool,))
    assert parsing[1] is None
