"""Bad input ends in one attempt with a typed error that names the field and the limit; the queue stays clean."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import Door
from tests.e2e.doors import completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(420)]
PROMPT = [1, 40, 41, 42, 43]


def refused(answer: httpx2.Response, status: int, code: str, field: str | None, limit: bool = False) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == code, error
    assert error["retryable"] is False
    if field is not None:
        assert field in (error["param"] or ""), error
    if limit:
        assert error["limit"], error


def generate(**fields: Any) -> dict[str, Any]:
    return {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4}, **fields}


def batch(**fields: Any) -> dict[str, Any]:
    tasks = [{"prompt_token_ids": PROMPT}]
    return {"run": "poison", "n": 1, "sampling": {"max_tokens": 4}, "tasks": tasks, **fields}


CASES: list[tuple[str, str, dict[str, Any], int, str, str | None, bool]] = [
    ("over-context", "/v1/completions", {"prompt": [5] * 3000, "max_tokens": 4}, 400, "context_length_exceeded", "prompt", True),
    ("prompt-plus-max-tokens", "/v1/completions", {"prompt": [5] * 2000, "max_tokens": 100}, 400, "context_length_exceeded", None, True),
    ("n-over", "/v1/completions", {"prompt": "hi", "n": 100_000, "max_tokens": 4}, 400, "limit_exceeded", "n", True),
    ("id-over", "/v1/completions", {"prompt": [5, 512], "max_tokens": 4}, 400, "token_out_of_range", "prompt", True),
    ("id-negative", "/v1/completions", {"prompt": [5, -1], "max_tokens": 4}, 400, "token_out_of_range", "prompt", True),
    ("id-negative-generate", "/inference/v1/generate", generate(token_ids=[-3]), 400, "token_out_of_range", "token_ids", True),
    ("id-over-u4", "/inference/v1/generate", generate(token_ids=[2**40]), 400, "token_out_of_range", "token_ids", True),
    ("unknown-model", "/v1/completions", {"model": "nobody", "prompt": "hi"}, 404, "model_not_found", "model", False),
    ("empty-text", "/v1/completions", {"prompt": "", "max_tokens": 4}, 400, "empty_prompt", "prompt", False),
    ("empty-ids", "/inference/v1/generate", generate(token_ids=[]), 400, "empty_prompt", "token_ids", False),
    ("no-tasks", "/v1/rollouts", batch(tasks=[]), 400, "invalid_request", "tasks", False),
    ("unknown-sampling", "/v1/rollouts", batch(sampling={"max_tokens": 4, "beam": 3}), 400, "unknown_field", "beam", False),
    ("unknown-field", "/v1/completions", {"prompt": "hi", "beam_width": 3}, 400, "unknown_field", "beam_width", False),
    ("no-max-tokens", "/v1/rollouts", batch(sampling={}), 400, "invalid_request", "max_tokens", False),
    ("temperature", "/v1/completions", {"prompt": "hi", "temperature": -1}, 400, "limit_exceeded", "temperature", True),
    ("top-p", "/v1/completions", {"prompt": "hi", "top_p": 2}, 400, "limit_exceeded", "top_p", True),
    ("seed", "/v1/completions", {"prompt": "hi", "seed": 2**70}, 400, "limit_exceeded", "seed", True),
    ("run-dots", "/v1/rollouts", batch(run="a.b"), 400, "invalid_request", "run", True),
    ("run-star", "/v1/rollouts", batch(run="*"), 400, "invalid_request", "run", True),
    ("run-gt", "/v1/rollouts", batch(run=">"), 400, "invalid_request", "run", True),
    ("unknown-scorer", "/v1/rollouts", batch(scorers=["vibes"]), 400, "invalid_request", "scorers", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "field", "limit"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_poison(
    http: httpx2.Client, vllm_door: Door, path: str, body: dict[str, Any], status: int, code: str, field: str | None,
    limit: bool,
) -> None:  # fmt: skip
    refused(http.post(path, json={"model": vllm_door.policy, **body}), status, code, field, limit)


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/v1/rollouts"])
def test_poison_bodies(http: httpx2.Client, path: str) -> None:
    json_type = {"content-type": "application/json"}
    big = http.post(path, content=b'{"prompt":"' + b"a" * (10 * 2**20) + b'"}', headers=json_type)
    refused(big, 413, "payload_too_large", None, True)
    deep = http.post(path, content=b'{"metadata":' + b"[" * 50_000 + b"]" * 50_000 + b"}", headers=json_type)
    assert deep.status_code == 400, deep.text
    assert deep.json()["error"]["code"] in ("invalid_request", "limit_exceeded", "unknown_field")
    utf8 = http.post(path, content=b'{"model":"\xff\xfe"}', headers=json_type)
    refused(utf8, 400, "invalid_request", None)
    refused(http.post(path, content=b"{not json", headers=json_type), 400, "invalid_request", None)


def test_poison_leaves_the_queue_clean_and_the_engine_well(http: httpx2.Client, vllm_door: Door) -> None:
    for _, path, body, status, *_ in CASES:
        assert http.post(path, json={"model": vllm_door.policy, **body}).status_code == status
    assert completion(http, model=vllm_door.policy, prompt=PROMPT, max_tokens=4)["choices"]
    fleet = http.get("/v1/fleet").json()
    assert fleet["queues"]["RG_JOBS"]["messages"] == 0, json.dumps(fleet["queues"])
