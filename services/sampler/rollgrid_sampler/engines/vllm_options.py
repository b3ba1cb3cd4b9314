"""How vLLM is set up and asked: its environment, its engine arguments, a request's parameters in its terms.

Facts behind them were measured: a seeded request inside a chunked prefill kills the engine on CPU, so
prefills are not chunked there and one always fits into a step; detokenising token by token doubles the
frontend's cost, so vLLM only does it where it must find stop strings.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SamplingParams
from rollgrid_runtime.imports import nothing_collected

from rollgrid_sampler.settings import SamplerSettings

from .base import RequestFailed

EXTENSION = "rollgrid_sampler.engines.vllm_extension.WeightsExtension"
PROBE_LENGTHS = (32,)
"""Tokens of the fingerprint's probes.  One step: generation stands still for it."""


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


def build(settings: SamplerSettings, folder: Path, extension: str = EXTENSION) -> Any:
    """An AsyncLLM; blocks until its engine core answers."""
    with nothing_collected():
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

    options = engine_options(settings, folder) | {"worker_extension_cls": extension}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def engine_options(settings: SamplerSettings, folder: Path) -> dict[str, Any]:
    """vLLM's engine arguments; whatever loads the same weights with them answers alike."""
    from vllm.config import StructuredOutputsConfig

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
    if settings.max_loras:
        options |= {"enable_lora": True, "max_lora_rank": settings.max_lora_rank}
        options |= {"max_loras": settings.max_loras, "max_cpu_loras": settings.lora_places}
        if settings.device == "cpu":
            # vLLM's CPU kernels apply the last slot's adapter to every token that has none (vllm#48421): it stays empty
            options |= {"max_loras": settings.lora_places + 1, "max_cpu_loras": settings.lora_places + 1}
    return options


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


def engine_class(settings: SamplerSettings, workers: list[list[str]], probes: list[list[int]]) -> str:
    """A digest of all that may change the last bit of an answer to the same weights; `workers` told of themselves."""
    import vllm

    told = {
        "schema": "1",
        "vllm": vllm.__version__,
        "device": settings.device,
        "dtype": settings.dtype,
        "tensor_parallel": settings.tensor_parallel,
        "lora_rank": settings.max_lora_rank if settings.max_loras else 0,
        "workers": sorted({tuple(parts) for parts in workers}),
        "probes": probes,
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
