"""An engine that needs no model: every token and logprob is a hash, known in advance to whoever checks.

`token, logprob = H(digest of the weights file really applied, sample seed or id, index, position)`:
independent of the version's label and of earlier tokens, so that a lying label, a lost token or a
swapped sample is caught by recomputing.  It serves dry runs, load tests and fault drills
(`SamplerSettings.scripted_faults`), and says "scripted" wherever it answers.  Its text is one
character per token and means nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, TopLogprobs
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler.settings import Fault, SamplerSettings

from .base import EngineDead, EngineFacts, Generated, GenerationRequest, Loaded, RequestFailed, SwapMode, WeightsRefused

log = get_logger(__name__)
Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]

DEFAULT_CONTEXT = 32_768
_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz 0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.", dtype=np.uint8)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COUNTER = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN
"""The first positions' counters, made once: most samples are shorter."""


def weights_digest(folder: Path | None) -> bytes:
    """sha256 over the safetensors files of `folder` in name order; a constant without a folder."""
    digest = hashlib.sha256(b"rollgrid-scripted-1")
    files = sorted(folder.glob("*.safetensors")) if folder is not None else []
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.digest()


def sample_key(digest: bytes, sample: str, index: int, seed: int | None) -> int:
    """The 64-bit key of one sample's stream."""
    name = f"id:{sample}" if seed is None else f"seed:{seed}"
    return int.from_bytes(hashlib.sha256(digest + f"|{name}|{index}".encode()).digest()[:8], "little")


def script(key: int, start: int, end: int, vocab: int, eos_id: int, eos_rate: float) -> tuple[Tokens, Logprobs]:
    """Tokens and logprobs of positions [start, end)."""
    counter = _COUNTER[start:end] if end <= len(_COUNTER) else np.arange(start + 1, end + 1, dtype=np.uint64) * _GOLDEN
    mixed = np.uint64(key) + counter  # splitmix64 over a counter
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    tokens = (mixed % np.uint64(vocab - 1)).astype(np.uint32)
    tokens += tokens >= eos_id  # every id but EOS
    high = mixed >> np.uint64(40)
    tokens[high < int(eos_rate * (1 << 24))] = eos_id
    logprobs = (high.astype(np.float32) + np.float32(1)) * np.float32(-8.0 / (1 << 24))
    return tokens, logprobs


def spell(tokens: Tokens) -> str:
    """One character per token."""
    return _ALPHABET[tokens % np.uint32(64)].tobytes().decode()


class Cut(NamedTuple):
    """Where a stream ends (exclusive), and why; `text_end` is where its text ends."""

    end: int
    text_end: int
    reason: FinishReason
    stop_reason: int | str | None


def cut(tokens: Tokens, text: str, sampling: SamplingParams, eos_id: int, limit: int) -> Cut:
    """The earliest of EOS, stop token, stop string and `limit`, none before `min_tokens`."""
    best = Cut(limit, limit, FinishReason.LENGTH, None)
    stops = list(sampling.stop_token_ids) if sampling.ignore_eos else [eos_id, *sampling.stop_token_ids]
    at = min((_first(tokens, stop, sampling.min_tokens) for stop in stops), default=limit)
    if at < limit:
        why = None if int(tokens[at]) == eos_id and eos_id not in sampling.stop_token_ids else int(tokens[at])
        best = Cut(at + 1, at + 1, FinishReason.STOP, why)
    for stop in sampling.stop:
        found = text.find(stop, max(0, sampling.min_tokens - len(stop)))
        if found >= 0 and found + len(stop) < best.end:
            text_end = found + len(stop) if sampling.include_stop_str_in_output else found
            best = Cut(found + len(stop), text_end, FinishReason.STOP, stop)
    return best


def _first(tokens: Tokens, wanted: int, start: int) -> int:
    """The first position from `start` on that holds `wanted`; the length when none does."""
    hits = tokens[start:] == wanted
    at = int(hits.argmax()) if hits.size else 0
    return start + at if hits.size and hits[at] else len(tokens)


class ScriptedEngine:
    """See `base.Engine`."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._digest = b""
        self._loaded = Loaded(version=-1)
        self._dead = False
        self._running = 0
        self._idle = asyncio.Event()
        self._open = asyncio.Event()
        self._swapped = asyncio.Event()
        self._restart = False
        self._swap = asyncio.Lock()
        context = settings.max_model_len or DEFAULT_CONTEXT
        self._facts = EngineFacts(name="scripted", max_model_len=context, vocab_size=settings.scripted_vocab)

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    async def start(self, version: int, folder: Path | None) -> None:
        self._digest = await asyncio.to_thread(weights_digest, folder)
        self._loaded = Loaded(version=version, fingerprint=_fingerprint(self._digest))
        self._idle.set()
        self._open.set()

    async def health(self) -> None:
        if self._dead:
            raise EngineDead("the scripted engine was told to die")

    async def close(self) -> None:
        self._dead = True

    async def generate(self, request: GenerationRequest) -> Generated:
        await self.health()
        fault = self._fault(request.prompt_token_ids)
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            if fault is not None:
                await self._drill(fault)
            return await self._play(request, empty=fault is Fault.EMPTY)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def load_version(self, version: int, folder: Path, mode: SwapMode) -> Loaded:
        async with self._swap:
            try:
                digest = await asyncio.to_thread(weights_digest, folder)
            except OSError as error:
                raise WeightsRefused(f"version {version}: {error}", intact=True) from error
            self._open.clear()
            try:
                if mode is SwapMode.WAIT:
                    try:
                        async with asyncio.timeout(self._settings.swap_deadline_s):
                            await self._idle.wait()
                    except TimeoutError:
                        mode = SwapMode.ABORT
                self._digest, self._restart = digest, mode is SwapMode.ABORT
                self._loaded = Loaded(version=version, fingerprint=_fingerprint(digest))
                swapped, self._swapped = self._swapped, asyncio.Event()
                swapped.set()
            finally:
                self._open.set()
            return self._loaded

    # -- one sample ---------------------------------------------------------------------------

    async def _play(self, request: GenerationRequest, empty: bool) -> Generated:
        sampling = request.sampling
        limit = 0 if empty else min(sampling.max_tokens, self._facts.max_model_len - len(request.prompt_token_ids))
        if limit < (0 if empty else 1):
            raise RequestFailed("the prompt fills the context", ErrorCode.CONTEXT_LENGTH_EXCEEDED, field="prompt")
        kept_tokens, kept_logprobs = np.empty(0, np.uint32), np.empty(0, np.float32)
        seams: list[tuple[int, int]] = []  # (version, first token)
        began = time.time()
        while True:
            version, swapped = self._loaded.version, self._swapped
            tokens, logprobs = self._continue(request, kept_tokens, kept_logprobs, limit)
            if not seams or seams[-1][0] != version:
                seams.append((version, len(kept_tokens)))
            text = spell(tokens)
            ended = cut(tokens, text, sampling, self._settings.scripted_eos_id, limit)
            if not await self._elapse(began, ended.end, swapped):
                break
            done = 0 if self._restart else self._emitted(began, ended.end)
            kept_tokens, kept_logprobs = tokens[:done], logprobs[:done]
            if done == 0:
                seams.clear()
            if self._restart:
                began = time.time()
        return self._finish(request, tokens, logprobs, text, ended, seams, began)

    def _continue(
        self, request: GenerationRequest, tokens: Tokens, logprobs: Logprobs, limit: int
    ) -> tuple[Tokens, Logprobs]:
        settings = self._settings
        key = sample_key(self._digest, request.sample, request.index, request.seed)
        more = script(
            key, len(tokens), limit, settings.scripted_vocab, settings.scripted_eos_id, settings.scripted_eos_rate
        )
        if len(tokens) == 0:
            return more
        return np.concatenate([tokens, more[0]]), np.concatenate([logprobs, more[1]])

    async def _elapse(self, began: float, tokens: int, swapped: asyncio.Event) -> bool:
        """Take the time that `tokens` tokens take; True when new weights came meanwhile."""
        rate, latency = self._settings.scripted_token_rate, self._settings.scripted_latency_s
        wait = began + latency + (tokens / rate if rate else 0.0) - time.time()
        if wait <= 0:
            await asyncio.sleep(0)
            return False
        try:
            async with asyncio.timeout(wait):
                await swapped.wait()
        except TimeoutError:
            return False
        return True

    def _emitted(self, began: float, end: int) -> int:
        rate = self._settings.scripted_token_rate
        elapsed = time.time() - began - self._settings.scripted_latency_s
        return max(0, min(end - 1, int(elapsed * rate))) if rate else 0

    def _finish(
        self,
        request: GenerationRequest,
        tokens: Tokens,
        logprobs: Logprobs,
        text: str,
        ended: Cut,
        seams: list[tuple[int, int]],
        began: float,
    ) -> Generated:
        ids, values = tokens[: ended.end], logprobs[: ended.end]
        ends = [first for _, first in seams[1:]] + [ended.end]
        spans = tuple(
            VersionSpan(version=version, start=first, end=end)
            for (version, first), end in zip(seams, ends, strict=True)
            if end > first
        )
        return Generated(
            token_ids=ids.tolist(),
            logprobs=array("f", values.tobytes()),
            top_logprobs=self._alternatives(ids, values, request.sampling.logprobs),
            text=text[: ended.text_end],
            finish_reason=ended.reason,
            stop_reason=ended.stop_reason,
            version_spans=spans,
            first_token_at=began + self._settings.scripted_latency_s,
        )

    def _alternatives(self, ids: Tokens, values: Logprobs, asked: int) -> TopLogprobs | None:
        """The sampled token first, then its neighbours in the vocabulary, each one nat less likely."""
        if asked == 0:
            return None
        rank = np.arange(asked, dtype=np.uint32)
        tokens = (ids[:, None] + rank) % np.uint32(self._settings.scripted_vocab)
        logprobs = values[:, None] - rank.astype(np.float32)
        offsets = np.arange(len(ids) + 1, dtype=np.uint32) * np.uint32(asked)
        return TopLogprobs(
            offsets=TokenIds(offsets.astype("<u4").tobytes()),
            token_ids=TokenIds(tokens.astype("<u4").tobytes()),
            logprobs=Floats(logprobs.astype("<f4").tobytes()),
        )

    # -- fault drills -------------------------------------------------------------------------

    def _fault(self, prompt: list[int]) -> Fault | None:
        faults = self._settings.scripted_faults
        if not faults:
            return None
        return next((faults[token] for token in prompt if token in faults), None)

    async def _drill(self, fault: Fault) -> None:
        match fault:
            case Fault.CRASH:
                log.warning("fault_drill", fault=fault.value)
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.DIE:
                self._dead = True
                raise EngineDead("a fault drill killed the scripted engine")
            case Fault.ERROR:
                raise RequestFailed("a fault drill failed this request")
            case Fault.HANG:
                await asyncio.Event().wait()
            case Fault.EMPTY:
                pass


def _fingerprint(digest: bytes) -> str:
    return hashlib.sha256(b"rollgrid-scripted-fingerprint" + digest).hexdigest()
