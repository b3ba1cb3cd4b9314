"""A client of `vllm serve` moves over unchanged: every field vLLM knows is known here too (A49).

Known means served, ignored as documented, or refused by name; unknown ones would be refused as typing errors.
vLLM's classes are read, not imported: that takes seconds and a torch.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from rollgrid_ingest.chat_schema import CHAT_NEUTRAL, ChatRequest
from rollgrid_ingest.openai_schema import (
    COMPLETION_NEUTRAL,
    GENERATE_NEUTRAL,
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    StreamOptions,
)
from rollgrid_ingest.sampling import IGNORED, NEUTRAL

OWN = {"output_text_buffer_length"}
"""Of vLLM's SamplingParams: what its own processor sets, not a client."""


def vllm_fields(module: str, name: str) -> set[str]:
    """Public annotated fields of a class in vLLM's source."""
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    path = Path(found.submodule_search_locations[0]) / module
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and isinstance(each.target, ast.Name)
                and not each.target.id.startswith("_")
                and "ClassVar" not in ast.unparse(each.annotation)
            }
    raise LookupError(f"{module} has no {name}")


@pytest.mark.parametrize(
    ("module", "name", "ours"),
    [
        ("entrypoints/openai/chat_completion/protocol.py", "ChatCompletionRequest", ChatRequest),
        ("entrypoints/openai/completion/protocol.py", "CompletionRequest", CompletionRequest),
        ("entrypoints/scale_out/token_in_token_out/protocol.py", "GenerateRequest", GenerateRequest),
        ("entrypoints/generate/base/protocol.py", "StreamOptions", StreamOptions),
        ("sampling_params.py", "SamplingParams", GenerateSampling),
    ],
)
def test_no_field_of_vllms_is_unknown(module: str, name: str, ours: type) -> None:
    theirs = vllm_fields(module, name)
    assert len(theirs) > 1
    assert theirs - set(ours.__struct_fields__) - OWN == set()  # type: ignore[attr-defined]


def test_what_is_refused_or_ignored_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "http.md").read_text()
    named = set(re.findall(r"`([a-z_]+)`", page))
    for name in {*NEUTRAL, *CHAT_NEUTRAL, *COMPLETION_NEUTRAL, *GENERATE_NEUTRAL, *IGNORED}:
        assert name in named, f"{name} is missing in docs/reference/http.md"
