"""Rendering without torch, pinned by digest."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_rendering.files import digest_of, folder_digest, tokenizer_files
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, RenderingError, TokenizerMismatch
from rollgrid_rendering.token_bytes import own_bytes

from tests.support.tiny_models import TinyModel, tiny_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model(TinyModel())


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer.load(folder)


def test_torch_is_never_imported(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rollgrid_rendering.renderer import Renderer\n"
        f"r = Renderer.load(Path({str(folder)!r}))\n"
        "assert r.render([{'role': 'user', 'content': 'hi'}])[1] and r.decode(r.encode('hello')) == 'hello'\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


async def test_a_long_text_in_a_thread_leaves_the_event_loop_free(renderer: Renderer) -> None:
    threads, text = RenderThreads(1), "x y " * 400_000
    longest, before = 0.0, time.perf_counter()
    encoding = asyncio.ensure_future(threads.run(lambda: renderer.encode(text)))
    while not encoding.done():
        await asyncio.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    started = time.perf_counter()
    renderer.encode(text)
    assert longest < max(0.5 * (time.perf_counter() - started), 0.1)
    threads.close()


def test_text_goes_to_ids_and_back(renderer: Renderer) -> None:
    text = "What is 12 plus 30? ünïcödé 日本 🙂"
    assert renderer.decode(renderer.encode(text)) == text
    assert renderer.encode("") == []


def test_ids_are_those_of_the_tokenizers_own_call(folder: Path, renderer: Renderer) -> None:
    from rollgrid_rendering.without_torch import auto_tokenizer

    reference = auto_tokenizer().from_pretrained(str(folder))
    for text in ("hello", "  spaces\n\n", "<|im_start|>user\nhi<|im_end|>", "日本 🙂", ""):
        for special in (True, False):
            assert renderer.encode(text, add_special_tokens=special) == reference(text, add_special_tokens=special).get(
                "input_ids"
            )


def test_the_templates_text_and_ids_agree(renderer: Renderer) -> None:
    text, ids = renderer.render([{"role": "user", "content": "hello"}])
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert ids == renderer.encode(text, add_special_tokens=False)
    assert renderer.decode(ids, skip_special_tokens=False) == text


def test_pieces_decode_alone_and_unknown_ids_give_nothing(renderer: Renderer) -> None:
    ids = renderer.encode("the answer is 42")
    assert "".join(renderer.pieces(ids)) == "the answer is 42"
    assert renderer.pieces([10**6]) == [""]


@given(text=st.text())
def test_the_bytes_of_all_pieces_are_the_texts(renderer: Renderer, text: str) -> None:
    assert b"".join(renderer.piece_bytes(renderer.encode(text, add_special_tokens=False))) == text.encode()


def test_bytes_of_either_kind_of_vocabulary() -> None:
    assert own_bytes("<0xC3>") == own_bytes("Ã") == b"\xc3"
    assert own_bytes("Ġé") == b" \xe9"
    assert own_bytes("漢") is None


def test_the_template_refuses_as_an_error_of_its_input(renderer: Renderer) -> None:
    with pytest.raises(RenderingError, match="role"):
        renderer.render([{"content": "x"}])
    with pytest.raises(RenderingError, match="tokenize"):
        renderer.render([{"role": "user", "content": "x"}], options={"tokenize": True})


def test_the_digest_pins_the_files(folder: Path, tmp_path: Path) -> None:
    digest = folder_digest(folder)
    assert Renderer.load(folder, digest).digest == digest
    assert digest == digest_of({name: path.read_bytes() for name, path in tokenizer_files(folder).items()})
    assert "model.safetensors" not in tokenizer_files(folder)
    for name, path in tokenizer_files(folder).items():
        shutil.copy(path, tmp_path / name)
    (tmp_path / "model.safetensors").write_bytes(b"weights are not part of it")
    assert folder_digest(tmp_path) == digest
    with (tmp_path / "tokenizer_config.json").open("a") as file:
        file.write(" ")
    with pytest.raises(TokenizerMismatch):
        Renderer.load(tmp_path, digest)


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(RenderingError):
        Renderer.load(tmp_path)


async def test_threads_give_results_and_errors() -> None:
    threads = RenderThreads(1)
    assert await threads.run(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)
    threads.close()
