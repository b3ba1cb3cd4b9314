"""An engine that needs no model: every token and logprob is a hash, known in advance to whoever checks.

`token, logprob = H(digest of the weights files really applied, sample seed or id, index, position)`,
of a LoRA version its own files and those it lies on (`script.py`): independent of the version's label
and of earlier tokens, so that a lying label, a lost token or a swapped sample is caught by recomputing.
It serves dry runs, load tests and fault drills (`SamplerSettings.scripted_faults` and
`scripted_weight_faults`), and says "scripted" wherever it answers.  Its text is one character per token
and means nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_contracts.samples import PromptLogprobs
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler.cold_check import ColdChecks
from rollgrid_sampler.settings import Fault, SamplerSettings, WeightFault

from .base import (
    AdapterGone,
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    OnDelta,
    RequestFailed,
    WeightsRefused,
)
from .script import adapter_digest, combined, file_digests, fingerprint, neighbours, sample_key, script, weights_digest
from .scripted_play import Play

log = get_logger(__name__)
DEFAULT_CONTEXT = 32_768
STREAM_STEP_S = 0.01
"""A streamed sample's tokens are told so often, as far as its token rate has brought them."""


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

    async def prepare(self, version: int, folder: Path) -> None:
        """Nothing takes long here."""

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
        adapters = {one: fingerprint(adapter_digest(self._digest, files)) for one, files in self._adapters.items()}
        self._loaded = Loaded(version=version, fingerprint=fingerprint(self._digest), adapters=dict(adapters))

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


class ScriptedColdChecks(ColdChecks):
    """What a cold load would give is known without one."""

    async def cold_fingerprint(self, version: int, folder: Path, adapter_folder: Path | None = None) -> str:
        digest = await asyncio.to_thread(weights_digest, folder)
        if adapter_folder is not None:
            digest = adapter_digest(digest, await asyncio.to_thread(file_digests, adapter_folder))
        return fingerprint(digest)
