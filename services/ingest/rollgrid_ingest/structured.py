"""Constraints on what may be generated: `response_format` and vLLM's `structured_outputs`, as one contract value.

The result has the keys of vLLM's `StructuredOutputsParams`; whether a grammar can be compiled, only the engine knows.
"""

from __future__ import annotations

from typing import Any

import msgspec
from rollgrid_contracts.failures import ErrorCode

from .settings import Limits
from .wire import check_payload, invalid, over_limit, unsupported

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
OPTIONS: dict[str, type] = {
    "disable_any_whitespace": bool,
    "disable_additional_properties": bool,
    "whitespace_pattern": str,
}
FORMATS = "text, json_object, json_schema, structural_tag"


def structured_output(
    outputs: Any, response_format: Any, prefix: str, limits: Limits, *, outputs_field: str = "structured_outputs"
) -> dict[str, Any] | None:
    """The one constraint of a request, None without any.  Raises RollgridError naming the field."""
    found = None if outputs in (None, {}) else _checked(outputs, f"{prefix}{outputs_field}")
    wanted = None if response_format is None else _of_format(response_format, f"{prefix}response_format")
    if found is not None and wanted is not None:
        raise invalid(
            f"{prefix}response_format and {prefix}{outputs_field} both constrain the output", f"{prefix}response_format"
        )
    field, result = (f"{prefix}{outputs_field}", found) if found is not None else (f"{prefix}response_format", wanted)
    if result is None:
        return None
    check_payload(result, field, limits.max_depth)
    try:
        size = len(msgspec.json.encode(result))
    except (UnicodeEncodeError, OverflowError, ValueError) as error:
        raise invalid(f"{field} cannot be stored: {error}", field) from error
    if size > limits.max_structured_bytes:
        raise over_limit(field, f"{size} bytes", f"max_structured_bytes={limits.max_structured_bytes}")
    return result


def _checked(outputs: Any, field: str) -> dict[str, Any]:
    if not isinstance(outputs, dict):
        raise invalid(f"{field} must be an object", field)
    given = {name: value for name, value in outputs.items() if value is not None}
    for name in given:
        if name not in CONSTRAINTS and name not in OPTIONS:
            raise invalid(f"unknown field {field}.{name[:80]}", f"{field}.{name[:80]}", code=ErrorCode.UNKNOWN_FIELD)
    kinds = [name for name in CONSTRAINTS if name in given]
    if len(kinds) != 1:
        raise invalid(f"{field} needs exactly one of {', '.join(CONSTRAINTS)}", field, limit="1 constraint")
    for name, kind in OPTIONS.items():
        if name in given and not isinstance(given[name], kind):
            raise invalid(f"{field}.{name} must be a {kind.__name__}", f"{field}.{name}")
    _check_constraint(kinds[0], given[kinds[0]], f"{field}.{kinds[0]}")
    return given


def _check_constraint(kind: str, value: Any, field: str) -> None:
    match kind:
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(each, str) and each for each in value):
                raise invalid(f"{field} must be a list of texts", field)
        case "json_object":
            if value is not True:
                raise invalid(f"{field} must be true", field)
        case "json":
            _check_schema(value, field)
        case _:
            if not isinstance(value, str) or not value:
                raise invalid(f"{field} must be a text", field)


def _check_schema(value: Any, field: str) -> None:
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except msgspec.DecodeError as error:
            raise invalid(f"{field} is not JSON: {error}", field) from error
    if not isinstance(value, (dict, bool)):
        raise invalid(f"{field} must be a JSON schema", field)


def _of_format(asked: Any, field: str) -> dict[str, Any] | None:
    kind = asked.get("type") if isinstance(asked, dict) else None
    if not isinstance(kind, str):
        raise invalid(f"{field}.type must be one of {FORMATS}", f"{field}.type", limit=FORMATS)
    match kind:
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            described = asked.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise invalid(f"{field}.json_schema.schema must be a JSON schema", f"{field}.json_schema")
            return {"json": schema}
        case "structural_tag":
            check_payload(asked, field, 64)
            return {"structural_tag": msgspec.json.encode(asked).decode()}
        case _:
            raise unsupported(f"{field}.type", f"{kind[:80]!r} is none of {FORMATS}")
