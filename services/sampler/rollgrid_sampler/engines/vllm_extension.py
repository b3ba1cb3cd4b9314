"""Runs inside vLLM's worker processes: other weights, beside generation or in place, and the fingerprint.

vLLM mixes this class into its worker (`worker_extension_cls`); its methods are called with
`collective_rpc` while generation is paused, or between two steps.  Each answers with builtins only.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from .vllm_double_buffer import DoubleBuffer, Unsuited

FINGERPRINT_SCHEMA = b"rollgrid-fingerprint-2"
LIKELIEST = 8
"""Of each position so many logprobs are in the fingerprint, beside that of the probe's own token."""


class WeightsExtension:
    """Methods added to vLLM's worker; `self` is the worker."""

    model_runner: Any
    vllm_config: Any
    _rg_spare: DoubleBuffer | None = None

    def rg_reload(self, folder: str) -> int:
        """Load the safetensors of `folder` over the running weights; the number of repaired heads."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            self.model_runner.reload_weights(weights_path=folder)
            return self.rg_repair_tied_head()

    def rg_double_buffer(self) -> str:
        """Make room for weights that are loaded beside generation; "" or why these cannot be."""
        try:
            self._rg_spare = DoubleBuffer(self.vllm_config, self.model_runner.get_model(), self.rg_repair_tied_head)
        except Unsuited as reason:
            return str(reason)
        return ""

    def rg_prepare(self, folder: str) -> None:
        """Begin to load the safetensors of `folder` beside generation."""
        if self._rg_spare is None and (reason := self.rg_double_buffer()):
            raise RuntimeError(reason)
        assert self._rg_spare is not None
        self._rg_spare.load(folder)

    def rg_prepared(self, wait_s: float = 0.0) -> str | None:
        """None while it loads; then what went wrong, "" if nothing did.  Generation stands still for `wait_s` at most."""
        assert self._rg_spare is not None
        outcome = self._rg_spare.outcome(wait_s)
        if outcome:
            self._rg_spare = None  # half loaded: the next time one is made anew
        return outcome

    def rg_exchange(self) -> None:
        """What was prepared generates from now on."""
        assert self._rg_spare is not None
        self._rg_spare.exchange()
        self.model_runner.reset_lora_state()
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()

    def rg_repair_tied_head(self, model: Any = None) -> int:
        """Pack the output head of `model` (None: of the one that generates) again.

        On CPU vLLM keeps the head's weight packed inside `layer.cpu_linear`.  A tied head is never
        re-packed by vLLM's own reload, and then answers with the old weights (measured: the
        log-probabilities are off by 3 and more).
        """
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.platforms import current_platform

        if not current_platform.is_cpu():
            return 0
        modules = (self.model_runner.get_model() if model is None else model).modules()
        heads = [module for module in modules if isinstance(module, ParallelLMHead)]
        for head in heads:
            with torch.no_grad():
                dispatch_cpu_unquantized_gemm(head, remove_weight=False)
        return len(heads)

    def rg_probe(self, probes: list[list[int]], lora: tuple[str, int, str] | None = None) -> list[list[list[float]]]:
        """Prompt logprobs of each probe, computed now and past any queue or prefix cache.

        Of every position the token that is there, then the likeliest ones.  A probe is prefilled into KV
        blocks from number 1 up; what they held is put back, so requests may stand between two steps
        meanwhile.  No step may be under way.  `lora` is name, id and path of a loaded LoRA version.
        """
        with self._rg_blocks_kept(max(map(len, probes))):
            return [self._rg_prefill(number, probe, lora) for number, probe in enumerate(probes)]

    def rg_fingerprint(self, probes: list[list[int]], lora: tuple[str, int, str] | None = None) -> str:
        """sha256 over the float32 prompt logprobs of the probes."""
        if lora is not None:
            self._rg_check_spare_slot()
        digest = hashlib.sha256(FINGERPRINT_SCHEMA)
        for values in self.rg_probe(probes, lora):
            digest.update(torch.tensor(values, dtype=torch.float32).numpy().tobytes())
        return digest.hexdigest()

    def rg_class(self) -> list[str]:
        """What this worker computes with, as far as its last bits depend on it."""
        from vllm.platforms import current_platform

        runner = self.model_runner
        backends = sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups})
        sizes = sorted({int(g.kv_cache_spec.block_size) for g in runner.kv_cache_config.kv_cache_groups})
        if current_platform.is_cpu():
            device = f"{torch.backends.cpu.get_cpu_capability()} x{torch.get_num_threads()}"
        else:
            device = str(current_platform.get_device_name())
        return [str(torch.__version__), device, str(runner.dtype), *backends, *map(str, sizes)]

    def _rg_check_spare_slot(self) -> None:
        """On CPU vLLM applies the last slot's adapter to tokens that have none (vllm#48421)."""
        from vllm.platforms import current_platform

        manager = self.model_runner.lora_manager._adapter_manager
        if current_platform.is_cpu() and manager.lora_index_to_id[-1] is not None:
            raise RuntimeError("the last LoRA slot is in use: requests without an adapter would get this one")

    def _rg_prefill(self, number: int, prompt: list[int], lora: tuple[str, int, str] | None) -> list[list[float]]:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

        name = f"rollgrid-probe-{number}"
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=LIKELIEST, detokenize=False)
        blocks = [self._rg_blocks(group, len(prompt)) for group in self.model_runner.kv_cache_config.kv_cache_groups]
        step = SchedulerOutput.make_empty()
        step.scheduled_new_reqs = [
            NewRequestData(
                req_id=name,
                prompt_token_ids=prompt,
                mm_features=[],
                sampling_params=params,
                pooling_params=None,
                block_ids=tuple(blocks),
                num_computed_tokens=0,
                lora_request=None if lora is None else LoRARequest(*lora),
                prefill_token_ids=prompt,
            )
        ]
        step.num_scheduled_tokens = {name: len(prompt)}
        step.total_num_scheduled_tokens = len(prompt)
        step.num_common_prefix_blocks = [0] * len(blocks)
        result = self._rg_step(step)
        end = SchedulerOutput.make_empty()
        end.finished_req_ids = {name}
        self._rg_step(end)
        tensors = result.prompt_logprobs_dict[name]
        return [[float(value) for value in row] for row in tensors.logprobs]

    @contextlib.contextmanager
    def _rg_blocks_kept(self, tokens: int) -> Iterator[None]:
        """The KV blocks that a prompt of `tokens` is prefilled into hold afterwards what they held before."""
        config = self.model_runner.kv_cache_config
        end = 1 + max(self._rg_blocks(group, tokens)[-1] for group in config.kv_cache_groups)
        held = []
        for cache in self.model_runner.kv_caches:  # the first dimension counts blocks, or equal parts of them
            part = cache[: end * (cache.shape[0] // config.num_blocks)]
            held.append((part, part.clone()))
        try:
            yield
        finally:
            for part, copy in held:
                part.copy_(copy)

    def _rg_step(self, step: Any) -> Any:
        with torch.inference_mode():
            result = self.model_runner.execute_model(step)
            if result is None:
                result = self.model_runner.sample_tokens(None)
        return result.get_output() if hasattr(result, "get_output") else result

    @staticmethod
    def _rg_blocks(group: Any, tokens: int) -> list[int]:
        """Block ids for `tokens` and the one to come; block 0 is vLLM's null block."""
        size = int(group.kv_cache_spec.block_size)
        return list(range(1, 2 + tokens // size))

    def rg_lifeline(self) -> tuple[int, int]:
        """This worker's process id and the signal it gets when its parent dies."""
        signal = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal), 0, 0, 0)
        return os.getpid(), signal.value
