"""`rollgrid models prepare`: made once, whole or not at all, made again when damaged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollgrid.errors import ConfigurationError
from rollgrid.models import prepare as module
from rollgrid.models.catalog import RECIPES
from rollgrid.models.prepare import prepare

ROLLGRID = str(Path(sys.executable).parent / "rollgrid")


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROLLGRID_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


def test_tiny_is_made_once_and_always_the_same(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = prepare("tiny")
    assert first.made
    assert first.path.parent == models
    assert not prepare("tiny").made
    digests = json.loads((first.path / module.MANIFEST).read_text())["sha256"]
    monkeypatch.setenv("ROLLGRID_MODELS", str(tmp_path / "elsewhere"))
    again = prepare("tiny").path
    assert json.loads((again / module.MANIFEST).read_text())["sha256"] == digests


def test_tiny_can_be_loaded_with_a_chat_template_and_2048_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    folder = prepare("tiny").path
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "2+2? é"}], tokenize=False, add_generation_prompt=True
    )
    assert text.endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("any text: é漢 \n")) == "any text: é漢 \n"
    config = transformers.AutoConfig.from_pretrained(folder)
    assert (config.max_position_embeddings, config.vocab_size, config.eos_token_id) == (2048, len(tokenizer), 2)


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove"])
def test_a_damaged_folder_is_made_again(damage: str) -> None:
    weights = prepare("tiny").path / "model.safetensors"
    before = weights.read_bytes()
    if damage == "remove":
        weights.unlink()
    else:
        weights.write_bytes(before[:-1] if damage == "truncate" else before[:-1] + bytes([before[-1] ^ 1]))
    assert prepare("tiny").made
    assert weights.read_bytes() == before


def test_a_failed_conversion_leaves_nothing(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", RECIPES["tiny"]._replace(module="rollgrid.no_such_recipe"))
    with pytest.raises(ConfigurationError, match="making tiny failed"):
        prepare("tiny")
    assert not [path for path in models.iterdir() if not path.name.endswith(".lock")]


def test_what_is_missing_is_named_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RECIPES, "tiny", RECIPES["tiny"]._replace(needs={"no_such_module": "pip install it"}))
    with pytest.raises(ConfigurationError, match=r"no_such_module \(pip install it\)"):
        prepare("tiny")


def test_unknown_names_and_dtypes_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="smollm2-135m, tiny"):
        prepare("gpt-9")
    with pytest.raises(ConfigurationError, match="float32"):
        prepare("tiny", "int4")


def test_the_command_prints_one_object_per_model(models: Path) -> None:
    answer = subprocess.run(
        [ROLLGRID, "models", "prepare", "--model", "tiny", "--json"], capture_output=True, text=True, check=True
    )
    record = json.loads(answer.stdout)
    assert record["name"] == "tiny"
    assert Path(record["path"]).parent == models
