"""An engine that needs no model: every token and logprob is a hash, known in advance to whoever checks.

`token, logprob = H(digest of the weights files really applied, sample seed or id, index, position)`
(of a LoRA version its own bytes and those it lies on):
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, PromptLogprobs, TopLogprobs
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler import alternatives
from rollgrid_sampler.cold_check import ColdChecks
from rollgrid_sampler.resume import continuable
from rollgrid_sampler.settings import Fault, SamplerSettings, WeightFault
from rollgrid_sampler.transcript import Transcript

from .base import (
    AdapterGone,
    Delta,
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
from .progress import clipped

log = get_logger(__name__)
Tokens = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]

DEFAULT_CONTEXT = 32_768
STREAM_STEP_S = 0.01
"""A streamed sample's tokens are told so often, as far as its token rate has brought them."""
_ALPHABET = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz 0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ.", dtype=np.uint8)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_COUNTER = np.arange(1, 4097, dtype=np.uint64) * _GOLDEN
"""The first positions' counters, made once: most samples are shorter."""


def file_digests(folder: Path | None) -> dict[str, bytes]:
    """sha256 of each safetensors file of `folder`, by name."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")) if folder is not None else []:
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").digest()
    return found


def combined(files: Mapping[str, bytes]) -> bytes:
    """One digest over the files' in name order; a constant without any."""
    return hashlib.sha256(b"rollgrid-scripted-1" + b"".join(files[name] for name in sorted(files))).digest()


def weights_digest(folder: Path | None) -> bytes:
    """What the tokens of the weights in `folder` derive from."""
    return combined(file_digests(folder))


def adapter_digest(weights: bytes, files: Mapping[str, bytes]) -> bytes:
    """What the tokens of a LoRA version derive from: its own bytes and those it lies on."""
    return hashlib.sha256(b"rollgrid-scripted-lora-1" + weights + combined(files)).digest()


def mixed(before: Mapping[str, bytes], after: Mapping[str, bytes], fault: WeightFault | None) -> dict[str, bytes]:
    """The bytes that a faulty apply leaves."""
    match fault:
        case WeightFault.LABEL_FIRST:
            return dict(before)
        case WeightFault.STALE_TENSOR:
            first = min(after)
            return {**after, first: before.get(first, after[first])}
        case WeightFault.CRASH_MID_APPLY:
            log.warning("fault_drill", fault=fault.value)
            os.kill(os.getpid(), signal.SIGKILL)
    return dict(after)


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
        found = text.find(stop, max(0, sampling.min_tokens - len(stop) + 1))
        if found >= 0 and found + len(stop) < best.end:
            text_end = found + len(stop) if sampling.include_stop_str_in_output else found
            best = Cut(found + len(stop), text_end, FinishReason.STOP, stop)
    return best


def _first(tokens: Tokens, wanted: int, start: int) -> int:
    """The first position from `start` on that holds `wanted`; the length when none does."""
    hits = tokens[start:] == wanted
    at = int(hits.argmax()) if hits.size else 0
    return start + at if hits.size and hits[at] else len(tokens)


def neighbours(ids: Tokens, values: Logprobs, asked: int, vocab: int) -> TopLogprobs | None:
    """The sampled token first, then its neighbours in the vocabulary, each one nat less likely."""
    if asked == 0:
        return None
    rank = np.arange(asked, dtype=np.uint32)
    tokens = (ids[:, None] + rank) % np.uint32(vocab)
    logprobs = values[:, None] - rank.astype(np.float32)
    offsets = np.arange(len(ids) + 1, dtype=np.uint32) * np.uint32(asked)
    return TopLogprobs(
        offsets=TokenIds(offsets.astype("<u4").tobytes()),
        token_ids=TokenIds(tokens.astype("<u4").tobytes()),
        logprobs=Floats(logprobs.astype("<f4").tobytes()),
    )


class Play:
    """One sample under way: all its tokens are known, time brings them out.

    After `script` it has the tokens as the weights of now continue what had come out before.
    """

    def __init__(
        self, settings: SamplerSettings, request: GenerationRequest, limit: int, on_delta: OnDelta | None
    ) -> None:
        self._settings, self._request, self._limit, self._on_delta = settings, request, limit, on_delta
        self._began = time.time()
        self._start(request.sent)

    def _start(self, sent: Sent) -> None:
        self._clock = time.time()
        self._tokens, self._logprobs = np.array(sent.token_ids, np.uint32), np.array(sent.logprobs, np.float32)
        self._seams = [(span.version, span.start) for span in sent.version_spans]
        self._sent = self._told = len(sent.token_ids)
        self._text = Transcript(lambda ids: spell(np.array(ids, np.uint32)), self._request.sampling)
        self._text.push(sent.token_ids)
        self._text_sent = self._text.length

    @property
    def streamed(self) -> bool:
        return self._on_delta is not None

    def script(self, digest: bytes, version: int) -> None:
        request, settings, kept = self._request, self._settings, len(self._tokens)
        key = sample_key(digest, request.sample, request.index, request.seed)
        vocab, eos_id = settings.scripted_vocab, settings.scripted_eos_id
        tokens, logprobs = script(key, kept, max(kept, self._limit), vocab, eos_id, settings.scripted_eos_rate)
        self._tokens = np.concatenate([self._tokens, tokens]) if kept else tokens
        self._logprobs = np.concatenate([self._logprobs, logprobs]) if kept else logprobs
        if not self._seams or self._seams[-1][0] != version:
            self._seams.append((version, kept))
        self._spelled = spell(self._tokens)
        self._cut = cut(self._tokens, self._spelled, request.sampling, eos_id, self._limit)

    @property
    def ends_at(self) -> float:
        rate, own = self._settings.scripted_token_rate, self._cut.end - self._sent
        return self._clock + self._settings.scripted_latency_s + (own / rate if rate else 0.0)

    @property
    def _due(self) -> int:
        """Tokens that have come out; the last one only comes out at the end."""
        rate = self._settings.scripted_token_rate
        elapsed = time.time() - self._clock - self._settings.scripted_latency_s
        own = max(0, int(elapsed * rate)) if rate else 0
        return max(self._told, min(self._cut.end - 1, self._sent + own))

    def tell(self) -> None:
        """Hand on what has come out."""
        first, end = self._told, self._due
        if self._on_delta is None or end <= first:
            return
        self._told = end
        ids, values = self._tokens[first:end], self._logprobs[first:end]
        delta = Delta(
            offset=first,
            token_ids=ids.tolist(),
            logprobs=array("f", values.tobytes()),
            top_logprobs=self._alternatives(first, end),
            text=self._text.push(ids.tolist()),
            version_spans=clipped(self._spans(end), first, end),
        )
        self._on_delta(delta)

    def interrupt(self, *, restart: bool) -> None:
        """Other weights are loaded: what has come out stays, unless `restart` and going on behind it is not exact."""
        kept = self._out
        if restart and not (kept and continuable(self._request.sampling)):
            self._start(Sent())
            if self._on_delta is not None:
                self._on_delta(Delta(offset=0, token_ids=[], logprobs=array("f")))
            return
        self._tokens, self._logprobs = self._tokens[:kept], self._logprobs[:kept]
        self._seams = [seam for seam in self._seams if seam[1] < kept]

    @property
    def _out(self) -> int:
        """Tokens that somebody has."""
        return self._told if self.streamed else self._due

    def so_far(self) -> Sent:
        """What has come out, for others to continue behind."""
        kept = self._out
        return Sent(
            token_ids=self._tokens[:kept].tolist(),
            logprobs=array("f", self._logprobs[:kept].tobytes()),
            version_spans=self._spans(kept),
        )

    def finish(self) -> Generated:
        ended = self._cut
        ids, values = self._tokens[: ended.end], self._logprobs[: ended.end]
        return Generated(
            token_ids=ids.tolist(),
            logprobs=array("f", values.tobytes()),
            top_logprobs=self._alternatives(0, ended.end),
            text=self._spelled[: ended.text_end],
            finish_reason=ended.reason,
            stop_reason=ended.stop_reason,
            version_spans=self._spans(ended.end),
            first_token_at=self._began + self._settings.scripted_latency_s,
            resumed_from=self._sent,
            text_sent=self._text_sent,
        )

    def _spans(self, end: int) -> tuple[VersionSpan, ...]:
        starts = [first for _, first in self._seams]
        whole = zip(self._seams, [*starts[1:], end], strict=True)
        return clipped(tuple(VersionSpan(version=v, start=a, end=b) for (v, a), b in whole), 0, end)

    def _alternatives(self, start: int, end: int) -> TopLogprobs | None:
        """Those of tokens sent before are not known."""
        asked, first = self._request.sampling.logprobs, max(start, self._sent)
        ids, values = self._tokens[first:end], self._logprobs[first:end]
        known = neighbours(ids, values, asked, self._settings.scripted_vocab)
        return (
            known
            if known is None or first == start
            else alternatives.joined([alternatives.empty(first - start), known])
        )


class Flight:
    """One request in the engine's hands.  `interrupt` tells its play that other weights are there, or none."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.wake = asyncio.Event()
        self.gone = False
        self.restart = False

    def waits(self, mode: OnRefresh) -> bool:
        """Whether it ends before a refresh by `mode`."""
        return (self.request.on_refresh or mode) is OnRefresh.WAIT

    def interrupt(self, mode: OnRefresh, *, gone: bool = False) -> None:
        self.restart = (self.request.on_refresh or mode) is not OnRefresh.KEEP
        self.gone = self.gone or gone
        self.wake.set()


class ScriptedEngine:
    """See `base.Engine`.  `_files` are the digests of the bytes really applied, whatever the label says."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._files: dict[str, bytes] = {}
        self._digest = b""
        self._adapters: dict[int, dict[str, bytes]] = {}
        self._loaded = Loaded(version=-1)
        self._dead = False
        self._flights: set[Flight] = set()
        self._landed = asyncio.Event()
        self._open = asyncio.Event()
        self._swap = asyncio.Lock()
        context = settings.max_model_len or DEFAULT_CONTEXT
        self._facts = EngineFacts(
            name="scripted",
            max_model_len=context,
            vocab_size=settings.scripted_vocab,
            max_loras=settings.lora_places,
            fingerprint_class="scripted-1",
        )

    @property
    def facts(self) -> EngineFacts:
        return self._facts

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    async def start(self, version: int, folder: Path | None) -> None:
        self._files = await asyncio.to_thread(file_digests, folder)
        self._label(version)
        self._open.set()

    @property
    def tokenizer(self) -> None:
        return None

    async def health(self) -> None:
        if self._dead:
            raise EngineDead("the scripted engine was told to die")

    async def close(self) -> None:
        self._dead = True

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        await self.health()
        fault = self._fault(request.prompt_token_ids)
        while not self._open.is_set():
            await self._open.wait()
        flight = Flight(request)
        self._flights.add(flight)
        try:
            if fault is not None:
                await self._drill(fault)
            result = await self._play(flight, on_delta, empty=fault is Fault.EMPTY)
            result.prompt_logprobs = self._prompt_logprobs(request)
            return result
        finally:
            self._flights.discard(flight)
            self._landed.set()

    # -- weights ------------------------------------------------------------------------------

    async def load_version(self, version: int, folder: Path, mode: OnRefresh) -> Loaded:
        async with self._swap:
            files = await self._read(version, folder)
            self._open.clear()
            try:
                await self._until_landed(lambda flight: flight.waits(mode))
                fault = self._settings.scripted_weight_faults.get(version)
                if fault is WeightFault.SLOW_APPLY:
                    await asyncio.sleep(1.0)
                self._files = mixed(self._files, files, fault)
                self._adapters.clear()
                self._label(version)
                for flight in self._flights:
                    flight.interrupt(mode, gone=flight.request.adapter is not None)
            finally:
                self._open.set()
            return self._loaded

    async def add_adapter(self, version: int, folder: Path) -> Loaded:
        async with self._swap:
            if version not in self._adapters and len(self._adapters) >= self._facts.max_loras:
                raise WeightsRefused(f"{self._facts.max_loras} LoRA versions are loaded already", intact=True)
            files = await self._read(version, folder)
            fault = self._settings.scripted_weight_faults.get(version)
            if fault is WeightFault.SLOW_APPLY:
                await asyncio.sleep(1.0)
            newest = max(self._adapters, default=None)
            before = self._adapters[newest] if newest is not None else files  # the first one has nothing to leave
            self._adapters[version] = mixed(before, files, fault)
            self._label(self._loaded.version)
            return self._loaded

    async def remove_adapter(self, version: int, mode: OnRefresh) -> Loaded:
        async with self._swap:
            if mode is OnRefresh.WAIT:
                await self._until_landed(lambda flight: flight.request.adapter == version)
            self._adapters.pop(version, None)
            self._label(self._loaded.version)
            for flight in self._flights:
                if flight.request.adapter == version:
                    flight.interrupt(OnRefresh.ABORT, gone=True)
            return self._loaded

    async def _read(self, version: int, folder: Path) -> dict[str, bytes]:
        try:
            files = await asyncio.to_thread(file_digests, folder)
        except OSError as error:
            raise WeightsRefused(f"version {version}: {error}", intact=True) from error
        if self._settings.scripted_weight_faults.get(version) is WeightFault.REFUSE:
            raise WeightsRefused(f"version {version}: a fault drill refused it", intact=True)
        return files

    async def _until_landed(self, waited_for: Callable[[Flight], bool]) -> None:
        """Until none of these is under way; at the deadline they are interrupted as the others."""
        try:
            async with asyncio.timeout(self._settings.swap_deadline_s):
                while any(map(waited_for, self._flights)):
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            log.warning("swap_wait_too_long", deadline_s=self._settings.swap_deadline_s)

    def _label(self, version: int) -> None:
        """The label and what the probes would give, which is of the bytes."""
        self._digest = combined(self._files)
        adapters = {one: _fingerprint(adapter_digest(self._digest, files)) for one, files in self._adapters.items()}
        self._loaded = Loaded(version=version, fingerprint=_fingerprint(self._digest), adapters=dict(adapters))

    # -- one sample ---------------------------------------------------------------------------

    def _weights(self, request: GenerationRequest) -> tuple[bytes, int]:
        """Digest and label of what the request runs on.  Raises AdapterGone."""
        adapter = request.adapter
        if adapter is None:
            return self._digest, self._loaded.version
        if adapter not in self._adapters:
            raise AdapterGone(adapter, request.sent)
        return adapter_digest(self._digest, self._adapters[adapter]), adapter

    async def _play(self, flight: Flight, on_delta: OnDelta | None, empty: bool) -> Generated:
        settings, request, sampling = self._settings, flight.request, flight.request.sampling
        limit = 0 if empty else min(sampling.max_tokens, self._facts.max_model_len - len(request.prompt_token_ids))
        if limit < 0:
            raise RequestFailed("the prompt fills the context", ErrorCode.CONTEXT_LENGTH_EXCEEDED, field="prompt")
        play = Play(settings, request, limit, on_delta)
        while True:
            flight.wake.clear()
            play.script(*self._weights(request))
            if not await self._elapse(play, flight.wake):
                return play.finish()
            if flight.gone:
                raise AdapterGone(request.adapter or 0, play.so_far())
            play.interrupt(restart=flight.restart)

    async def _elapse(self, play: Play, wake: asyncio.Event) -> bool:
        """Take the time that the tokens take; True when new weights came meanwhile."""
        if play.ends_at <= time.time():
            await asyncio.sleep(0)
            return False
        while (wait := play.ends_at - time.time()) > 0:
            try:
                async with asyncio.timeout(min(wait, STREAM_STEP_S) if play.streamed else wait):
                    await wake.wait()
            except TimeoutError:
                play.tell()
                continue
            play.tell()
            return True
        return False

    def _prompt_logprobs(self, request: GenerationRequest) -> PromptLogprobs | None:
        asked, prompt = request.sampling.prompt_logprobs, request.prompt_token_ids
        if asked is None:
            return None
        settings = self._settings
        key = sample_key(self._weights(request)[0], f"prompt:{prompt}", 0, None)
        _, values = script(key, 1, len(prompt), settings.scripted_vocab, settings.scripted_eos_id, 0.0)
        ids = np.array(prompt[1:], dtype=np.uint32)
        return PromptLogprobs(
            logprobs=Floats(values.astype("<f4").tobytes()),
            ranks=TokenIds((1 + np.floor(-values)).astype("<u4").tobytes()),
            top=neighbours(ids, values, asked, settings.scripted_vocab),
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


class ScriptedColdChecks(ColdChecks):
    """What a cold load would give is known without one."""

    async def cold_fingerprint(self, version: int, folder: Path, adapter_folder: Path | None = None) -> str:
        digest = await asyncio.to_thread(weights_digest, folder)
        if adapter_folder is not None:
            digest = adapter_digest(digest, await asyncio.to_thread(file_digests, adapter_folder))
        return _fingerprint(digest)
