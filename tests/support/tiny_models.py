"""Tiny random models with a tokenizer of their own, made in seconds, cached by what makes them.

    python -m tests.support.tiny_models            prepares the usual ones and prints where they are

A model is a Hugging Face folder (config, safetensors, tokenizer with a chat template) of about
100,000 parameters.  The same arguments always give the same bytes: the cache key covers them, this
file, and the versions of the libraries that draw the numbers.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

EOS_ID, BOS_ID, PAD_ID = 2, 1, 0
VOCAB_SIZE = 512
ARCHITECTURES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}

CORPUS = """\
Add the two numbers and answer with the sum only. What is 12 plus 30? The answer is 42.
Sort the digits from small to large. 3 1 2 becomes 1 2 3. Copy the text as it is and then stop.
The quick brown fox jumps over the lazy dog while the trainer waits for the next group of samples.
A group has several samples, each sample has its own seed, and every token has a log probability.
Question: what is the capital of France? Answer: Paris. Question: what comes after seven? Answer: eight.
def add(first, second): return first + second
{"role": "user", "content": "hello"} {"role": "assistant", "content": "good morning"}
0123456789 10 20 30 40 50 60 70 80 90 100 + - * / = ( ) [ ] yes no true false none
one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen
weights are loaded, the queue is short, the worker is ready, the reward is one, the loss goes down
Where there is a will there is a way, and where there is a queue there is somebody who waits in it.
import numpy as np; x = np.arange(10); print(x.sum())
"""

CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)


class TinyModel(NamedTuple):
    """What makes a tiny model.  `seed` draws the weights: two seeds are two checkpoint versions."""

    architecture: str = "llama"
    seed: int = 0
    tied: bool = True
    dtype: str = "float32"
    context: int = 512


USUAL = (TinyModel(), TinyModel(seed=1), TinyModel(context=2048), TinyModel(tied=False), TinyModel("qwen3"))


def tiny_model(spec: TinyModel | None = None) -> Path:
    """The folder of this model (None = the plain Llama), made on first use."""
    spec = spec or TinyModel()
    target = cache_folder() / f"{spec.architecture}-{_key(spec)}"
    if (target / "tokenizer.json").exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        _make(spec, unfinished)
        try:
            unfinished.rename(target)
        except OSError:
            if not (target / "tokenizer.json").exists():  # another process was first, unless it is this
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollgrid" / "tiny-models"


def _key(spec: TinyModel) -> str:
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(json.dumps(spec).encode())
    for package in ("torch", "transformers", "tokenizers"):
        digest.update(importlib.metadata.version(package).encode())
    return digest.hexdigest()[:16]


def _make(spec: TinyModel, folder: Path) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers

    name = ARCHITECTURES[spec.architecture]
    config = getattr(transformers, f"{name}Config")(**_config(spec))
    with torch.random.fork_rng():
        torch.manual_seed(spec.seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.to(getattr(torch, spec.dtype)).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _config(spec: TinyModel) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": spec.context,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "initializer_range": 0.1,
    }


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    byte_level = Tokenizer(models.BPE())
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    byte_level.train_from_iterator([CORPUS] * 3, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=byte_level, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


if __name__ == "__main__":
    for usual in USUAL:
        print(tiny_model(usual), usual._asdict())
