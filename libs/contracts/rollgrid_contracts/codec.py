"""The only place where contracts are encoded and decoded.

msgpack between services, JSON for any client that says so by content type.  Packed arrays are
raw bytes on msgpack and plain lists on JSON.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import msgspec

from .arrays import PackedArray

MSGPACK = "application/msgpack"
JSON = "application/json"

T = TypeVar("T")


def _to_bytes(value: object) -> object:
    if isinstance(value, PackedArray):
        return value.packed
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _to_list(value: object) -> object:
    if isinstance(value, PackedArray):
        return value.tolist()
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _from_wire(wanted: type, value: Any) -> Any:
    if issubclass(wanted, PackedArray):
        try:
            return wanted(value) if isinstance(value, bytes) else wanted.of(value)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"not a {wanted.dtype} array: {error}") from error
    raise NotImplementedError(f"cannot decode {wanted.__name__}")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_to_bytes)
_json = msgspec.json.Encoder(enc_hook=_to_list)


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind, dec_hook=_from_wire)


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=_from_wire)


def encode(message: object, content_type: str = MSGPACK) -> bytes:
    return _json.encode(message) if content_type == JSON else _msgpack.encode(message)


def decode(data: bytes, kind: type[T], content_type: str = MSGPACK) -> T:
    """Decode into `kind` (a struct or a union of tagged structs).

    Raises:
        msgspec.DecodeError: malformed bytes, a missing field or a value of the wrong type.
        RecursionError: nesting deeper than the interpreter allows.
    """
    wanted: Any = kind
    decoder = _json_decoder(wanted) if content_type == JSON else _msgpack_decoder(wanted)
    result: T = decoder.decode(data)
    return result


def to_builtins(message: object) -> Any:
    """The message as JSON-compatible builtins (arrays as lists)."""
    return msgspec.to_builtins(message, enc_hook=_to_list)


def from_builtins(value: Any, kind: type[T]) -> T:
    """The inverse of `to_builtins`; raises msgspec.ValidationError."""
    return msgspec.convert(value, kind, dec_hook=_from_wire, str_keys=True)  # JSON made texts of numbers
