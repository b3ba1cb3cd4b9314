"""`json_schema`: 1 when the JSON that the model wrote fits a schema, 0 when not; no JSON is `invalid_output`.

References to other documents are not fetched: a schema that needs them is a fault of the task.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version as installed
from typing import Any, Literal

import jsonschema
import msgspec
import referencing
from jsonschema.protocols import Validator
from jsonschema.validators import validator_for
from referencing.exceptions import Unresolvable

from .base import ScoreInput, TaskError, Verdict, typed
from .extraction import answer_tag

MAX_STARTS = 256
"""Places at which a JSON value is looked for in prose."""

_FENCED = re.compile(r"```[^\n`]*\n(.*?)```", re.DOTALL)
_START = re.compile(r"[{\[]")


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`schema` (else `task[field]`); `extract` says where the JSON is: `whole` text, the last `fenced` block, the
    last `<answer>` element (`tags`), or `auto` (whole, else fenced, else tags, else the last object or list in the text);
    `formats` also checks `format`.
    """

    schema: dict[str, Any] | bool | None = None
    field: str = "schema"
    extract: Literal["auto", "whole", "fenced", "tags"] = "auto"
    formats: bool = False


class JsonSchema:
    """See `Params`."""

    name = "json_schema"
    version = f"1+jsonschema-{installed('jsonschema')}"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        self._own = None if self._params.schema is None else self._validator(self._params.schema, "params.schema")

    def score(self, task: ScoreInput) -> Verdict:
        validator = self._own or self._validator(task.task.get(self._params.field), f"task.{self._params.field}")
        found = _extract(task.answer, self._params.extract)
        if found is None:
            return Verdict(0.0, "no JSON found", invalid_output=True)
        try:
            error = jsonschema.exceptions.best_match(validator.iter_errors(found[0]))
        except Unresolvable as unresolvable:
            raise TaskError(f"the schema refers to {unresolvable.ref!r}, which is not part of it") from None
        return Verdict(1.0) if error is None else Verdict(0.0, f"{error.json_path}: {error.message}")

    def _validator(self, schema: Any, field: str) -> Validator:
        if not isinstance(schema, (dict, bool)):
            raise TaskError(f"{field}: Expected `object`, got `{type(schema).__name__}`")
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise TaskError(f"{field}: {error.json_path}: {error.message}") from None
        checker = kind.FORMAT_CHECKER if self._params.formats else None
        # an empty registry: without it the library would fetch references from the network
        return kind(schema, format_checker=checker, registry=referencing.Registry())


def _extract(text: str, mode: str) -> tuple[Any] | None:
    """The JSON value, in a tuple because it may be null."""
    if mode == "whole":
        return _loads(text)
    fences = _FENCED.findall(text)
    if mode == "fenced":
        return _loads(fences[-1]) if fences else None
    tagged = answer_tag(text)
    if mode == "tags":
        return None if tagged is None else _loads(tagged)
    for candidate in (text, *fences[-1:], *([] if tagged is None else [tagged])):
        found = _loads(candidate)
        if found is not None:
            return found
    return _last_in_prose(text)


def _loads(text: str) -> tuple[Any] | None:
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _last_in_prose(text: str) -> tuple[Any] | None:
    decoder = json.JSONDecoder(parse_constant=_refuse)
    last, position = None, 0
    for _ in range(MAX_STARTS):
        start = _START.search(text, position)
        if start is None:
            break
        try:
            value, position = decoder.raw_decode(text, start.start())
            last = (value,)
        except (ValueError, RecursionError):
            position = start.end()
    return last
