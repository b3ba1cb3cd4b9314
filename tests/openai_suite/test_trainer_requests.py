"""The requests trainers really send (TRL, AsyncGRPO, prime-rl, verifiers), field by field, to `/v1` and generate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from .endpoints import ROLLGRID, Endpoint
from .model import EOS, MODEL, PATH_ID, VERSION_ID

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]
ENDPOINTS = (ROLLGRID,)
PROMPT = [1, 40, 41, 42, 43]


@pytest.fixture
def http(endpoint: Endpoint) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {endpoint.key}"}
    with httpx2.Client(base_url=endpoint.url, headers=headers, timeout=60) as client:
        yield client


def posted(http: httpx2.Client, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def generate(http: httpx2.Client, **sampling: Any) -> dict[str, Any]:
    body = {"model": MODEL, "token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "logprobs": 1, **sampling}}
    return posted(http, "/inference/v1/generate", body)


def token_of(name: str) -> int:
    assert name.startswith("token_id:")
    return int(name.removeprefix("token_id:"))


def test_A29_trl_server_mode_completions(http: httpx2.Client) -> None:
    """Lists of ids times n, prompt-major, tokens by id; EOS kept."""
    prompts = [[1, 40, 41], [1, 50]]
    body = {"model": PATH_ID, "prompt": prompts, "n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0}
    body |= {"top_k": 0, "min_p": 0.0, "max_tokens": 64, "logprobs": 0, "logit_bias": {str(EOS): 5.0}}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choices = posted(http, "/v1/completions", body)["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [prompts[0], prompts[0], prompts[1], prompts[1]]
    for choice in choices:
        found = choice["logprobs"]
        assert [token_of(name) for name in found["tokens"]] == choice["token_ids"]
        assert len(found["token_logprobs"]) == len(choice["token_ids"]) > 0
        assert all(top == {name: value} for top, name, value in zip(found["top_logprobs"], found["tokens"], found["token_logprobs"], strict=True))  # fmt: skip
        if choice["finish_reason"] == "stop":
            assert choice["token_ids"][-1] == EOS


def test_A29_trl_client_chat(http: httpx2.Client) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True}
    body |= {"top_logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
    found = posted(http, "/v1/chat/completions", body)
    assert found["prompt_token_ids"]
    (choice,) = found["choices"]
    assert [token_of(entry["token"]) for entry in choice["logprobs"]["content"]] == choice["token_ids"]


def test_A29_trl_distillation_scores(http: httpx2.Client) -> None:
    body = {"model": MODEL, "prompt": [PROMPT], "max_tokens": 1, "prompt_logprobs": 3}
    (choice,) = posted(http, "/v1/completions", body)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    for token, entries in zip(PROMPT[1:], rest, strict=True):
        assert next(iter(entries)) == str(token)
        assert 3 <= len(entries) <= 4
        assert all({"logprob", "rank"} <= set(entry) for entry in entries.values())


def test_A29_async_grpo_worker(http: httpx2.Client) -> None:
    """One token-id prompt, a 63-bit seed, the policy under `name-vN`."""
    body = {"model": VERSION_ID, "prompt": PROMPT, "n": 1, "max_tokens": 8, "temperature": 1.0, "logprobs": 0}
    body |= {"return_token_ids": True, "seed": 2**63 - 25}
    first, second = (posted(http, "/v1/completions", body)["choices"][0] for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert len(first["logprobs"]["token_logprobs"]) == len(first["token_ids"])


def test_A29_prime_rl_generate(http: httpx2.Client) -> None:
    """Both forms of each token's id; sticky session; the policy's version as salt."""
    sampling = {"max_tokens": 8, "temperature": 1.0, "top_p": 1.0, "stop_token_ids": [EOS], "logprobs": 1}
    sampling |= {"skip_special_tokens": False}
    body = {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling, "cache_salt": "7"}
    found = posted(http, "/inference/v1/generate", body, **{"X-Session-ID": "episode-1"})
    assert found["request_id"]
    assert found["prompt_token_ids"] == PROMPT
    (choice,) = found["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"]) > 0
    for token, entry in zip(choice["token_ids"], content, strict=True):
        assert (entry["token_id"], entry["token"]) == (token, f"token_id:{token}")
        assert math.isfinite(entry["logprob"])
        assert entry["logprob"] != -9999.0
        assert all(top["token"] == f"token_id:{top['token_id']}" for top in entry["top_logprobs"])


def test_A29_prime_rl_prefill_scores(http: httpx2.Client) -> None:
    """It takes the first entry of each place: the prompt's own token."""
    found = generate(http, max_tokens=1, prompt_logprobs=1)
    scores = found["prompt_logprobs"]
    assert scores[0] is None
    assert [next(iter(entries)) for entries in scores[1:]] == [str(token) for token in PROMPT[1:]]


def test_A13_generate_several_at_once(http: httpx2.Client) -> None:
    """As clients of vLLM ask for it, `output_kind` and all."""
    found = generate(http, n=4, output_kind=2, seed=3)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert len({tuple(choice["token_ids"]) for choice in found["choices"]}) > 1


def test_A26_generate_has_no_silent_bound(http: httpx2.Client) -> None:
    """vLLM's own default is 16 tokens: here the field is required."""
    answer = http.post("/inference/v1/generate", json={"model": MODEL, "token_ids": PROMPT, "sampling_params": {}})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "sampling_params.max_tokens"


def test_A26_no_answer_is_an_empty_success(http: httpx2.Client) -> None:
    found = generate(http, logit_bias={str(EOS): 100})
    assert found["choices"][0]["token_ids"] == [EOS]


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
def test_A29_what_clients_look_at_first(http: httpx2.Client, path: str) -> None:
    assert http.get(path).status_code == 200
