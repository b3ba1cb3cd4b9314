"""An engine that is somebody else's running server (vLLM, SGLang) with an OpenAI completions route.

Token ids go in and out (`return_token_ids`).  The server's weights are its own: one version is
served under one label and never changed from here, and there is no fingerprint.  A streamed sample's
text is the server's.  Behind sent tokens it continues where the server can spell them, no stop string
may lie across the join and it is known which token ends a text; otherwise it starts again.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, PromptLogprobs, TopLogprobs

from rollgrid_sampler.settings import SamplerSettings
from rollgrid_sampler.transcript import UNFINISHED

from .base import (
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    OnDelta,
    RequestFailed,
    Sent,
    WeightsRefused,
)
from .progress import End, Progress

TOKEN_PREFIX = "token_id:"
"""How servers spell ids in logprob keys when asked to."""
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
FALLBACK_VOCAB = 1 << 20
"""The models route does not tell the vocabulary; ids beyond the real one are refused by the server."""


class OpenAIEngine:
    """See `base.Engine`."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        headers = {}
        if settings.openai_key is not None:
            headers["Authorization"] = f"Bearer {settings.openai_key.get_secret_value()}"
        limits = httpx2.Limits(max_connections=settings.slots + settings.express_places + 4)
        self._http = httpx2.AsyncClient(
            base_url=settings.openai_url, headers=headers, limits=limits, timeout=httpx2.Timeout(10, read=None)
        )
        self._model = settings.openai_model or ""
        self._facts: EngineFacts | None = None
        self._loaded = Loaded(version=-1)
        self._eos_ids: frozenset[int] = frozenset()

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineDead("the engine has not started")
        return self._facts

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    async def start(self, version: int, folder: Path | None) -> None:
        models = (await self._models()).get("data") or []
        wanted = [m for m in models if not self._model or m.get("id") == self._model]
        if not wanted:
            raise EngineDead(f"{self._settings.openai_url} does not serve {self._model or 'any model'}")
        self._model = str(wanted[0]["id"])
        context = self._settings.max_model_len or int(wanted[0].get("max_model_len") or 4096)
        self._facts = EngineFacts(name="openai_http", max_model_len=context, vocab_size=FALLBACK_VOCAB)
        self._loaded = Loaded(version=version)
        self._eos_ids = await asyncio.to_thread(eos_ids, self._settings.model)

    async def health(self) -> None:
        await self._models()

    async def close(self) -> None:
        await self._http.aclose()

    async def prepare(self, version: int, folder: Path) -> None:
        raise WeightsRefused("an attached server manages its own weights", intact=True)

    async def load_version(self, version: int, folder: Path, mode: OnRefresh) -> Loaded:
        raise WeightsRefused("an attached server manages its own weights", intact=True)

    async def add_adapter(self, version: int, folder: Path) -> Loaded:
        raise WeightsRefused("an attached server manages its own adapters", intact=True)

    async def remove_adapter(self, version: int, mode: OnRefresh) -> Loaded:
        return self.loaded

    @property
    def tokenizer(self) -> None:
        return None

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        if request.sampling.max_tokens and (on_delta is not None or request.sent.token_ids):
            return await self._stream(request, on_delta or (lambda _: None))
        return await self._whole(request)

    async def _whole(self, request: GenerationRequest) -> Generated:
        began = time.time()
        try:
            body = self._body(request)
            if request.sampling.prompt_logprobs is not None:  # only with a whole answer
                body["prompt_logprobs"] = request.sampling.prompt_logprobs
            answer = await self._http.post("/v1/completions", json=body)
        except httpx2.HTTPError as error:
            raise EngineDead(f"the server does not answer: {error!r}") from error
        _refuse(answer)
        return self._collect(answer.json(), request, began)

    async def _stream(self, request: GenerationRequest, on_delta: OnDelta) -> Generated:
        sampling, spelled = request.sampling, await self._spelled(request)
        if spelled is None:
            request, spelled = msgspec.structs.replace(request, sent=Sent()), ""
        served = ServedText(spelled)
        room = min(sampling.max_tokens, self.facts.max_model_len - len(request.prompt_token_ids))
        progress = Progress(request, room, lambda: served, on_delta)
        last = progress.token_ids[-1] if progress.token_ids else None
        end = progress.end(last if last in self._eos_ids else None)
        if end is None:
            end = await self._portions(request, progress, served)
        if sampling.prompt_logprobs is not None:
            scoring = msgspec.structs.replace(sampling, max_tokens=0)
            whole = await self._whole(msgspec.structs.replace(request, sampling=scoring))
            progress.prompt_logprobs = whole.prompt_logprobs
        return progress.generated(end)

    async def _portions(self, request: GenerationRequest, progress: Progress, served: ServedText) -> End:
        start, end = len(progress.token_ids), None
        async for chunk in self._chunks(self._body(request, start) | STREAMED):
            for choice in chunk.get("choices") or ():
                reason, ids = choice.get("finish_reason"), choice.get("token_ids")
                if ids is None:
                    raise RequestFailed("the server returns no token ids (return_token_ids)", ErrorCode.UNSUPPORTED)
                progress.first_token_at = progress.first_token_at or time.time()
                values, top = _logprobs(choice, ids, request.sampling)
                served.hand(choice.get("text") or "")
                known = VersionSpan(version=self._loaded.version, start=start, end=len(progress.token_ids) + len(ids))
                progress.take(list(ids), values, top, (known,), last=reason is not None)
                if reason is not None:
                    end = End(FinishReason(reason), choice.get("stop_reason"))
            progress.cached_tokens = _cached(chunk) or progress.cached_tokens
        if end is None:
            raise RequestFailed("the server ended the stream without a finish")
        return end

    async def _chunks(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The server-sent events of one request."""
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                if answer.status_code >= 400:
                    await answer.aread()
                    _refuse(answer)
                async for line in answer.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == line.strip() or data == "[DONE]":
                        continue
                    chunk: dict[str, Any] = json.loads(data)
                    if "error" in chunk:
                        raise RequestFailed(str(chunk["error"])[:500])
                    yield chunk
        except httpx2.HTTPError as error:
            raise EngineDead(f"the server does not answer: {error!r}") from error

    async def _spelled(self, request: GenerationRequest) -> str | None:
        """The text that the sent tokens have released; None where it is better to start again."""
        sampling, ids = request.sampling, request.sent.token_ids
        if not ids:
            return ""
        if sampling.stop or not (sampling.ignore_eos or self._eos_ids):
            return None
        try:
            answer = await self._http.post("/detokenize", json={"model": self._model, "tokens": ids})
            text = answer.json().get("prompt") if answer.status_code == 200 else None
        except (httpx2.HTTPError, ValueError):
            return None
        return text if isinstance(text, str) and not text.endswith(UNFINISHED) else None

    async def _models(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
        except (httpx2.HTTPError, TimeoutError, ValueError) as error:
            raise EngineDead(f"{self._settings.openai_url}/v1/models: {error!r}") from error
        return found

    def _body(self, request: GenerationRequest, offset: int = 0) -> dict[str, Any]:
        """What is asked; behind the first `offset` tokens of those sent before."""
        sampling, seed = request.sampling, request.seed_at(offset)
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_token_ids + request.sent.token_ids[:offset],
            "n": 1,
            "max_tokens": max(1, sampling.max_tokens - offset),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "logprobs": sampling.logprobs,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            "skip_special_tokens": sampling.skip_special_tokens,
        }
        for name in _OPTIONAL:
            value = getattr(sampling, name)
            if value != getattr(_DEFAULTS, name):
                body[name] = list(value) if isinstance(value, tuple) else value
        if seed is not None:
            body["seed"] = seed
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        return body

    def _collect(self, answer: dict[str, Any], request: GenerationRequest, began: float) -> Generated:
        choice, sampling = answer["choices"][0], request.sampling
        ids = choice.get("token_ids")
        if ids is None:
            raise RequestFailed("the server returns no token ids (return_token_ids)", ErrorCode.UNSUPPORTED)
        wanted = bool(sampling.max_tokens)
        ids = list(ids) if wanted else []
        values, top = _logprobs(choice, ids, sampling) if wanted else (array("f"), None)
        return Generated(
            token_ids=ids,
            logprobs=values,
            top_logprobs=top,
            text=(choice.get("text") or "") if wanted else "",
            finish_reason=FinishReason(choice.get("finish_reason") or "error") if wanted else FinishReason.LENGTH,
            stop_reason=choice.get("stop_reason") if wanted else None,
            version_spans=(VersionSpan(version=self._loaded.version, start=0, end=len(ids)),),
            cached_tokens=_cached(answer),
            first_token_at=began,
            prompt_logprobs=_prompt_logprobs(choice, request),
        )


class ServedText:
    """Text as the server gives it, portion by portion with its ids.  See `progress.Text`."""

    def __init__(self, spelled: str) -> None:
        self._next = spelled
        self.text = ""
        self.length = 0
        self.count = 0
        self.stopped: str | None = None

    def hand(self, text: str) -> None:
        """What the next ids release."""
        self._next = text

    def push(self, token_ids: list[int]) -> str:
        text, self._next = self._next, ""
        self.text += text
        self.length = len(self.text)
        self.count += len(token_ids)
        return text

    def finish(self) -> str:
        return ""


def eos_ids(model: Path | None) -> frozenset[int]:
    """Ids that end a text, by the model folder's own configuration; none without a folder."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            given = json.loads((model / name).read_bytes()).get("eos_token_id") if model is not None else None
        except (OSError, ValueError, AttributeError):
            continue
        found |= {value for value in (given if isinstance(given, list) else [given]) if isinstance(value, int)}
    return frozenset(found)


def _logprobs(
    choice: dict[str, Any], ids: list[int], sampling: SamplingParams
) -> tuple[array[float], TopLogprobs | None]:
    found = choice.get("logprobs") or {}
    values = array("f", found.get("token_logprobs") or ())
    if len(values) != len(ids):
        raise RequestFailed(f"the server returned {len(values)} logprobs for {len(ids)} tokens")
    return values, _alternatives(found.get("top_logprobs") or []) if sampling.logprobs else None


def _prompt_logprobs(choice: dict[str, Any], request: GenerationRequest) -> PromptLogprobs | None:
    """vLLM's form: per prompt token its own and the likeliest ids, each with logprob and rank."""
    asked, rows = request.sampling.prompt_logprobs, choice.get("prompt_logprobs")
    if asked is None or not rows:
        return None
    own = [row[str(token)] for token, row in zip(request.prompt_token_ids[1:], rows[1:], strict=True)]
    top: list[dict[str, float] | None] = [
        {f"{TOKEN_PREFIX}{token}": entry["logprob"] for token, entry in row.items() if entry["rank"] <= asked}
        for row in rows[1:]
    ]
    return PromptLogprobs(
        logprobs=Floats.of([entry["logprob"] for entry in own]),
        ranks=TokenIds.of([entry["rank"] for entry in own]),
        top=_alternatives(top) if asked else None,
    )


def _cached(answer: dict[str, Any]) -> int:
    usage = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    return int(usage.get("cached_tokens") or 0)


def _refuse(answer: Any) -> None:
    """Raises RequestFailed for an answer that is an error."""
    if answer.status_code >= 500:
        raise RequestFailed(f"HTTP {answer.status_code}: {answer.text[:500]}")
    if answer.status_code >= 400:
        raise RequestFailed(_message(answer), ErrorCode.INVALID_REQUEST, field=_param(answer))


_DEFAULTS = SamplingParams(max_tokens=1)
_OPTIONAL = (
    "min_tokens",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "logit_bias",
)


def _alternatives(rows: list[dict[str, float] | None]) -> TopLogprobs:
    offsets, ids, values = [0], [], []
    for row in rows:
        for token, value in (row or {}).items():
            if token.startswith(TOKEN_PREFIX) and math.isfinite(value):
                ids.append(int(token.removeprefix(TOKEN_PREFIX)))
                values.append(value)
        offsets.append(len(ids))
    return TopLogprobs(offsets=TokenIds.of(offsets), token_ids=TokenIds.of(ids), logprobs=Floats.of(values))


def _error(answer: Any) -> dict[str, Any]:
    try:
        found = answer.json().get("error")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _message(answer: Any) -> str:
    return str(_error(answer).get("message") or answer.text[:500])


def _param(answer: Any) -> str | None:
    found = _error(answer).get("param")
    return None if found is None else str(found)
