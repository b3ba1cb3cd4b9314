"""A session through its doors: plain HTTP for its life, the unmodified `openai` SDK for its turns."""

from __future__ import annotations

import functools
import time
from typing import Any

import httpx2
from openai import OpenAI
from openai.types.chat import ChatCompletion

from tests.support.stack import Stack

KEYS = {"acme": "key-of-acme", "bolt": "key-of-bolt"}
REQUEST_S = 60.0
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds two numbers",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]


class Session:
    """One open session of a tenant."""

    def __init__(self, pipe: Stack, opened: dict[str, Any], tenant: str) -> None:
        self.pipe, self.opened, self.tenant = pipe, opened, tenant
        self.id: str = opened["session"]
        self.http = http(pipe, tenant)

    def openai(self, base_path: str | None = None) -> OpenAI:
        base = self.pipe.url + (base_path or self.opened["base_path"])
        return _openai(self.pipe.url, self.tenant).with_options(base_url=base)

    def chat(self, messages: list[Any], base_path: str | None = None, **options: Any) -> Turn:
        options = {"max_tokens": 8, **options}
        client = self.openai(base_path)
        return Turn(client.chat.completions.create(model="tiny", messages=messages, **options))

    def state(self, **params: Any) -> dict[str, Any]:
        return ok(self.http.get(f"/v1/sessions/{self.id}", params=params))

    def fork(self, **body: Any) -> dict[str, Any]:
        return ok(self.http.post(f"/v1/sessions/{self.id}/fork", json=body), 201)

    def close(self, **body: Any) -> dict[str, Any]:
        return ok(self.http.post(f"/v1/sessions/{self.id}/close", json=body))

    def closed_group(self, wait_s: float = 20.0) -> dict[str, Any]:
        """The group's record, once it has closed."""
        cursor, deadline = self.opened["cursor"], time.monotonic() + wait_s
        while time.monotonic() < deadline:
            params = {"cursor": cursor, "wait_s": 5}
            page = ok(self.http.get(f"/v1/runs/{self.opened['run']}/trajectories", params=params))
            cursor = page["cursor"]
            for one in page["groups"]:  # others of the run may have closed since
                if one["group"]["group_id"] == self.opened["group_id"]:
                    return dict(one["group"])
        raise TimeoutError(f"{self.opened['group_id']} has not closed in {wait_s} s")


class Turn:
    """An answer of the SDK, and what rollgrid says beside it."""

    def __init__(self, answer: ChatCompletion) -> None:
        self.answer, self.raw = answer, answer.model_dump()
        self.place: dict[str, Any] = self.raw["session"]
        self.prompt: list[int] = self.raw["prompt_token_ids"]
        self.tokens: list[int] = self.raw["choices"][0]["token_ids"]
        self.number: int = self.place["turn"]
        self.fork: str | None = self.place["fork"]

    @property
    def message(self) -> dict[str, Any]:
        """As client code appends it to its conversation."""
        return self.answer.choices[0].message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})


@functools.cache
def _openai(url: str, tenant: str) -> OpenAI:
    """One for all sessions: a client of its own costs more than its turns."""
    return OpenAI(base_url=url, api_key=KEYS[tenant], max_retries=0, timeout=REQUEST_S)


@functools.cache
def _http(url: str, tenant: str) -> httpx2.Client:
    return httpx2.Client(base_url=url, headers={"authorization": f"Bearer {KEYS[tenant]}"}, timeout=REQUEST_S)


def http(pipe: Stack, tenant: str = "acme") -> httpx2.Client:
    return _http(pipe.url, tenant)


def open_session(pipe: Stack, tenant: str = "acme", **terms: Any) -> Session:
    answer = http(pipe, tenant).post("/v1/sessions", json=terms)
    assert answer.status_code in (200, 201), answer.text
    return Session(pipe, answer.json(), tenant)


def ok(answer: httpx2.Response, status: int = 200) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def code_of(answer: httpx2.Response) -> tuple[int, str, str | None]:
    """Status, code and field of a refusal."""
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]
