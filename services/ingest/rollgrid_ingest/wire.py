"""Bodies in and out: JSON read strictly into structs, every refusal naming its field."""

from __future__ import annotations

import math
import re
from typing import Any, TypeVar

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError

T = TypeVar("T")

_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*?)`(?: - at `(?P<path>\$.*)`)?$", re.S)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*?)`(?: - at `(?P<path>\$.*)`)?$", re.S)
_PATH = re.compile(r" - at `(?P<path>\$.*)`$", re.S)

INT64 = 2**63
UINT64 = 2**64


def invalid(
    message: str, field: str | None = None, *, code: ErrorCode = ErrorCode.INVALID_REQUEST, limit: str | None = None
) -> RollgridError:
    """A refusal of the caller's request."""
    return RollgridError(code, message, boundary=Boundary.CLIENT, field=field, limit=limit)


def over_limit(field: str, value: object, limit: str) -> RollgridError:
    """`limit` is the setting and its value, as in `max_n=1024`."""
    return invalid(f"{field} is {value}, the limit is {limit}", field, code=ErrorCode.LIMIT_EXCEEDED, limit=limit)


def at_most(count: int, field: str, name: str, limit: int) -> None:
    """Raises limit_exceeded naming the setting."""
    if count > limit:
        raise over_limit(field, count, f"{name}={limit}")


def unsupported(field: str, why: str = "not offered") -> RollgridError:
    return invalid(f"{field}: {why}", field, code=ErrorCode.UNSUPPORTED)


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """The body as the decoder's struct.

    Raises RollgridError (unknown_field, invalid_request) naming the field.
    """
    if not body.strip():
        raise invalid("the body is empty: a JSON object is wanted")
    return decode_body(body, decoder, "JSON")


def decode_body(body: bytes, decoder: msgspec.json.Decoder[T] | msgspec.msgpack.Decoder[T], form: str) -> T:
    """As `decode_json`, in either form."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(str(error)) from error
    except msgspec.DecodeError as error:
        raise invalid(f"the body is not valid {form}: {error}") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply", limit="max_depth") from error
    except ValueError as error:  # hooks, and text that is not UTF-8
        raise invalid(f"the body cannot be read: {error}") from error


def _refusal(text: str) -> RollgridError:
    if found := _UNKNOWN.search(text):
        field = _join(found["path"], found["name"])
        return invalid(f"unknown field {field}", field, code=ErrorCode.UNKNOWN_FIELD)
    if found := _MISSING.search(text):
        field = _join(found["path"], found["name"])
        return invalid(f"{field} is required", field)
    where = _PATH.search(text)
    field = _join(where["path"], "") if where else ""
    return invalid(f"{field or 'the body'}: {_PATH.sub('', text)}", field or None)


def _join(path: str | None, name: str) -> str:
    """`$.tasks[...].sampling` and `top` give `tasks[].sampling.top`."""
    base = (path or "$").removeprefix("$").removeprefix(".").replace("[...]", "[]")
    return ".".join(part for part in (base, name) if part)


def check_payload(value: Any, field: str, max_depth: int) -> None:
    """Refuse what one form of the wire can say and another cannot.

    JSON: deep nesting, integers over 64 bits.  msgpack: NaN, raw bytes, times, keys that are no strings.
    """
    pending: list[tuple[Any, int]] = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        if isinstance(item, (dict, list, tuple)):
            if depth > max_depth:
                raise invalid(
                    f"{field} is nested more than {max_depth} levels deep", field, limit=f"max_depth={max_depth}"
                )
            if isinstance(item, dict) and not all(isinstance(name, str) for name in item):
                raise invalid(f"{field} holds a key that is no string", field)
            pending.extend((child, depth + 1) for child in (item.values() if isinstance(item, dict) else item))
        elif isinstance(item, int):
            if not -INT64 <= item < UINT64:
                raise invalid(f"{field} holds an integer of more than 64 bits", field, limit="64 bits")
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise invalid(f"{field} holds {item}: JSON cannot say that", field)
        elif item is not None and not isinstance(item, str):
            raise invalid(f"{field} holds a {type(item).__name__}: JSON cannot say that", field)


class Refusable(msgspec.Struct, kw_only=True):
    """Mixin of request structs: fields that are known, and refused by name unless they say nothing."""

    def refuse(self, neutral: dict[str, tuple[Any, ...]], prefix: str = "") -> None:
        for name, harmless in neutral.items():
            value = getattr(self, name)
            if value is not None and not any(type(value) is type(ok) and value == ok for ok in harmless):
                raise unsupported(prefix + name, f"the value {_short(value)} is not offered")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
