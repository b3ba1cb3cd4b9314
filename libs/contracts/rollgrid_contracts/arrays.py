"""Packed numeric arrays: the form in which token ids and log-probabilities travel.

On msgpack they are raw little-endian bytes (2 bytes of framing for any length), on JSON plain
lists, so that any NATS client can read and write them.  `codec` installs the hooks.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, Generic, TypeVar

Number = TypeVar("Number", int, float)


class PackedArray(Generic[Number]):
    """An immutable one-dimensional array held as little-endian bytes.

    `packed` is the raw buffer; `numpy.frombuffer(a.packed, a.dtype)` is a zero-copy view.
    """

    __slots__ = ("packed",)
    typecode: ClassVar[str]
    dtype: ClassVar[str]

    def __init__(self, packed: bytes = b"") -> None:
        if len(packed) % 4:
            raise ValueError(f"packed {self.dtype} array of {len(packed)} bytes is not a multiple of 4")
        self.packed = packed

    @classmethod
    def of(cls, values: Iterable[Number]) -> Any:
        """Pack `values`; raises OverflowError or TypeError when one does not fit the dtype."""
        buffer = array(cls.typecode, values)
        if sys.byteorder == "big":
            buffer.byteswap()
        return cls(buffer.tobytes())

    def tolist(self) -> list[Number]:
        buffer: array[Any] = array(self.typecode)
        buffer.frombytes(self.packed)
        if sys.byteorder == "big":
            buffer.byteswap()
        return buffer.tolist()

    def __len__(self) -> int:
        return len(self.packed) // 4

    def __iter__(self) -> Iterator[Number]:
        return iter(self.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackedArray) and type(other) is type(self) and other.packed == self.packed

    def __hash__(self) -> int:
        return hash((self.dtype, self.packed))

    def __repr__(self) -> str:
        head = self.tolist()[:6]
        more = ", …" if len(self) > 6 else ""
        return f"{type(self).__name__}({', '.join(map(repr, head))}{more}; len={len(self)})"


class TokenIds(PackedArray[int]):
    """Token ids, dtype `<u4`, shape (tokens,)."""

    __slots__ = ()
    typecode = "I"
    dtype = "<u4"


class Floats(PackedArray[float]):
    """Natural-log probabilities or rewards, dtype `<f4`, shape (tokens,)."""

    __slots__ = ()
    typecode = "f"
    dtype = "<f4"
