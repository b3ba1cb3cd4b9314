"""A model folder as a policy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rollgrid_checkpoint_sync.register import BadModel, read_model
from rollgrid_checkpoint_sync.settings import CheckpointSyncSettings, ModelSetting
from rollgrid_contracts import ids
from rollgrid_contracts.failures import Boundary

from tests.support.tiny_models import EOS_ID, VOCAB_SIZE, TinyModel, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_model(), tmp_path / "model"))


def edit(path: Path, **changes: Any) -> None:
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({k: v for k, v in (found | changes).items() if v is not None}))


def read(folder: Path, **changes: Any) -> Any:
    return read_model(ModelSetting(name="m", path=folder, **changes), "cpu", "local")


def test_the_fields_of_the_state(folder: Path) -> None:
    model = read(folder, aliases=("tiny",), tool_parser="hermes", reasoning_parser="qwen3")
    state = model.state
    assert model.key == "shared.m"
    assert state.pool == ids.pool_id("shared.m", "float32", "cpu", "local")
    assert (state.vocab_size, state.max_model_len, state.eos_token_ids) == (VOCAB_SIZE, 512, (EOS_ID,))
    assert (state.desired, state.newest, state.history, state.aliases) == (0, 0, (0,), ("tiny",))
    assert (state.tool_parser, state.reasoning_parser) == ("hermes", "qwen3")
    assert state.tokenizer_prefix == f"tokenizers/{state.tokenizer_digest}/"
    assert model.tied
    assert "lm_head.weight" not in model.tensors


def test_digests_follow_the_content(folder: Path) -> None:
    first = read(folder).state
    assert read(tiny_model()).state.base_digest == first.base_digest
    other = read(tiny_model(TinyModel(seed=1))).state
    assert other.base_digest != first.base_digest
    assert other.tokenizer_digest == first.tokenizer_digest
    edit(folder / "tokenizer_config.json", chat_template="{{ messages }}")
    assert read(folder).state.tokenizer_digest != first.tokenizer_digest


def test_eos_ids_of_every_source(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7, 8])
    edit(folder / "config.json", eos_token_id=9)
    assert read(folder).state.eos_token_ids == (EOS_ID, 7, 8, 9)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=None)
    assert read(folder).state.eos_token_ids == (EOS_ID,)


def test_the_context(folder: Path) -> None:
    assert read(folder, max_model_len=64).state.max_model_len == 64
    with pytest.raises(BadModel, match="over the model's 512"):
        read(folder, max_model_len=1024)
    edit(folder / "config.json", max_position_embeddings=None)
    with pytest.raises(BadModel, match="set max_model_len"):
        read(folder)
    assert read(folder, max_model_len=1024).state.max_model_len == 1024


def test_what_a_folder_may_lack(folder: Path) -> None:
    for name, says in (
        ("tokenizer.json", "no tokenizer"),
        ("config.json", r"config\.json"),
        ("model.safetensors", r"no \*\.safetensors"),
    ):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        with pytest.raises(BadModel, match=says) as caught:
            read(folder)
        assert caught.value.boundary is Boundary.WEIGHTS
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text("[")
    with pytest.raises(BadModel, match="not JSON"):
        read(folder)
    with pytest.raises(BadModel):
        read(folder / "nowhere")


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(BadModel, match="end at"):
        read(folder)


def test_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_CHECKPOINT_SYNC_MODELS", '[{"name": "m", "path": "/x", "aliases": ["a"]}]')
    (model,) = CheckpointSyncSettings().models
    assert (model.key, model.dtype, model.aliases) == ("shared.m", "float32", ("a",))
    for bad in (
        '[{"name": "m.x", "path": "/x"}]',
        '[{"name": "m", "path": "/x", "tenant": "A*"}]',
        '[{"name": "m", "path": "/x", "dtype": "int8"}]',
        '[{"name": "m", "path": "/x", "typo": 1}]',
        '[{"name": "m", "path": "/x", "tool_parser": "no name"}]',
        '[{"name": "m", "path": "/x"}, {"name": "m", "path": "/y"}]',
    ):
        monkeypatch.setenv("ROLLGRID_CHECKPOINT_SYNC_MODELS", bad)
        with pytest.raises(ValidationError):
            CheckpointSyncSettings()
