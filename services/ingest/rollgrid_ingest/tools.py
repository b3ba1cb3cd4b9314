"""What a request's tools mean: how the answer is parsed, and how a call is forced.

`auto` needs the policy's tool parser.  A required or named call is forced by a schema, in the form vLLM gives it, and
so needs none.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.jobs import ParsingSpec

from .settings import Limits
from .wire import at_most, check_payload, invalid, over_limit, unsupported

AUTO, REQUIRED, NONE = "auto", "required", "none"
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
PARSER_SETTING = "tool_parser of the model in ROLLGRID_CHECKPOINT_SYNC_MODELS"


class ToolPlan(NamedTuple):
    """`tools` as templates get them; `choice` is auto, required or a function's name, None = no calls are parsed."""

    tools: tuple[dict[str, Any], ...] = ()
    choice: str | None = None
    schema: dict[str, Any] | None = None

    @property
    def named(self) -> bool:
        return self.choice is not None and self.choice not in (AUTO, REQUIRED)


def plan_tools(
    tools: list[dict[str, Any]] | None,
    choice: str | dict[str, Any] | None,
    parallel: bool | None,
    policy: PolicyState,
    limits: Limits,
) -> ToolPlan:
    """Raises RollgridError naming the field; unsupported when calls cannot be parsed for this policy."""
    if tools is None:
        if choice not in (None, NONE):
            raise invalid("tool_choice without tools", "tool_choice")
        return ToolPlan()
    checked = check_tools(tools, "tools", limits)
    names = [tool["function"]["name"] for tool in checked]
    wanted = _choice(choice, names)
    if wanted is None:
        return ToolPlan(checked)
    if wanted == AUTO:
        if policy.tool_parser is None:
            raise unsupported(
                "tools",
                f"{policy.policy} has no tool parser, so tool_choice auto cannot be parsed: set {PARSER_SETTING}, "
                "or ask for required, a named function, or none",
            )
        return ToolPlan(checked, AUTO)
    if wanted == REQUIRED:
        return ToolPlan(checked, REQUIRED, _any_call(checked, parallel))
    function = checked[names.index(wanted)]["function"]
    return ToolPlan(checked, wanted, _parameters(function))


def parsing_spec(policy: PolicyState, plan: ToolPlan, template_kwargs: dict[str, Any]) -> ParsingSpec | None:
    """What the sampler is to parse; None when there is nothing to look for."""
    if plan.choice is None and policy.reasoning_parser is None:
        return None
    return ParsingSpec(
        tool_parser=policy.tool_parser if plan.choice is not None else None,
        reasoning_parser=policy.reasoning_parser,
        tools=plan.tools if plan.choice is not None else (),
        tool_choice=plan.choice,
        template_kwargs=template_kwargs,
    )


def _choice(choice: str | dict[str, Any] | None, names: list[str]) -> str | None:
    """auto, required, a function's name, or None for none."""
    if choice is None:
        return AUTO
    if isinstance(choice, str):
        if choice in (AUTO, REQUIRED):
            return choice
        if choice == NONE:
            return None
        raise invalid(f"tool_choice {choice[:80]!r} is none of none, auto, required", "tool_choice")
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise invalid('tool_choice must be {"type": "function", "function": {"name": ...}}', "tool_choice")
    if name not in names:
        raise invalid(f"tool_choice names {name[:80]!r}, which is not among the tools", "tool_choice.function.name")
    return name


def check_tools(tools: list[dict[str, Any]], path: str, limits: Limits) -> tuple[dict[str, Any], ...]:
    """The tools as they are.  Raises RollgridError naming the field."""
    if not tools:
        raise invalid(f"{path} is empty: leave it out", path)
    at_most(len(tools), path, "max_tools", limits.max_tools)
    check_payload(tools, path, limits.max_depth)
    for i, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type", "function") != "function" or not isinstance(function, dict):
            raise unsupported(f"{path}[{i}].type", "only functions are offered")
        name = function.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in (AUTO, REQUIRED, NONE):
            raise invalid(f"{path}[{i}].function.name is not usable", f"{path}[{i}].function.name", limit=_NAME.pattern)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise invalid(f"{path}[{i}].function.parameters must be a JSON schema", f"{path}[{i}].function.parameters")
    try:
        size = len(msgspec.json.encode(tools))
    except (UnicodeEncodeError, ValueError, OverflowError) as error:
        raise invalid(f"{path} cannot be stored: {error}", path) from error
    if size > limits.max_structured_bytes:
        raise over_limit(path, f"{size} bytes", f"max_structured_bytes={limits.max_structured_bytes}")
    return tuple(tools)


def _parameters(function: dict[str, Any]) -> dict[str, Any]:
    """Without parameters the arguments are still an object."""
    parameters: dict[str, Any] = function.get("parameters") or {"type": "object", "properties": {}}
    return parameters


def _any_call(tools: tuple[dict[str, Any], ...], parallel: bool | None) -> dict[str, Any]:
    """A list of calls of any of the tools, each {name, parameters}; their `$defs` are moved to the top."""
    calls: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for i, tool in enumerate(tools):
        parameters = dict(_parameters(tool["function"]))
        for name, definition in _definitions(parameters, f"tools[{i}].function.parameters").items():
            if definitions.setdefault(name, definition) != definition:
                raise invalid(f"two tools define {name[:80]!r} differently", f"tools[{i}].function.parameters.$defs")
        calls.append(
            {
                "properties": {
                    "name": {"type": "string", "enum": [tool["function"]["name"]]},
                    "parameters": parameters,
                },
                "required": ["name", "parameters"],
            }
        )
    found: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    if parallel is False:
        found["maxItems"] = 1
    if definitions:
        found["$defs"] = definitions
    return found


def _definitions(parameters: dict[str, Any], path: str) -> dict[str, Any]:
    """Takes `$defs` out of `parameters`."""
    definitions = parameters.pop("$defs", {})
    if not isinstance(definitions, dict):
        raise invalid(f"{path}.$defs must be an object", f"{path}.$defs")
    return definitions
