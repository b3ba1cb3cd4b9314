"""Whatever is posted, the door answers with a typed refusal or accepts: never a 5xx, never silence."""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .door import Door

SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def client(ingest: Door) -> Iterator[httpx2.Client]:
    with ingest.client() as http:
        yield http


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["tiny", "", "a.b", "\x00", "exact_match", "\ud800", -1, 2**31, 2**63, 2**64, 1e308, 0, 512]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
sampling_names = [
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "logprobs",
    "logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs", "structured_outputs", "repetition_penalty", "n",
]  # fmt: skip
sampling = st.dictionaries(st.sampled_from(sampling_names) | st.text(max_size=5), anything, max_size=4).map(
    lambda fields: {"max_tokens": 4, **fields}
)
task = st.fixed_dictionaries(
    {},
    optional={
        "prompt": st.text(max_size=20) | anything,
        "messages": anything | st.just([{"role": "user", "content": "hi"}]),
        "prompt_token_ids": st.lists(st.integers(-2, 600), max_size=5) | anything,
        "n": st.integers(-1, 5) | anything,
        "sampling": sampling,
        "scorers": anything | st.lists(st.sampled_from(["exact_match", "numeric"]), max_size=2),
        "task": anything,
        "metadata": anything,
        "deadline_s": st.floats() | anything,
        "tools": anything,
        "chat_template_kwargs": anything,
    },
)
batch = st.fixed_dictionaries(
    {"run": st.just("fuzz") | anything, "tasks": st.lists(task | st.just({"prompt": "hi"}), max_size=3)},
    optional={
        "model": st.just("tiny") | anything,
        "n": st.integers(-1, 4) | anything,
        "sampling": sampling,
        "scorers": anything,
        "metadata": anything,
        "deadline_s": anything,
        "priority": st.sampled_from(["normal", "bulk", "interactive"]) | anything,
        "weights": anything | st.just({"min_version": 0}),
        "rights": anything,
        "engagement_id": anything,
        "cache_salt": anything,
        "surprise": anything,
    },
)


def post(client: httpx2.Client, path: str, body: bytes) -> None:
    answer = client.post(path, content=body)
    assert answer.status_code in (202, 400, 404, 409, 413), (answer.status_code, answer.text, body)
    if answer.status_code != 202:
        error = answer.json()["error"]
        assert error["code"] not in ("internal", "bus_error")
        assert error["message"]


@SETTINGS
@given(body=batch)
def test_any_batch(client: httpx2.Client, body: dict[str, Any]) -> None:
    post(client, "/v1/rollouts", json.dumps(body).encode("utf-8", "surrogatepass"))


@SETTINGS
@given(body=st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode("utf-8", "surrogatepass")))
@pytest.mark.parametrize("path", ["/v1/rollouts", "/v1/completions", "/inference/v1/generate"])
def test_any_body(client: httpx2.Client, path: str, body: bytes) -> None:
    post(client, path, body)


readable = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@SETTINGS
@given(
    run=st.text(max_size=30),
    cursor=st.text(max_size=12) | st.integers().map(str),
    header=st.sampled_from(["accept", "last-event-id", "traceparent", "x-request-id", "idempotency-key"]),
    value=readable.map(str.strip).filter(lambda text: "event-stream" not in text),
)
def test_any_reader(client: httpx2.Client, run: str, cursor: str, header: str, value: str) -> None:
    path = f"/v1/runs/{urllib.parse.quote(run, safe='')}/trajectories"
    answer = client.get(path, params={"cursor": cursor}, headers={header: value})
    assert answer.status_code in (200, 307, 400, 404), (answer.status_code, answer.text)


def test_the_door_is_well_afterwards(client: httpx2.Client) -> None:
    assert client.get("/readyz").status_code == 200
    answer = client.post(
        "/v1/rollouts", json={"run": "after", "tasks": [{"prompt": "hi"}], "sampling": {"max_tokens": 4}}
    )
    assert answer.status_code == 202
