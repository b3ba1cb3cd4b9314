"""Run as a program: a random Llama with its own byte-level tokenizer, as a Hugging Face folder.

    python -m rollgrid.models.tiny FOLDER DTYPE

Needs numpy, safetensors and tokenizers only, takes a second, and always gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 512
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 128, 2, 2, 1, 32
CONTEXT = 2048
PAD, BOS, EOS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SCALE = 0.1
SEED = 20260101

CHAT_TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% endif %}"
)

CORPUS = [
    "Add the two numbers and answer with the sum only. What is 12 plus 30? The answer is 42.",
    "Sort the digits from small to large. 3 1 2 becomes 1 2 3. Copy the text as it is and then stop.",
    "The trainer waits for the next group of samples while the sampler works through the queue.",
    "Question: what is the capital of France? Answer: Paris. Question: what comes after seven? Answer: eight.",
    "0123456789 10 20 30 40 50 60 70 80 90 100 + - * / = ( ) [ ] yes no true false none",
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen",
    "weights are loaded, the worker is ready, the reward is one, the loss goes down, and the run is done",
    "A group has several samples, each sample has its own seed, and every token has a log probability.",
    "Where there is a will there is a way, and where there is a queue there is somebody who waits in it.",
    "def add(first, second): return first + second",
]


def config(dtype: str) -> dict[str, Any]:
    """config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "initializer_range": SCALE,
        "dtype": dtype,
        "use_cache": True,
    }


def weights() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Tensors by their Hugging Face names, drawn in a fixed order."""
    draw = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return (draw.standard_normal((rows, columns)) * SCALE).astype(np.float32)

    ones = np.ones(HIDDEN, dtype=np.float32)
    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN), "model.norm.weight": ones}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            prefix + "input_layernorm.weight": ones,
            prefix + "post_attention_layernorm.weight": ones,
            prefix + "self_attn.q_proj.weight": matrix(HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_SIZE, HIDDEN),
            prefix + "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_SIZE),
            prefix + "mlp.gate_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.up_proj.weight": matrix(INTERMEDIATE, HIDDEN),
            prefix + "mlp.down_proj.weight": matrix(HIDDEN, INTERMEDIATE),
        }
    return tensors


def save_tokenizer(folder: Path) -> None:
    """Byte-level BPE, trained on a few lines: any text can be encoded."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"the corpus gives {tokenizer.get_vocab_size()} tokens instead of {VOCABULARY}")
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", facts)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def make(folder: Path, dtype: str) -> None:
    """Write the whole folder; `dtype` is float32, which is what numpy can write."""
    from safetensors.numpy import save_file

    save_file(weights(), str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_json(folder / "config.json", config(dtype))
    generation = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    _write_json(folder / "generation_config.json", generation)
    save_tokenizer(folder)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


if __name__ == "__main__":
    make(Path(sys.argv[1]), sys.argv[2])
