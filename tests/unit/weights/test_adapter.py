"""LoRA adapters: plain ones pass whole, everything else is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import AdapterInfo, CheckpointKind, CheckpointManifest, TensorInfo
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.adapter import MAX_CONFIG, check_adapter, parse_config
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import build_manifest, weights_digest
from rollgrid_weights.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from rollgrid_weights.safetensors_header import TensorEntry
from rollgrid_weights.validation import validate_version

from tests.support.safetensors_files import write

LAYER = "model.layers.0.self_attn."
BASE = {
    name: TensorInfo(name=name, dtype="F32", shape=shape, sha256="0" * 64)
    for name, shape in {
        "model.embed_tokens.weight": (32, 8),
        f"{LAYER}q_proj.weight": (8, 8),
        f"{LAYER}v_proj.weight": (4, 8),
        "model.norm.weight": (8,),
    }.items()
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["v_proj", "q_proj"],
    "bias": "none", "use_dora": False, "modules_to_save": None, "fan_in_fan_out": False, "rank_pattern": {},
    "init_lora_weights": True, "lora_dropout": 0.05, "megatron_core": "megatron.core", "qalora_group_size": 16,
    "base_model_name_or_path": "some/model", "inference_mode": True, "peft_version": "0.18.0",
}  # fmt: skip


def tensors(rank: int = 2, dtype: Any = np.float32, **more: Any) -> dict[str, Any]:
    found = {}
    for module, rows in (("q_proj", 8), ("v_proj", 4)):
        found[f"base_model.model.{LAYER}{module}.lora_A.weight"] = np.ones((rank, 8), dtype)
        found[f"base_model.model.{LAYER}{module}.lora_B.weight"] = np.ones((rows, rank), dtype)
    return found | more


def folder(path: Path, made: dict[str, Any], **changes: Any) -> Path:
    path.mkdir()
    write(path / ADAPTER_WEIGHTS, made)
    (path / ADAPTER_CONFIG).write_text(json.dumps(CONFIG | changes))
    return path


def manifest(path: Path) -> CheckpointManifest:
    return build_manifest(path, tenant="shared", policy="m", version=1, kind=CheckpointKind.LORA)


def refused(made: dict[str, Any], **changes: Any) -> WeightsError:
    with pytest.raises(WeightsError) as caught:
        check(made, changes)
    return caught.value


def check(made: dict[str, Any], changes: dict[str, Any]) -> None:
    info = parse_config(json.dumps(CONFIG | changes).encode())
    check_adapter({name: header(name, value) for name, value in made.items()}, info, BASE)


def header(name: str, value: Any) -> TensorEntry:
    kinds = {"float32": "F32", "float16": "F16", "float64": "F64"}
    return TensorEntry(name, kinds[str(value.dtype)], value.shape, 0, value.nbytes)


def test_A43_a_plain_adapter_passes_whole(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", tensors(dtype=np.float16), use_rslora=True)
    made = manifest(path)
    assert {file.name for file in made.files} == {ADAPTER_WEIGHTS, ADAPTER_CONFIG}
    info = parse_config((path / ADAPTER_CONFIG).read_bytes())
    assert info == AdapterInfo(rank=2, alpha=4.0, targets=("q_proj", "v_proj"), rslora=True)
    named = msgspec.structs.replace(made, adapter=info, weights_digest=weights_digest(made.tensors))
    assert validate_version(path, named, BASE) == made.tensors
    for wrong in (
        {"adapter": msgspec.structs.replace(info, alpha=5.0)},
        {"weights_digest": "0" * 64},
    ):
        with pytest.raises(WeightsError) as caught:
            validate_version(path, msgspec.structs.replace(named, **wrong), BASE)
        assert caught.value.field == next(iter(wrong))


@pytest.mark.parametrize(
    ("changes", "field", "code"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save", ErrorCode.UNSUPPORTED),
        ({"use_dora": True}, "use_dora", ErrorCode.UNSUPPORTED),
        ({"bias": "all"}, "bias", ErrorCode.UNSUPPORTED),
        ({"lora_bias": True}, "lora_bias", ErrorCode.UNSUPPORTED),
        ({"fan_in_fan_out": True}, "fan_in_fan_out", ErrorCode.UNSUPPORTED),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern", ErrorCode.UNSUPPORTED),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern", ErrorCode.UNSUPPORTED),
        ({"trainable_token_indices": [1]}, "trainable_token_indices", ErrorCode.UNSUPPORTED),
        ({"layer_replication": [[0, 1]]}, "layer_replication", ErrorCode.UNSUPPORTED),
        ({"something_new": {"on": True}}, "something_new", ErrorCode.UNSUPPORTED),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights", ErrorCode.UNSUPPORTED),
        ({"peft_type": "IA3"}, "peft_type", ErrorCode.UNSUPPORTED),
        ({"task_type": "SEQ_CLS"}, "task_type", ErrorCode.UNSUPPORTED),
        ({"target_modules": ".*_proj"}, "target_modules", ErrorCode.UNSUPPORTED),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules", ErrorCode.UNSUPPORTED),
        ({"target_modules": ["q_proj", "v_proj", "gate_proj"]}, "target_modules", ErrorCode.INVALID_REQUEST),
        ({"target_modules": []}, "target_modules", ErrorCode.INVALID_REQUEST),
        ({"r": 513}, "r", ErrorCode.LIMIT_EXCEEDED),
        ({"r": 0}, "r", ErrorCode.INVALID_REQUEST),
        ({"r": True}, "r", ErrorCode.INVALID_REQUEST),
        ({"lora_alpha": None}, "lora_alpha", ErrorCode.INVALID_REQUEST),
        ({"use_rslora": "yes"}, "use_rslora", ErrorCode.INVALID_REQUEST),
    ],
)
def test_what_is_not_plain_lora_is_refused_by_name(changes: dict[str, Any], field: str, code: ErrorCode) -> None:
    error = refused(tensors(), **changes)
    assert (error.field, error.code) == (field, code)


Q_A, Q_B = (f"base_model.model.{LAYER}q_proj.lora_{side}.weight" for side in "AB")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({Q_A: np.ones((4, 8), np.float32)}, "shape"),
        ({Q_B: np.ones((8, 4), np.float32)}, "shape"),
        ({Q_A: np.ones((2, 8), np.float64)}, "dtype F64"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": np.ones((2, 32), np.float32)}, "form"),
        ({f"base_model.model.{LAYER}q_proj.lora_magnitude_vector": np.ones(8, np.float32)}, "form"),
        ({"base_model.model.lm_head.weight": np.ones((32, 8), np.float32)}, "form"),
        ({f"{LAYER}q_proj.weight": np.ones((8, 8), np.float32)}, "form"),
        ({f"base_model.model.{LAYER}k_proj.lora_A.weight": np.ones((2, 8), np.float32)}, "lacks lora_B"),
    ],
)
def test_tensors_that_do_not_fit_the_base_are_refused_by_name(change: dict[str, Any], says: str) -> None:
    error = refused(tensors(**change))
    assert says in error.message
    assert (error.field or "") in next(iter(change))


def test_a_module_that_no_target_names_and_one_the_base_lacks() -> None:
    assert "not one of the target_modules" in refused(tensors(), target_modules=["q_proj"]).message
    strange = {name.replace("layers.0", "layers.9"): value for name, value in tensors().items()}
    assert "no such linear layer" in refused(strange).message
    assert "no tensors" in refused({}).message


def test_not_finite_and_a_full_version_with_an_adapters_configuration(tmp_path: Path) -> None:
    path = folder(tmp_path / "a", tensors())
    good = manifest(path)
    broken = tensors() | {Q_A: np.full((2, 8), np.nan, np.float32)}
    write(path / ADAPTER_WEIGHTS, broken)
    with pytest.raises(WeightsError, match="not finite"):
        manifest(path)
    for kind, files in ((CheckpointKind.FULL, good.files), (CheckpointKind.LORA, good.files[:1])):
        with pytest.raises(WeightsError) as caught:
            validate_version(path, msgspec.structs.replace(good, kind=kind, files=files), BASE)
        assert caught.value.field == ADAPTER_CONFIG


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=12), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from([*CONFIG, "corda_config", "x"]), JSON, max_size=5), st.integers(1, 64))
def test_any_configuration_is_read_whole_or_refused_by_a_field(changes: dict[str, Any], limit: int) -> None:
    config = CONFIG | changes
    try:
        info = parse_config(json.dumps(config).encode(), max_rank=limit)
    except WeightsError as error:
        named = error.field
        assert named in config
    else:
        assert info.rank == config["r"] <= limit
        assert list(info.targets) == sorted(set(config["target_modules"]))
        assert not any(
            config.get(name) for name in ("modules_to_save", "use_dora", "fan_in_fan_out", "corda_config", "x")
        )


@given(st.binary(max_size=64))
def test_any_bytes_are_a_configuration_or_a_refusal(data: bytes) -> None:
    with pytest.raises(WeightsError):
        parse_config(data)


def test_a_huge_configuration_is_not_read() -> None:
    with pytest.raises(WeightsError) as caught:
        parse_config(b" " * (MAX_CONFIG + 1))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED


@given(
    rank=st.integers(1, 8), rows=st.integers(1, 64), columns=st.integers(1, 64), a=st.tuples(st.integers(1, 64), st.integers(1, 64)),
    b=st.tuples(st.integers(1, 64), st.integers(1, 64)),
)  # fmt: skip
def test_only_shapes_whose_product_is_the_base_pass(
    rank: int, rows: int, columns: int, a: tuple[int, int], b: tuple[int, int]
) -> None:
    base = {"m.q.weight": TensorInfo(name="m.q.weight", dtype="F32", shape=(rows, columns), sha256="")}
    info = AdapterInfo(rank=rank, alpha=1.0, targets=("q",))
    names = ("base_model.model.m.q.lora_A.weight", "base_model.model.m.q.lora_B.weight")
    fits = (a, b) == ((rank, columns), (rows, rank))
    for shapes in ((a, b), ((rank, columns), (rows, rank))):
        found = {name: TensorEntry(name, "BF16", shape, 0, 0) for name, shape in zip(names, shapes, strict=True)}
        if fits or shapes != (a, b):
            check_adapter(found, info, base)
        else:
            with pytest.raises(WeightsError, match="shape"):
                check_adapter(found, info, base)
