"""The attached engine against a real HTTP server that speaks vLLM's completions route."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, SampleStatus
from rollgrid_runtime.health import http_server
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.base import Delta, EngineDead, GenerationRequest, RequestFailed, Sent
from rollgrid_sampler.engines.openai_http import OpenAIEngine
from rollgrid_sampler.settings import EngineKind, SamplerSettings

from tests.support.processes import free_port

from .stage import Stage, make_job, sampler


class CompletionsServer:
    """ASGI; answers prompt + 1, + 2, … and remembers what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status = 200
        self.omit_ids = False
        self.cut_short = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        data = b""
        while (message := await receive()).get("more_body"):
            data += message["body"]
        data += message.get("body", b"")
        body = json.loads(data) if data else {}
        status, answer = self._answer(scope["path"], body)
        if body.get("stream") and status == 200:
            await self._events(answer, send)
            return
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(answer).encode()})

    async def _events(self, answer: dict[str, Any], send: Any) -> None:
        """The answer token by token, as server-sent events."""
        (choice,) = answer["choices"]
        ids, ends = choice["token_ids"], choice["finish_reason"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        for at, token in enumerate(ids[: 1 if self.cut_short else None]):
            logprobs = {name: rows[at : at + 1] for name, rows in choice["logprobs"].items()}
            part: dict[str, Any] = {"text": "x", "token_ids": [token], "logprobs": logprobs}
            part["finish_reason"] = ends if at == len(ids) - 1 else None
            event = f"data: {json.dumps({'choices': [part]})}\n\n"
            await send({"type": "http.response.body", "body": event.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": "some-model", "max_model_len": 128}]}
        if path == "/detokenize":
            return 200, {"prompt": "x" * len(body["tokens"])}
        self.bodies.append(body)
        if self.status != 200:
            return self.status, {"error": {"message": "top_p is too much", "param": "top_p"}}
        sampled = [body["prompt"][-1] + 1 + i for i in range(body["max_tokens"])]
        choice: dict[str, Any] = {
            "text": "x" * len(sampled),
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {
                "token_logprobs": [-0.5] * len(sampled),
                "top_logprobs": [{f"token_id:{i}": -0.5, f"token_id:{i + 1}": -1.5} for i in sampled],
            },
        }
        if not self.omit_ids:
            choice["token_ids"] = sampled
        return 200, {"choices": [choice], "usage": {"prompt_tokens_details": {"cached_tokens": 2}}}


@pytest.fixture
async def server() -> AsyncIterator[tuple[CompletionsServer, str]]:
    app, port = CompletionsServer(), free_port()
    async with http_server(app, "127.0.0.1", port):
        yield app, f"http://127.0.0.1:{port}"


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        sample="s",
        index=0,
        prompt_token_ids=[7, 8],
        sampling=SamplingParams(**{"max_tokens": 3, **sampling}),
        seed=2**62,
    )


async def test_ids_in_ids_out(server: tuple[CompletionsServer, str]) -> None:
    app, url = server
    engine = OpenAIEngine(SamplerSettings(engine=EngineKind.OPENAI_HTTP, openai_url=url))
    await engine.start(0, None)
    await engine.health()
    assert engine.facts.max_model_len == 128
    result = await engine.generate(request(logprobs=2, top_k=5, stop=("\n",)))
    assert (result.token_ids, list(result.logprobs)) == ([9, 10, 11], [-0.5] * 3)
    assert (result.finish_reason, result.cached_tokens) == (FinishReason.LENGTH, 2)
    assert result.top_logprobs is not None
    assert result.top_logprobs.token_ids.tolist() == [9, 10, 10, 11, 11, 12]
    assert [(s.version, s.start, s.end) for s in result.version_spans] == [(0, 0, 3)]
    body = app.bodies[-1]
    assert (body["model"], body["prompt"], body["seed"], body["n"]) == ("some-model", [7, 8], 2**62, 1)
    assert (body["top_k"], body["stop"], body["return_token_ids"]) == (5, ["\n"], True)
    assert "min_p" not in body, "defaults are left to the server"
    await engine.close()


async def test_a_stream_in_portions_and_behind_sent_tokens(server: tuple[CompletionsServer, str]) -> None:
    app, url = server
    engine = OpenAIEngine(SamplerSettings(engine=EngineKind.OPENAI_HTTP, openai_url=url))
    await engine.start(0, None)
    told: list[Delta] = []
    asked = request(max_tokens=6, logprobs=2, ignore_eos=True)
    result = await engine.generate(asked, told.append)
    assert (result.token_ids, result.text) == ([9, 10, 11, 12, 13, 14], "xxxxxx")
    assert [(d.offset, d.token_ids, d.text) for d in told] == [(i, [9 + i], "x") for i in range(5)]
    sent = Sent(
        token_ids=[9, 10], logprobs=array("f", [-1, -1]), version_spans=(VersionSpan(version=0, start=0, end=2),)
    )
    again = msgspec.structs.replace(asked, sent=sent, group_seed=4)
    resumed = await engine.generate(again, told.append)
    assert (app.bodies[-1]["prompt"], app.bodies[-1]["max_tokens"]) == ([7, 8, 9, 10], 4)
    assert app.bodies[-1]["seed"] == ids.sample_seed(4, 0, 2)
    assert (resumed.token_ids, resumed.resumed_from, resumed.text) == ([9, 10, 11, 12, 13, 14], 2, "xxxxxx")
    assert list(resumed.logprobs) == [-1, -1, -0.5, -0.5, -0.5, -0.5]
    for changes in ({"stop": ("y",)}, {"ignore_eos": False}):  # a stop over the join, an end nobody knows
        sampling = msgspec.structs.replace(asked.sampling, **changes)
        restarted = await engine.generate(msgspec.structs.replace(again, sampling=sampling), told.append)
        assert (restarted.resumed_from, app.bodies[-1]["prompt"]) == (0, [7, 8])
    app.cut_short = True
    with pytest.raises(RequestFailed, match="without a finish"):
        await engine.generate(asked, told.append)
    app.status = 400
    with pytest.raises(RequestFailed) as refused:
        await engine.generate(asked, told.append)
    assert refused.value.field == "top_p"
    await engine.close()


async def test_refusals_are_typed_and_silence_is_death(server: tuple[CompletionsServer, str]) -> None:
    app, url = server
    engine = OpenAIEngine(SamplerSettings(engine=EngineKind.OPENAI_HTTP, openai_url=url))
    await engine.start(0, None)
    for status, code in ((400, ErrorCode.INVALID_REQUEST), (500, ErrorCode.ENGINE_ERROR)):
        app.status = status
        with pytest.raises(RequestFailed) as refused:
            await engine.generate(request())
        assert refused.value.code is code
        assert refused.value.field == ("top_p" if status == 400 else None)
    app.status, app.omit_ids = 200, True
    with pytest.raises(RequestFailed, match="return_token_ids"):
        await engine.generate(request())
    await engine.close()
    nobody = OpenAIEngine(SamplerSettings(openai_url=f"http://127.0.0.1:{free_port()}"))
    with pytest.raises(EngineDead):
        await nobody.start(0, None)
    await nobody.close()


async def test_a_job_through_an_attached_server(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, server: tuple[CompletionsServer, str]
) -> None:
    job = make_job(n=3)
    await stage.submit(job)
    async with sampler(nats_settings, s3, engine=EngineKind.OPENAI_HTTP, openai_url=server[1]):
        found = await stage.finished(job)
    assert {s.status for s in found.values()} == {SampleStatus.SUCCEEDED}
    assert {event.engine for event in await stage.read()} == {"openai_http"}
