"""Double-buffered weights, inside vLLM's worker process: a second model is loaded while the first generates.

On CPU reading, merging and packing the weights takes as long as many steps.  Done to a second instance
of the model, beside generation, it leaves for the pause only the exchange of the tensors' memory and of
the packed kernels, which is quick.  Costs the memory of the weights once more.  vLLM's own code builds
and loads the second instance; it differs from the first in nothing but whose memory it holds.

Not on a GPU: captured graphs know the weights by address, and there is no room for them twice.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

KERNEL = "cpu_linear"
"""Where vLLM's CPU layers keep their packed weight (`dispatch_cpu_unquantized_gemm`)."""
NO_WEIGHTS = frozenset(("kv_cache", "_k_scale_cpu", "_v_scale_cpu"))
"""What an attention layer holds beside its weights; the scales are 1 unless the KV cache is quantized."""


LOWEST_PRIORITY = 19
SWITCH_INTERVAL_S = 0.0005


class Unsuited(Exception):
    """The model holds more of its weights than tensors and packed kernels: it must be loaded in place."""


class DoubleBuffer:
    """The spare instance of `model` (the one that generates).

    `load` begins in a thread of its own; `outcome` tells how it went; `exchange` may run between two
    steps once it went well.  `repair` is called on the instance after its load, in that thread.
    Raises Unsuited.
    """

    def __init__(self, vllm_config: Any, model: Any, repair: Callable[[Any], object]) -> None:
        if vllm_config.quant_config is not None or vllm_config.cache_config.cache_dtype != "auto":
            raise Unsuited("its weights or its KV cache are quantized")
        self._config, self._repair = _apart(vllm_config), repair
        self._threads = torch.get_num_threads()
        self._loading: threading.Thread | None = None
        self._error: str | None = None
        self._spare = _build(self._config)
        _check_kept(self._spare)
        self._pairs = list(_pairs(model, self._spare))
        list(_tensor_pairs(self._pairs))

    def load(self, folder: str) -> None:
        """Begin to load the safetensors of `folder` into the spare instance, after a load that nobody awaits any more."""
        before, self._error = self._loading, None
        self._loading = threading.Thread(target=self._load, args=(folder, before), name="spare-weights", daemon=True)
        self._loading.start()

    def outcome(self, wait_s: float = 0.0) -> str | None:
        """None while it loads; then what went wrong, "" if nothing did.  Waits so long for it."""
        if self._loading is None:
            return "nothing was loaded"
        if wait_s:
            self._loading.join(wait_s)
        return None if self._loading.is_alive() else (self._error or "")

    def exchange(self) -> None:
        """What was loaded generates from now on; the spare instance holds what did."""
        wrong = self.outcome()
        if wrong != "":
            raise RuntimeError(f"the spare weights are not ready: {wrong or 'they are being loaded'}")
        self._loading = None
        for mine, theirs in list(_tensor_pairs(self._pairs)):
            mine.data, theirs.data = theirs.data, mine.data
        for live, spare in self._pairs:
            if KERNEL in vars(live):
                vars(live)[KERNEL], vars(spare)[KERNEL] = vars(spare)[KERNEL], vars(live)[KERNEL]

    def _load(self, folder: str, before: threading.Thread | None) -> None:
        from vllm.model_executor.model_loader.reload.inplace import reload_weights

        if before is not None:
            before.join()
        torch._C.set_num_threads(self._threads)  # of this thread: a kernel is packed for so many
        try:
            with _in_the_background(), torch.no_grad():
                reload_weights(
                    self._config, self._spare, weights_iterator=None, weights_path=folder, is_checkpoint_format=True
                )
                self._repair(self._spare)
        except BaseException as error:  # noqa: BLE001 - told to whoever asks for the outcome
            self._error = repr(error)


@contextlib.contextmanager
def _in_the_background() -> Iterator[None]:
    """This thread, and those that its kernels start, take what cores and interpreter generation leaves.

    A step gives the interpreter up at every kernel, and would wait the whole interval of 5 ms for it each time.
    Both together, measured on two cores with SmolLM2-135M: a refresh costs 0.5 s of generation, not 2.4 s.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def _apart(vllm_config: Any) -> Any:
    """The configuration for an instance that is in nobody's way: its layers are found by nobody, and it has no LoRA."""
    config = copy.copy(vllm_config)
    config.compilation_config = copy.copy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    config.model_config = copy.copy(vllm_config.model_config)
    config.lora_config = None
    return config


def _build(config: Any) -> Any:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
    from vllm.model_executor.model_loader import get_model

    shared = dict(_ROPE_DICT)  # rotary embeddings are kept for all models, and a load takes them apart for a while
    _ROPE_DICT.clear()
    try:
        with set_current_vllm_config(config):
            return get_model(vllm_config=config)
    finally:
        _ROPE_DICT.clear()
        _ROPE_DICT.update(shared)


def _check_kept(model: Any) -> None:
    """Raises Unsuited where a module keeps weights in a form that `exchange` does not know."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, QuantizeMethodBase) and type(method) not in (
            UnquantizedLinearMethod,
            UnquantizedEmbeddingMethod,
        ):
            raise Unsuited(f"{name} keeps its weights by {type(method).__name__}")
        held = [key for key, value in vars(module).items() if isinstance(value, torch.Tensor) and key not in NO_WEIGHTS]
        if held:
            raise Unsuited(f"{name} keeps tensors of its own: {', '.join(held)}")


def _pairs(live: Any, spare: Any) -> Iterator[tuple[Any, Any]]:
    """The modules of both by name.  Around a layer with LoRA stands another, which holds it as `base_layer`."""
    found = {_plain(name): module for name, module in live.named_modules()}  # the innermost of a name comes last
    for name, other in spare.named_modules():
        one = found.get(name)
        if one is other:
            raise Unsuited(f"both instances have one {name}")
        if type(one) is not type(other) or (KERNEL in vars(one)) != (KERNEL in vars(other)):
            raise Unsuited(f"{name} is a {type(one).__name__}, and a {type(other).__name__} in the spare instance")
        yield one, other


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _tensor_pairs(modules: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    """Each tensor that a checkpoint fills, once, with its counterpart.  A tied one stands in two modules."""
    seen: dict[int, Any] = {}
    for one, other in modules:
        mine, theirs = _tensors(one), _tensors(other)
        if mine.keys() != theirs.keys():
            raise Unsuited(f"{type(one).__name__} holds {sorted(mine)}, and {sorted(theirs)} in the spare instance")
        for name, tensor in mine.items():
            twin = theirs[name]
            if tensor.shape != twin.shape or tensor.dtype != twin.dtype:
                raise Unsuited(f"{name} is {twin.dtype} {twin.shape} in the spare instance, not {tensor.shape}")
            if id(tensor) in seen:
                if seen[id(tensor)] is not twin:
                    raise Unsuited(f"{name} is tied to another tensor in the spare instance")
                continue
            seen[id(tensor)] = twin
            yield tensor, twin


def _tensors(module: Any) -> dict[str, Any]:
    kept = {name: tensor for name, tensor in module._buffers.items() if name not in module._non_persistent_buffers_set}
    return {name: tensor for name, tensor in (module._parameters | kept).items() if tensor is not None}
