"""Tools and structured output: what a request may ask for, and what the engine is told (A26, A49)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import ErrorCode
from rollgrid_ingest.settings import Limits
from rollgrid_ingest.structured import structured_output
from rollgrid_ingest.tools import ToolPlan, parsing_spec, plan_tools
from rollgrid_runtime.errors import RollgridError

LIMITS = Limits()


def policy(**changes: Any) -> PolicyState:
    fields: dict[str, Any] = {
        "tenant": "shared",
        "policy": "tiny",
        "pool": "p",
        "base": "/b",
        "base_digest": "0",
        "tokenizer_prefix": "t/",
        "tokenizer_digest": "0",
        "max_model_len": 64,
        "vocab_size": 100,
        "dtype": "float32",
    }
    return PolicyState(**{**fields, **changes})


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD = tool(
    "add", {"type": "object", "properties": {"a": {"$ref": "#/$defs/number"}}, "$defs": {"number": {"type": "number"}}}
)
NAMED: Any = {"type": "function", "function": {"name": "add"}}


def test_auto_needs_the_policys_parser_and_says_which_setting() -> None:
    for choice in (None, "auto"):
        with pytest.raises(RollgridError) as refused:
            plan_tools([ADD], choice, None, policy(), LIMITS)
        assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, "tools")
        assert "tool_parser" in refused.value.message
        plan = plan_tools([ADD], choice, None, policy(tool_parser="hermes"), LIMITS)
        assert (plan.choice, plan.schema, plan.tools) == ("auto", None, (ADD,))


def test_a_forced_call_needs_no_parser() -> None:
    required = plan_tools([ADD, tool("now")], "required", None, policy(), LIMITS)
    assert required.choice == "required"
    assert required.schema == {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "anyOf": [
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["add"]},
                        "parameters": {"type": "object", "properties": {"a": {"$ref": "#/$defs/number"}}},
                    },
                    "required": ["name", "parameters"],
                },
                {
                    "properties": {
                        "name": {"type": "string", "enum": ["now"]},
                        "parameters": {"type": "object", "properties": {}},
                    },
                    "required": ["name", "parameters"],
                },
            ],
        },
        "$defs": {"number": {"type": "number"}},
    }
    assert "$defs" in ADD["function"]["parameters"], "the caller's tools are not changed"
    single = plan_tools([ADD], "required", False, policy(), LIMITS).schema or {}
    assert single["maxItems"] == 1
    named = plan_tools([ADD], NAMED, None, policy(), LIMITS)
    assert (named.choice, named.schema, named.named) == ("add", ADD["function"]["parameters"], True)


def test_none_renders_the_tools_and_parses_no_call() -> None:
    plan = plan_tools([ADD], "none", None, policy(tool_parser="hermes"), LIMITS)
    assert (plan.tools, plan.choice) == ((ADD,), None)
    assert parsing_spec(policy(tool_parser="hermes"), plan, {}) is None
    spec = parsing_spec(policy(tool_parser="hermes", reasoning_parser="qwen3"), plan, {"enable_thinking": True})
    assert spec is not None
    assert (spec.tool_parser, spec.reasoning_parser, spec.tools) == (None, "qwen3", ())
    assert spec.template_kwargs == {"enable_thinking": True}
    assert parsing_spec(policy(), ToolPlan(), {}) is None


@pytest.mark.parametrize(
    ("tools", "choice", "field"),
    [
        ([], None, "tools"),
        (None, "auto", "tool_choice"),
        ([ADD], "always", "tool_choice"),
        ([ADD], {"type": "function"}, "tool_choice"),
        ([ADD], {"function": {"name": "sub"}}, "tool_choice.function.name"),
        ([{"type": "custom", "custom": {}}], "required", "tools[0].type"),
        ([{"function": {}}], "required", "tools[0].function.name"),
        ([tool("auto")], "required", "tools[0].function.name"),
        ([{"function": {"name": "x", "parameters": []}}], "required", "tools[0].function.parameters"),
        ([tool("x" * 10, {"d": "y" * 70_000})], "required", "tools"),
        ([tool("t")] * 129, "required", "tools"),
        ([ADD, tool("b", {"$defs": {"number": {"type": "string"}}})], "required", "tools[1].function.parameters.$defs"),
        ([tool("b", {"$defs": []})], "required", "tools[0].function.parameters.$defs"),
    ],
)
def test_refusals_name_the_tool(tools: Any, choice: Any, field: str) -> None:
    with pytest.raises(RollgridError) as refused:
        plan_tools(tools, choice, None, policy(), LIMITS)
    assert refused.value.field == field
    assert refused.value.http_status == 400


# -- structured output ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "response_format", "wanted"),
    [
        (None, None, None),
        ({}, {"type": "text"}, None),
        (None, {"type": "json_object"}, {"json_object": True}),
        (None, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}, {"json": {"type": "object"}}),
        ({"regex": "a+", "json": None}, None, {"regex": "a+"}),
        ({"choice": ["a", "b"]}, {"type": "text"}, {"choice": ["a", "b"]}),
        ({"json": '{"type": "object"}', "disable_any_whitespace": True}, None, {"json": '{"type": "object"}', "disable_any_whitespace": True}),
        ({"grammar": "root ::= x"}, None, {"grammar": "root ::= x"}),
        (None, {"type": "structural_tag", "format": {}}, {"structural_tag": '{"type":"structural_tag","format":{}}'}),
    ],
)  # fmt: skip
def test_constraints_in_vllms_keys(outputs: Any, response_format: Any, wanted: Any) -> None:
    assert structured_output(outputs, response_format, "", LIMITS) == wanted


@pytest.mark.parametrize(
    ("outputs", "response_format", "field"),
    [
        ({"json": {}, "regex": "a"}, None, "structured_outputs"),
        ({"disable_any_whitespace": True}, None, "structured_outputs"),
        ({"colour": 1}, None, "structured_outputs.colour"),
        ({"choice": []}, None, "structured_outputs.choice"),
        ({"json": "{"}, None, "structured_outputs.json"),
        ({"json": 5}, None, "structured_outputs.json"),
        ({"json_object": False}, None, "structured_outputs.json_object"),
        ({"regex": ""}, None, "structured_outputs.regex"),
        ({"regex": "x" * 70_000}, None, "structured_outputs"),
        ({"regex": "a"}, {"type": "json_object"}, "response_format"),
        (None, {"type": "json_schema"}, "response_format.json_schema"),
        (None, {"type": "xml"}, "response_format.type"),
        (None, {}, "response_format.type"),
    ],
)
def test_wrong_constraints_are_refused_by_name(outputs: Any, response_format: Any, field: str) -> None:
    with pytest.raises(RollgridError) as refused:
        structured_output(outputs, response_format, "", LIMITS)
    assert refused.value.field == field
    assert refused.value.http_status == 400


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
OBJECT = st.dictionaries(
    st.sampled_from(("type", "function", "json", "regex", "choice", "grammar", "json_schema", "schema", "x")), JSON, max_size=4
)  # fmt: skip


@given(
    st.lists(OBJECT, max_size=3) | st.none(),
    st.text(max_size=8) | OBJECT | st.none(),
    OBJECT | st.none(),
    OBJECT | st.none(),
)
def test_whatever_is_asked_is_planned_or_refused_with_a_type(
    tools: Any, choice: Any, outputs: Any, response_format: Any
) -> None:
    for work in (
        lambda: plan_tools(tools, choice, None, policy(tool_parser="hermes"), LIMITS),
        lambda: structured_output(outputs, response_format, "", LIMITS),
    ):
        try:
            work()
        except RollgridError as refused:
            if refused.http_status != 400 or not refused.field:
                raise
