"""The unmodified OpenAI client against the whole pipe on the scripted engine (A26, A49)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.support.stack import Stack, scripted, stack
from tests.support.waiting import wait_until

from .test_doors import refusal

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
EMPTY, ERROR = 499, 498
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    env = {
        "ROLLGRID_SAMPLER_SCRIPTED_FAULTS": json.dumps({str(EMPTY): "empty", str(ERROR): "error"}),
        "ROLLGRID_INGEST_REPLY_POLL_S": "0.5",
    }
    with stack(scripted(samplers=2, token_rate=150.0, eos_rate=0.0, slots=64, ack_wait_s=2.0, env=env)) as running:
        yield running


@pytest.fixture
def client(pipe: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{pipe.url}/v1", api_key="unused", max_retries=0, timeout=60) as found:
        yield found


@pytest.fixture
def http(pipe: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pipe.url, timeout=60) as found:
        yield found


class Streamed:
    """What a client puts together from chunks, per choice."""

    def __init__(self, chunks: Any) -> None:
        self.text: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[float | None]] = {}
        self.reasons: dict[int, str] = {}
        self.order: list[int] = []
        self.usage: Any = None
        self.sample_ids: dict[int, str] = {}
        for chunk in chunks:
            self.usage = chunk.usage or self.usage
            for choice in chunk.choices:
                self._add(choice)

    def _add(self, choice: Any) -> None:
        at = choice.index
        text = choice.text if hasattr(choice, "text") else choice.delta.content
        self.text[at] = self.text.get(at, "") + (text or "")
        extra = choice.model_extra or {}
        if extra.get("token_ids"):
            self.order.append(at)
        self.ids.setdefault(at, []).extend(extra.get("token_ids") or ())
        if choice.logprobs is not None:
            found = choice.logprobs
            values = [entry.logprob for entry in found.content] if hasattr(found, "content") else found.token_logprobs
            self.logprobs.setdefault(at, []).extend(values)
        if choice.finish_reason:
            assert at not in self.reasons
            self.reasons[at] = choice.finish_reason
            self.sample_ids[at] = extra["sample_id"]


def recorded(http: httpx2.Client, sample_id: str) -> dict[str, Any]:
    group, index = sample_id.rsplit(".", 1)
    wait_until(lambda: http.get(f"/v1/groups/{group}").status_code == 200, 20, "the group's close")
    sample: dict[str, Any] = http.get(f"/v1/groups/{group}").json()["group"]["entries"][int(index)]["sample"]
    return sample


# -- chat -------------------------------------------------------------------------------------------


def test_chat_streamed_and_whole_say_the_same_and_equal_the_record(client: openai.OpenAI, http: httpx2.Client) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "system", "content": [{"type": "text", "text": "be kind"}]}, *MESSAGES],
        "n": 4,
        "seed": 2**63 - 1,
        "max_completion_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    streamed = Streamed(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len(set(streamed.text.values())) == 4
    assert streamed.order[:4] != [0, 0, 0, 0], "choices come interleaved"
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.finish_reason == streamed.reasons[choice.index] == "length"
        assert choice.message.content == streamed.text[choice.index]
        assert [entry.logprob for entry in choice.logprobs.content] == streamed.logprobs[choice.index]
        assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)
        assert all(
            bytes(entry.bytes or ()).decode(errors="replace") == entry.token for entry in choice.logprobs.content
        )
        extra: Any = choice.model_extra
        assert extra["token_ids"] == streamed.ids[choice.index]
        sample = recorded(http, streamed.sample_ids[choice.index])
        assert (sample["token_ids"], sample["text"]) == (extra["token_ids"], choice.message.content)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 48
    assert streamed.usage == whole.usage
    prompt: Any = whole.model_extra
    assert len(prompt["prompt_token_ids"]) == whole.usage.prompt_tokens


def test_a_conversation_with_tools_and_their_results_is_rendered(client: openai.OpenAI) -> None:
    history: list[Any] = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": "add"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "3"}]},
    ]
    answer = client.chat.completions.create(
        model="tiny",
        messages=history,
        tools=[TOOL],
        tool_choice="none",
        max_tokens=3,
        extra_body={"return_prompt_text": True},
    )
    text: Any = answer.model_extra
    assert "<|im_start|>tool\n3<|im_end|>" in text["prompt_text"]
    assert "<|im_start|>assistant\n<|im_end|>" in text["prompt_text"]
    goes_on = client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, {"role": "assistant", "content": "I sa"}],
        max_tokens=3,
        extra_body={"continue_final_message": True, "return_prompt_text": True},
    )
    text = goes_on.model_extra
    assert text["prompt_text"].endswith("<|im_start|>assistant\nI sa")
    assert goes_on.choices[0].message.role == "assistant"


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "auto-without-a-parser": ({"tools": [TOOL]}, "unsupported", "tools"),
    "images": ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "unsupported", "messages[0].content"),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "unsupported", "messages[0].content"),
    "no-content": ({"messages": [{"role": "user"}]}, "invalid_request", "messages[0].content"),
    "no-messages": ({"messages": []}, "empty_prompt", "messages"),
    "unknown-function": ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "invalid_request", "tool_choice.function.name"),
    "no-tools": ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
    "empty-tools": ({"tools": []}, "invalid_request", "tools"),
    "format": ({"response_format": {"type": "xml"}}, "unsupported", "response_format.type"),
    "two-constraints": ({"response_format": SCHEMA, "tools": [TOOL], "tool_choice": "required"}, "invalid_request", "response_format"),
    "top-without-logprobs": ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
    "top": ({"logprobs": True, "top_logprobs": 21}, "limit_exceeded", "top_logprobs"),
    "completion-tokens": ({"max_completion_tokens": 0}, "limit_exceeded", "max_completion_tokens"),
    "stream-options": ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
    "functions": ({"functions": [{}]}, "unsupported", "functions"),
    "unknown": ({"extra_body": {"colour": 1}}, "unknown_field", "colour"),
    "prompt-logprobs": ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "unsupported", "prompt_logprobs"),
}  # fmt: skip


@pytest.mark.parametrize(("fields", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_by_name(
    client: openai.OpenAI, fields: dict[str, Any], code: str, param: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **fields})
    assert (refused.value.code, refused.value.param) == (code, param)
    if code == "unsupported" and param == "tools":
        assert "ROLLGRID_CHECKPOINT_SYNC_MODELS" in refused.value.message


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.ConflictError) as never:
        client.chat.completions.create(model="tiny-v7", messages=MESSAGES)
    assert (never.value.code, never.value.body["retryable"]) == ("version_unavailable", False)  # type: ignore[index]
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as failed:
            client.completions.create(model="tiny", prompt=[ERROR], max_tokens=3, stream=stream)
        assert failed.value.code == "engine_error"
        with pytest.raises(openai.InternalServerError) as empty:
            client.completions.create(model="tiny", prompt=[EMPTY], max_tokens=3, stream=stream)
        assert empty.value.code == "empty_completion"


def test_models_by_alias_path_and_version(client: openai.OpenAI, http: httpx2.Client) -> None:
    base = http.get("/v1/policies/tiny").json()["base"]
    for name in ("tiny", "tiny@0", "tiny-v0", base):
        card = client.models.retrieve(name)
        assert (card.id, card.model_dump()["root"]) == (name, "tiny")
        answer = client.chat.completions.create(model=name, messages=MESSAGES, max_tokens=2)
        assert answer.model == name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("tiny-v")


def test_misspelt_query_parameters_are_refused(http: httpx2.Client) -> None:
    for method, path in (("GET", "/v1/models?limt=1"), ("POST", "/v1/chat/completions?stream=1")):
        answer = http.request(method, path, json={"model": "tiny", "messages": MESSAGES})
        assert answer.status_code == 400
        assert refusal(answer)["code"] == "unknown_field"
    assert http.get("/v1/runs/a/trajectories?cursor=0&limit=1&wait_s=0").status_code == 200


# -- completions ------------------------------------------------------------------------------------


def test_completions_streamed_and_whole_say_the_same(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": "tiny",
        "prompt": [[5, 6], [7]],
        "n": 2,
        "seed": 7,
        "max_tokens": 8,
        "logprobs": 1,
        "extra_body": {"return_token_ids": True},
    }
    whole = client.completions.create(**asked)
    streamed = Streamed(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        assert choice.text == streamed.text[choice.index]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == streamed.logprobs[choice.index]
        extra: Any = choice.model_extra
        assert extra["token_ids"] == streamed.ids[choice.index]
    assert whole.usage == streamed.usage


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("max_tokens", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_an_echo_begins_with_the_prompt(
    client: openai.OpenAI, stream: bool, max_tokens: int, logprobs: int | None
) -> None:
    asked: dict[str, Any] = {
        "model": "tiny", "prompt": "hello there", "echo": True, "max_tokens": max_tokens, "logprobs": logprobs, "n": 2,
    }  # fmt: skip
    if stream:
        found = Streamed(client.completions.create(**asked, stream=True))
        texts, reasons = found.text, found.reasons
        logged: dict[int, list[float | None]] = found.logprobs
    else:
        answer = client.completions.create(**asked)
        texts = {choice.index: choice.text for choice in answer.choices}
        reasons = {choice.index: str(choice.finish_reason) for choice in answer.choices}
        logged = {
            choice.index: [*(choice.logprobs.token_logprobs or [])] for choice in answer.choices if choice.logprobs
        }
    assert all(text.startswith("hello there") for text in texts.values())
    assert [len(text) for text in texts.values()] == [len("hello there") + max_tokens] * 2
    assert set(reasons.values()) == {"length"}
    if logprobs is not None:
        assert all(values[0] is None and None not in values[1:] for values in logged.values())


def test_prompt_logprobs_have_vllms_shape_and_scoring_samples_nothing(http: httpx2.Client) -> None:
    prompt = [5, 6, 7]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2, "prompt_logprobs": 2}
    (choice,) = http.post("/v1/completions", json=body).json()["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, entry in zip(prompt[1:], others, strict=True):
        assert next(iter(entry)) == str(token), "the prompt's own token comes first"
        assert set(entry[str(token)]) == {"logprob", "rank", "decoded_token"}
        assert len(entry) >= 2
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2, "prompt_logprobs": 0}
    assert http.post("/v1/chat/completions", json=chat).json()["prompt_logprobs"][0] is None
    scored = http.post("/v1/score_tokens", json={"model": "tiny", "token_ids": [prompt, [8, 9]], "top_logprobs": 2})
    answer = scored.json()
    assert (answer["logprobs_mode"], answer["usage"]["completion_tokens"]) == ("raw_logprobs", 0)
    assert [row["token_ids"] for row in answer["data"]] == [prompt, [8, 9]]
    row = answer["data"][0]
    assert row["logprobs"] == [None] + [
        entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], others, strict=True)
    ]
    assert row["ranks"][0] is None
    assert [len(top) for top in row["top_logprobs"][1:]] == [2, 2]
    wrong = http.post("/v1/score_tokens", json={"model": "tiny", "token_ids": [1], "prompt": "x"})
    assert refusal(wrong)["param"] == "token_ids"


# -- leaving, coming back, dying ----------------------------------------------------------------------


def test_a_client_that_leaves_a_stream_cancels_it(client: openai.OpenAI, http: httpx2.Client) -> None:
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=400, stream=True, extra_headers={"x-rollgrid-run": "left-stream"}
    )
    for _, chunk in zip(range(4), stream, strict=False):
        assert chunk.choices
    stream.close()
    page = http.get("/v1/runs/left-stream/trajectories", params={"wait_s": 20}).json()
    assert [item["group"]["reason"] for item in page["groups"]] == ["cancelled"]


def test_a_repeated_key_streams_the_record_again(client: openai.OpenAI, http: httpx2.Client) -> None:
    def streamed() -> Streamed:
        headers = {"idempotency-key": "again", "x-rollgrid-run": "again"}
        return Streamed(
            client.chat.completions.create(
                model="tiny", messages=MESSAGES, max_tokens=9, n=2, stream=True, extra_headers=headers
            )
        )

    first, second = streamed(), streamed()
    assert first.text == second.text
    assert first.sample_ids == second.sample_ids
    assert len(http.get("/v1/runs/again/trajectories").json()["groups"]) == 1
    with pytest.raises(openai.ConflictError):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=8, extra_headers={"idempotency-key": "again"}
        )


@pytest.fixture
def lone_worker(pipe: Stack) -> Iterator[str]:
    """The name of the only sampler that runs; afterwards both do."""
    pipe["sampler-1"].kill()
    yield "sampler-0"
    pipe.heal()


@pytest.mark.parametrize("exact", [True, False])
def test_a_worker_killed_in_mid_stream_is_followed_by_another(
    pipe: Stack, client: openai.OpenAI, http: httpx2.Client, lone_worker: str, exact: bool
) -> None:
    """Without a penalty generation goes on behind what was sent, with one it begins again; the client sees one answer."""
    asked: dict[str, Any] = {} if exact else {"presence_penalty": 0.5}
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=300, stream=True, extra_body={"return_token_ids": True}, **asked
    )
    chunks: list[Any] = []
    for chunk in stream:
        chunks.append(chunk)
        if len(chunks) == 8:
            pipe[lone_worker].kill()
            pipe["sampler-1"].start()
    found = Streamed(chunks)
    assert found.reasons == {0: "length"}
    sample = recorded(http, found.sample_ids[0])
    assert (found.ids[0], found.text[0]) == (sample["token_ids"], sample["text"])
    assert len(found.ids[0]) == 300
    assert sample["attempt"] > 1
    assert bool(sample.get("resumed_from")) is exact
