"""Tokenizers with chat templates of several kinds, each beside its twin in plain Python.

A twin says what a template puts behind an answer; it is written from the template's description, not from a rendering,
so that bridges can be held against it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from rollgrid_rendering.messages import text_of
from rollgrid_rendering.renderer import Renderer
from rollgrid_rendering.without_torch import auto_tokenizer

from tests.support.tiny_models import CORPUS

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Kind:
    """`end` closes an answer (None: nothing does), `behind` is what follows it, up to the next answer's first token."""

    special: tuple[str, ...]
    tags: tuple[str, ...]
    template: str
    eos: str
    end: str | None
    behind: Callable[[Messages], str]


def _no_texts_of_ours(messages: Messages) -> str:
    raise AssertionError(f"this template has no twin: {messages}")


# -- ChatML: reasoning, tools, several forms ----------------------------------------------------

_CHATML_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_HERMES_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

_HERMES = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}
{{- TOOLS_HEADER }}{% for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ TOOLS_FOOTER + '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- set seen = namespace(query=messages | length - 1) %}
{%- for m in messages if m.role == 'user' %}{% set seen.any = true %}{% endfor %}
{%- if seen.any %}{% for m in messages %}{% if m.role == 'user' %}{% set seen.query = loop.index0 %}{% endif %}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if SHOWS_THOUGHT %}{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + m.content.lstrip('\\n') }}{% else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}
{%- if loop.index0 or m.content %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

_AS_QWEN3 = "loop.index0 > seen.query and (loop.last or thought)"
"""Only behind the last question does reasoning stay."""


def _hermes_behind(messages: Messages) -> str:
    found = "\n"
    for i, message in enumerate(messages):
        role, text = message["role"], text_of(message.get("content"))
        if role == "tool":
            if not i or messages[i - 1]["role"] != "tool":
                found += "<|im_start|>user"
            found += f"\n<tool_response>\n{text}\n</tool_response>"
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                found += "<|im_end|>\n"
        else:
            found += f"<|im_start|>{role}\n{text}<|im_end|>\n"
    return found + "<|im_start|>assistant\n"


def _hermes(shows_thought: str) -> Kind:
    from renderers import qwen3  # its words on tools, so that its typed renderer and this template say the same

    header, footer = (json.dumps(words) for words in (qwen3._TOOLS_HEADER, qwen3._TOOLS_FOOTER))
    template = _HERMES.replace("TOOLS_HEADER", header).replace("TOOLS_FOOTER", footer)
    template = template.replace("SHOWS_THOUGHT", shows_thought)
    return Kind(_CHATML_SPECIAL, _HERMES_TAGS, template, "<|im_end|>", "<|im_end|>", _hermes_behind)


# -- others -----------------------------------------------------------------------------------

_LLAMA = """\
{{- '<|begin_of_text|>' }}{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content + '<|eot_id|>' }}
{%- elif m.tool_calls %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' + m.tool_calls[0].function.arguments | tojson + '}<|eot_id|>' }}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""


def _llama_behind(messages: Messages) -> str:
    found = ""
    for message in messages:
        role, text = message["role"], text_of(message.get("content"))
        role, text = ("ipython", text) if role == "tool" else (role, text.strip())
        found += f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"
    return found + "<|start_header_id|>assistant<|end_header_id|>\n\n"


_INST = """\
{{- '<s>' }}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ ' ' + m.content + '</s>' }}
{%- else %}{% if tools and loop.last %}{{ '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + m.content + '[/INST]' }}{% endif %}{% endfor %}"""
"""No generation prompt; tools stand before the last message, wherever that is."""


def _inst_behind(messages: Messages) -> str:
    return "".join(f"[INST] {text_of(message.get('content'))}[/INST]" for message in messages)


_ROLES = """\
{{- '[gMASK]<sop>' }}{%- for m in messages %}
{%- if m.role == 'assistant' %}{{ '<|assistant|>\\n' + m.content }}
{%- elif m.role == 'tool' %}{{ '<|observation|>\\n' + m.content }}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""
"""Nothing ends an answer but the next message's mark, which is what the model samples and stops at."""


def _roles_behind(messages: Messages) -> str:
    names = {"tool": "observation"}
    parts = (f"<|{names.get(m['role'], m['role'])}|>\n{text_of(m.get('content'))}" for m in messages)
    return "".join(parts) + "<|assistant|>\n"


_PLAIN = """\
{%- for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"""
_COUNTS = "{{ messages | length }}" + _PLAIN
_SHOUTS = _PLAIN.replace("m.content", "(m.content | upper if m.role == 'assistant' else m.content)")
_TIDIES = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content }}
{%- if m.role != 'assistant' or not loop.last or add_generation_prompt %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Ends an answer only where something follows it."""


_TAILS = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt else eos_token }}"""
"""Ends a conversation that does not go on, too."""


def _tails_behind(messages: Messages) -> str:
    parts = (f"<|{m['role']}|>\n{text_of(m.get('content'))}<|end|>\n" for m in messages)
    return "\n" + "".join(parts) + "<|assistant|>\n"


_AGES = """\
{%- for m in messages %}{% set old = m.role == 'assistant' and loop.revindex > 4 %}
{{- '<|' + m.role + '|>\\n' }}{{ BEFORE if old }}{{ m.content + '<|end|>' }}{{ BEHIND if old }}{{ '\\n' }}{% endfor %}
{{- '<|assistant|>\\n' if add_generation_prompt }}"""
"""Says something more of answers that have become old."""


def _ages(before: str, behind: str) -> Kind:
    template = _AGES.replace("BEFORE", repr(before)).replace("BEHIND", repr(behind))
    return Kind(("<|user|>", "<|assistant|>", "<|end|>"), (), template, "<|end|>", "<|end|>", _tails_behind)


def _plain_behind(messages: Messages) -> str:
    return "\n\n" + "".join(f"{m['role']}: {text_of(m.get('content'))}\n\n" for m in messages) + "assistant: "


def _tidies_behind(messages: Messages) -> str:
    parts = (f"<|im_start|>{m['role']}\n{text_of(m.get('content'))}<|im_end|>\n" for m in messages)
    return "\n" + "".join(parts) + "<|im_start|>assistant\n"


_EOS = ("</s>",)


@cache
def kind(name: str) -> Kind:
    if name in ("strips", "keeps"):
        return _hermes(_AS_QWEN3 if name == "strips" else "thought")
    return {
        "ages-behind": _ages("", "[old]"),
        "ages-before": _ages("<|assistant|>\n", ""),
        "ages-thinking": _ages("<think>\n", ""),
        "llama": Kind(
            ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), (), _LLAMA,
            "<|eot_id|>", "<|eot_id|>", _llama_behind,
        ),
        "inst": Kind(
            ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"), (), _INST,
            "</s>", "</s>", _inst_behind,
        ),
        "roles": Kind(
            ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"), (),
            _ROLES, "<|endoftext|>", None, _roles_behind,
        ),
        "tails": Kind(
            ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|end|>", "<|endoftext|>"), (), _TAILS,
            "<|endoftext|>", "<|end|>", _tails_behind,
        ),
        "plain": Kind(_EOS, (), _PLAIN, "</s>", None, _plain_behind),
        "counts": Kind(_EOS, (), _COUNTS, "</s>", None, _no_texts_of_ours),
        "shouts": Kind(_EOS, (), _SHOUTS, "</s>", None, _no_texts_of_ours),
        "tidies": Kind(_CHATML_SPECIAL, (), _TIDIES, "<|im_end|>", "<|im_end|>", _tidies_behind),
    }[name]  # fmt: skip


@cache
def renderer_of(name: str, *, normalizes: bool = False, spaces: bool = False) -> Renderer:
    """A tokenizer with the tokens and the template of this kind.

    `normalizes` text to NFC, as some do; `spaces`: puts one behind each special token, as older ones do.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    auto_tokenizer()  # first, so that torch stays out
    from transformers import PreTrainedTokenizerFast

    made = kind(name)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaces)
    backend.decoder = decoders.ByteLevel()
    if normalizes:
        backend.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=list(made.special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator([CORPUS] * 3, trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in made.tags])
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=made.eos)
    fast.chat_template = made.template
    return Renderer(fast, f"test-{name}")
