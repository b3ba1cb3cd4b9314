"""What a stack should be: the options of `rollgrid up`, as data."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
from rollgrid_contracts.ids import is_label

from rollgrid.errors import ConfigurationError

ENGINES = ("vllm", "scripted", "openai_http")
DTYPES = ("auto", "float32", "bfloat16", "float16")


class StackConfig(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """`model` is a Hugging Face folder (tokenizer and weights); `port` None = 8000, or another if that is taken."""

    model: str
    policy: str
    engine: str = "vllm"
    dtype: str = "float32"
    device: str = "cpu"
    samplers: int = 1
    max_model_len: int | None = None
    port: int | None = None
    openai_url: str | None = None
    s3_fsync: bool = True
    tool_parser: str | None = None
    reasoning_parser: str | None = None

    def check(self) -> None:
        """Raises ConfigurationError naming what is wrong."""
        if self.engine not in ENGINES:
            raise ConfigurationError(f"engine {self.engine!r} is none of {', '.join(ENGINES)}")
        if self.samplers < 0:
            raise ConfigurationError("samplers must be 0 or more")
        if not is_label(self.policy):
            raise ConfigurationError(f"policy name {self.policy!r}: letters, digits, dash and underscore, at most 63")
        for parser in (self.tool_parser, self.reasoning_parser):
            if parser is not None and not is_label(parser):
                raise ConfigurationError(f"parser name {parser!r}: letters, digits, dash and underscore, at most 63")
        for needed in ("config.json", "tokenizer.json"):
            if not (Path(self.model) / needed).is_file():
                raise ConfigurationError(f"{self.model} is not a model folder: it has no {needed}")
        if self.engine == "openai_http" and not self.openai_url:
            raise ConfigurationError("engine openai_http needs --openai-url")


def policy_name(model: Path) -> str:
    """A policy name out of a folder's name."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", model.name).strip("-_")[:63] or "default"


def native_dtype() -> str:
    """bfloat16 where the CPU computes in it, else float32 (emulated bfloat16 is slower and less exact)."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        return "float32"
    words = set(flags[1].split()) if flags else set()
    return "bfloat16" if words & {"avx512_bf16", "amx_bf16"} else "float32"


def core_sets(samplers: int, cores: list[int] | None = None) -> list[str]:
    """Which cores each vLLM engine binds to (VLLM_CPU_OMP_THREADS_BIND).

    A single engine leaves one core to the rest of the stack, which is what vLLM's "auto" does; more of
    them share the cores without overlap, because engines on the same core slow each other manyfold.
    """
    if samplers <= 1:
        return ["auto"] * samplers
    found = sorted(os.sched_getaffinity(0)) if cores is None else cores
    usable = found[:-1] if len(found) > samplers else found
    sets = []
    for index in range(samplers):
        low, high = index * len(usable) // samplers, (index + 1) * len(usable) // samplers
        mine = usable[low:high] or [usable[index % len(usable)]]
        sets.append(",".join(map(str, mine)))
    return sets
