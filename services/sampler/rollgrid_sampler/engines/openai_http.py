"""An engine that is somebody else's running server (vLLM, SGLang) with an OpenAI completions route.

Token ids go in and out (`return_token_ids`).  The server's weights are its own: one version is
served under one label and never changed from here, and there is no fingerprint.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from pathlib import Path
from typing import Any

import httpx2
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, TopLogprobs

from rollgrid_sampler.settings import SamplerSettings

from .base import (
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    OnDelta,
    RequestFailed,
    SwapMode,
    WeightsRefused,
)

TOKEN_PREFIX = "token_id:"
"""How servers spell ids in logprob keys when asked to."""
FALLBACK_VOCAB = 1 << 20
"""The models route does not tell the vocabulary; ids beyond the real one are refused by the server."""


class OpenAIEngine:
    """See `base.Engine`."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        headers = {}
        if settings.openai_key is not None:
            headers["Authorization"] = f"Bearer {settings.openai_key.get_secret_value()}"
        limits = httpx2.Limits(max_connections=settings.slots + 4)
        self._http = httpx2.AsyncClient(
            base_url=settings.openai_url, headers=headers, limits=limits, timeout=httpx2.Timeout(10, read=None)
        )
        self._model = settings.openai_model or ""
        self._facts: EngineFacts | None = None
        self._loaded = Loaded(version=-1)

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

    async def health(self) -> None:
        await self._models()

    async def close(self) -> None:
        await self._http.aclose()

    async def load_version(self, version: int, folder: Path, mode: SwapMode) -> Loaded:
        raise WeightsRefused("an attached server manages its own weights", intact=True)

    @property
    def tokenizer(self) -> None:
        return None

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        began = time.time()
        try:
            answer = await self._http.post("/v1/completions", json=self._body(request))
        except httpx2.HTTPError as error:
            raise EngineDead(f"the server does not answer: {error!r}") from error
        if answer.status_code >= 500:
            raise RequestFailed(f"HTTP {answer.status_code}: {answer.text[:500]}")
        if answer.status_code >= 400:
            raise RequestFailed(_message(answer), ErrorCode.INVALID_REQUEST, field=_param(answer))
        return self._collect(answer.json(), request.sampling, began)

    async def _models(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                answer = await self._http.get("/v1/models")
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
        except (httpx2.HTTPError, TimeoutError, ValueError) as error:
            raise EngineDead(f"{self._settings.openai_url}/v1/models: {error!r}") from error
        return found

    def _body(self, request: GenerationRequest) -> dict[str, Any]:
        sampling = request.sampling
        if sampling.prompt_logprobs is not None:
            raise RequestFailed("prompt_logprobs are not returned yet", ErrorCode.UNSUPPORTED, field="prompt_logprobs")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": request.prompt_token_ids,
            "n": 1,
            "max_tokens": sampling.max_tokens,
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
        if request.seed is not None:
            body["seed"] = request.seed
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        return body

    def _collect(self, answer: dict[str, Any], sampling: SamplingParams, began: float) -> Generated:
        choice = answer["choices"][0]
        ids = choice.get("token_ids")
        if ids is None:
            raise RequestFailed("the server returns no token ids (return_token_ids)", ErrorCode.UNSUPPORTED)
        found = choice.get("logprobs") or {}
        values = array("f", found.get("token_logprobs") or ())
        if len(values) != len(ids):
            raise RequestFailed(f"the server returned {len(values)} logprobs for {len(ids)} tokens")
        usage = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        return Generated(
            token_ids=list(ids),
            logprobs=values,
            top_logprobs=_alternatives(found.get("top_logprobs") or []) if sampling.logprobs else None,
            text=choice.get("text") or "",
            finish_reason=FinishReason(choice.get("finish_reason") or "error"),
            stop_reason=choice.get("stop_reason"),
            version_spans=(VersionSpan(version=self._loaded.version, start=0, end=len(ids)),),
            cached_tokens=int(usage.get("cached_tokens") or 0),
            first_token_at=began,
        )


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
