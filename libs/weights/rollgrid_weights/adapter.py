"""LoRA adapters as PEFT writes them: the configuration read strictly, the tensors held against the base.

Only plain LoRA on linear layers is taken: each module's weights change by `scale · B A` and by nothing
else.  Whatever says otherwise is refused by name, since an engine that ignores it computes other
weights than the trainer's, silently.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from rollgrid_contracts.checkpoints import AdapterInfo, TensorInfo
from rollgrid_contracts.failures import ErrorCode

from .errors import WeightsError, invalid
from .names import ADAPTER_CONFIG
from .safetensors_header import TensorEntry

MAX_RANK = 512
"""Largest rank that any engine takes; a fleet's own limit is a setting of checkpoint-sync."""

MAX_CONFIG = 1024 * 1024
"""Bytes of an `adapter_config.json`."""

DTYPES = ("F32", "BF16", "F16")
PREFIX = "base_model.model."
OUTER_MODULES = frozenset({"embed_tokens", "lm_head", "wte", "wpe", "embed_in", "embed_out", "word_embeddings"})
"""Last names of embeddings and heads: adapters on them are not plain (they are tied, or resized)."""

_TENSOR = re.compile(r"base_model\.model\.(?P<module>[^\s]+)\.lora_(?P<side>[AB])\.weight")
_SAID = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern",
        "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
        "qalora_group_size", "r", "revision", "target_modules", "task_type", "use_rslora",
    }
)  # fmt: skip
"""Fields that are read, or say nothing about what the tensors mean: where adapters are, the tensors say."""

_PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica"})
"""Starts that leave the base as it is; PiSSA, OLoRA, CorDA and LoftQ change it, and it is not published."""


class _Pair(NamedTuple):
    """The two tensors of one module; None = not there."""

    a: TensorEntry | None = None
    b: TensorEntry | None = None


def parse_config(data: bytes, *, max_rank: int = MAX_RANK) -> AdapterInfo:
    """What an `adapter_config.json` says.

    Raises WeightsError naming the field: unsupported for anything but plain LoRA, limit_exceeded for the rank.
    """
    if len(data) > MAX_CONFIG:
        raise _over(f"{ADAPTER_CONFIG} has {len(data)} bytes", ADAPTER_CONFIG, f"{MAX_CONFIG} bytes")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{ADAPTER_CONFIG} is not JSON: {str(error)[:200]}", ADAPTER_CONFIG) from None
    if not isinstance(config, dict):
        raise invalid(f"{ADAPTER_CONFIG} is no JSON object", ADAPTER_CONFIG)
    _refuse_more_than_lora(config)
    rank = config.get("r")
    if type(rank) is not int or rank < 1:
        raise invalid(f"r is {_short(rank)}, not a positive integer", "r")
    if rank > max_rank:
        raise _over(f"r is {rank}", "r", f"max_rank={max_rank}")
    alpha, rslora = config.get("lora_alpha"), config.get("use_rslora", False)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < 1e9:
        raise invalid(f"lora_alpha is {_short(alpha)}, not a positive number", "lora_alpha")
    if not isinstance(rslora, bool):
        raise invalid(f"use_rslora is {_short(rslora)}, not true or false", "use_rslora")
    return AdapterInfo(rank=rank, alpha=float(alpha), targets=_targets(config.get("target_modules")), rslora=rslora)


def _refuse_more_than_lora(config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise _unsupported("peft_type", config.get("peft_type"), "only LORA is offered")
    if config.get("task_type") not in (None, "CAUSAL_LM"):
        raise _unsupported("task_type", config["task_type"], "only CAUSAL_LM is offered")
    if config.get("bias", "none") != "none":
        raise _unsupported("bias", config["bias"], "only none is offered")
    init = config.get("init_lora_weights", True)
    if not isinstance(init, bool) and not (isinstance(init, str) and init in _PLAIN_INITS):
        raise _unsupported("init_lora_weights", init, "it changes the base, which is not published with the adapter")
    for name, value in sorted(config.items()):
        if name not in _SAID and name != "bias" and value:
            raise _unsupported(name, value, "only plain LoRA is offered")


def _targets(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        raise _unsupported("target_modules", value, "a list of module names is wanted")
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise invalid(f"target_modules is {_short(value)}, not a list of module names", "target_modules")
    for name in value:
        if name.rpartition(".")[2] in OUTER_MODULES:
            raise _unsupported("target_modules", name, "adapters of embeddings and heads are not offered")
    return tuple(sorted(set(value)))


def check_adapter(found: Mapping[str, TensorEntry], info: AdapterInfo, base: Mapping[str, TensorInfo]) -> None:
    """The adapter's tensors against its configuration and the base: names, pairs, shapes, dtypes.

    Raises WeightsError naming the first tensor or target that is wrong.
    """
    pairs = _pairs(found)
    modules = {name.removesuffix(".weight") for name, tensor in base.items() if len(tensor.shape) == 2}
    for target in info.targets:
        if not any(_is_of(module, (target,)) for module in modules):
            raise invalid(f"target_modules names {target[:100]!r}, the base has no such linear layer", "target_modules")
    for module, pair in sorted(pairs.items()):
        name = f"{PREFIX}{module}"
        if pair.a is None or pair.b is None:
            raise invalid(f"{name[:200]} lacks lora_{'A' if pair.a is None else 'B'}.weight", name[:200])
        if module not in modules or module.rpartition(".")[2] in OUTER_MODULES:
            raise invalid(f"{name[:200]}: the base has no such linear layer", name[:200])
        if not _is_of(module, info.targets):
            raise invalid(f"{name[:200]} is not one of the target_modules", name[:200])
        rows, columns = base[f"{module}.weight"].shape
        for tensor, shape in ((pair.a, (info.rank, columns)), (pair.b, (rows, info.rank))):
            if tensor.shape != shape:
                wanted = f"rank {info.rank} on {[rows, columns]} needs {list(shape)}"
                raise invalid(f"tensor {tensor.name!r} has shape {list(tensor.shape)}, {wanted}", tensor.name)
            if tensor.dtype not in DTYPES:
                raise invalid(
                    f"tensor {tensor.name!r} has dtype {tensor.dtype}, not {' or '.join(DTYPES)}", tensor.name
                )


def _pairs(found: Mapping[str, TensorEntry]) -> dict[str, _Pair]:
    """Tensors by module of the base.  Raises WeightsError for any that is not half of a LoRA."""
    pairs: dict[str, _Pair] = {}
    for name, entry in found.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise invalid(f"tensor {name!r} is not of the form {PREFIX}<module>.lora_A.weight or lora_B", name)
        pair = pairs.get(match["module"], _Pair())
        pairs[match["module"]] = pair._replace(a=entry) if match["side"] == "A" else pair._replace(b=entry)
    if not pairs:
        raise invalid("the adapter has no tensors", "tensors")
    return pairs


def _is_of(module: str, targets: Collection[str]) -> bool:
    """PEFT's rule: a target is a module's name or the end of it, from a dot on."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _over(message: str, field: str, limit: str) -> WeightsError:
    return WeightsError(ErrorCode.LIMIT_EXCEEDED, f"{message}, the limit is {limit}", field=field, limit=limit)


def _unsupported(name: str, value: object, why: str) -> WeightsError:
    field = str(name)[:100]
    return WeightsError(ErrorCode.UNSUPPORTED, f"{ADAPTER_CONFIG}: {field} is {_short(value)}: {why}", field=field)


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
