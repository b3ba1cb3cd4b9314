"""The suite's model: the tiny float32 Llama with tools and thinking in its template and tokenizer.

The last four pieces of the tiny tokenizer become `<think>`, `</think>`, `<tool_call>` and
`</tool_call>`, so that parsers that look for token ids find them.  The weights are the tiny model's.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.tiny_models import VOCAB_SIZE, TinyModel, cache_folder, tiny_model

BASE = TinyModel(context=2048)
CONTEXT = BASE.context
THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = range(VOCAB_SIZE - 4, VOCAB_SIZE)
ADDED = {"<think>": THINK, "</think>": END_THINK, "<tool_call>": TOOL_CALL, "</tool_call>": END_TOOL_CALL}
EOS = 2

MODEL = "tiny"
PATH_ID = "acme/models/tiny"
VERSION_ID = "trl-policy-v3"
"""Names under which clients know models: paths and `name-vN`."""

TOOL_PARSER, REASONING_PARSER = "hermes", "deepseek_v3"
"""The reasoning parser thinks only when the template's `thinking` is set, so plain chats have content."""

TEMPLATE = (
    "{% if tools %}{{'<|im_start|>system\\nTools:'}}{% for tool in tools %}{{'\\n' + (tool | tojson)}}{% endfor %}"
    "{{'<|im_end|>\\n'}}{% endif %}"
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\\n' + (m['content'] or '')}}"
    "{% for call in m['tool_calls'] or [] %}{{'<tool_call>\\n' + (call['function'] | tojson) + '\\n</tool_call>'}}"
    "{% endfor %}{{'<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\\n'}}{% if thinking %}{{'<think>\\n'}}{% endif %}"
    "{% endif %}"
)


def suite_model() -> Path:
    """The model's folder, made on first use."""
    base = tiny_model(BASE)
    key = hashlib.sha256(Path(__file__).read_bytes() + base.name.encode()).hexdigest()[:16]
    target = cache_folder() / f"openai-suite-{key}"
    if target.is_dir():
        return target
    unfinished = Path(tempfile.mkdtemp(prefix=".making-", dir=target.parent))
    try:
        shutil.copytree(base, unfinished, dirs_exist_ok=True)
        _add_tokens(unfinished / "tokenizer.json")
        (unfinished / "chat_template.jinja").write_text(TEMPLATE)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():  # another process was first, unless it is this
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def whitespace() -> list[int]:
    """Pieces of nothing but white space, which JSON allows without end between its tokens."""
    vocabulary = json.loads((suite_model() / "tokenizer.json").read_text())["model"]["vocab"]
    return [token for piece, token in vocabulary.items() if set(piece) <= set("ĠĊĉč")]


def policy_environment(aliases: Sequence[str] = ()) -> dict[str, str]:
    """What makes a stack's policy this model, with its parsers."""
    folder = str(suite_model())
    model = {"name": MODEL, "path": folder, "dtype": BASE.dtype, "aliases": list(aliases)}
    model |= {"tool_parser": TOOL_PARSER, "reasoning_parser": REASONING_PARSER}
    return {"ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps([model]), "ROLLGRID_SAMPLER_MODEL": folder}


def _add_tokens(path: Path) -> None:
    tokenizer = json.loads(path.read_text())
    inner = tokenizer["model"]
    inner["vocab"] = {piece: token for piece, token in inner["vocab"].items() if token < THINK}
    inner["merges"] = [pair for pair in inner["merges"] if "".join(pair) in inner["vocab"]]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokenizer["added_tokens"] += [{"id": token, "content": piece, **flags} for piece, token in ADDED.items()]
    path.write_text(json.dumps(tokenizer, ensure_ascii=False))
