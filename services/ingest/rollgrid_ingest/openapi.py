"""The OpenAPI document: routes from FastAPI, shapes from the structs they are read into and written from."""

from __future__ import annotations

from functools import cache
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from rollgrid_contracts.arrays import Floats, PackedArray, TokenIds
from starlette.responses import Response

from .rollout_schema import ErrorAnswer

_REF = "#/components/schemas/{name}"
_shapes: set[type] = {ErrorAnswer}

ERRORS = {
    400: "The request is wrong: `param` names the field, `limit` the bound it broke",
    401: "No API key, or an unknown one",
    403: "The key lacks a scope",
    404: "No such thing for this tenant",
    409: "The idempotency key has another body, or the version is not available",
    413: "The body is over the bound",
    429: "Queues or quotas are full; come again after `Retry-After` seconds",
    500: "A bug, or a job that kills its engine",
    502: "The engine failed on this request",
    503: "Something this server stands on is away; come again after `Retry-After` seconds",
    504: "The deadline came first",
}


def described(
    summary: str,
    *,
    answer: type,
    body: type | None = None,
    status: int = 200,
    optional_body: bool = False,
    events: bool = False,
    streamed: bool = False,
) -> dict[str, Any]:
    """Keyword arguments of a route: its document, from the structs that really are read and written."""
    _shapes.add(answer)
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if events:
        content["application/msgpack"] = {"schema": {"type": "string", "format": "binary"}}
    if events or streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    responses: dict[int | str, dict[str, Any]] = {status: {"description": "Success", "content": content}}
    for code, description in ERRORS.items():
        responses[code] = {"description": description, "content": {"application/json": {"schema": _ref(ErrorAnswer)}}}
    extra: dict[str, Any] = {}
    if body is not None:
        _shapes.add(body)
        extra["requestBody"] = {
            "required": not optional_body,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return {
        "summary": summary,
        "status_code": status,
        "responses": responses,
        "response_class": Response,
        "response_model": None,
        "openapi_extra": extra or None,
    }


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def document(app: FastAPI) -> dict[str, Any]:
    """The app's OpenAPI document, made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
        shapes = [_as_json(kind) for kind in sorted(_shapes, key=lambda kind: kind.__name__)]
        _, components = msgspec.json.schema_components(shapes, ref_template=_REF)
        found["security"] = [{"key": []}]
        components_of = found.setdefault("components", {})
        components_of["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        schemas = components_of.setdefault("schemas", {})
        schemas.update(components)
        for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own shapes are never sent
            schemas.pop(name, None)
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = found
    return app.openapi_schema


@cache
def _as_json(kind: type) -> type:
    """The struct as JSON has it: packed arrays are lists (msgspec cannot describe them, nor their defaults)."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(kind):
        is_array = isinstance(field.default, PackedArray)
        default: Any = msgspec.field(default=field.default)
        if is_array or field.default_factory is not msgspec.NODEFAULT:
            default = msgspec.field(default_factory=list if is_array else field.default_factory)
        fields.append((field.name, _json_type(field.type), default))
    config = kind.__struct_config__  # type: ignore[attr-defined]
    return msgspec.defstruct(
        kind.__name__,
        fields,
        namespace={"__doc__": kind.__doc__},
        kw_only=True,
        rename={field.name: field.encode_name for field in msgspec.structs.fields(kind)},
        tag=config.tag,
        tag_field=config.tag_field,
        forbid_unknown_fields=config.forbid_unknown_fields,
    )


def _json_type(annotation: Any) -> Any:
    if isinstance(annotation, type) and not get_args(annotation):
        if issubclass(annotation, TokenIds):
            return list[int]
        if issubclass(annotation, Floats):
            return list[float]
        return _as_json(annotation) if issubclass(annotation, msgspec.Struct) else annotation
    origin, inner = get_origin(annotation), tuple(_json_type(part) for part in get_args(annotation))
    if origin in (Union, UnionType):
        return Union[inner]  # noqa: UP007 - a tuple of members
    return origin[inner] if origin in (tuple, list, dict) else annotation
