"""What the pool and its worker processes say to each other: msgpack frames, and one shared cell.

A call holds all samples of an event, so that a cheap verifier costs one exchange per event.  While
a call runs, the worker writes into the cell which sample it is at and since when: after a crash or
at a deadline the pool knows whose fault it was.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from typing import Any, NamedTuple

import msgspec

from .rewards.base import ScoreInput

MAX_FRAME = 64 * 1024 * 1024
MAX_DETAIL = 500
"""Characters of an explanation that are kept."""

LOADING = 0xFFFF_FFFF
REPORTING = 0xFFFF_FFFE
_LENGTH = struct.Struct("<I")
_CELL = struct.Struct("<QQQ")


class Item(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a call, under its position in the caller's list; fields as in `ScoreInput`."""

    position: int
    text: str
    content: str | None
    finish_reason: str | None
    tokens: int
    index: int
    turn_texts: tuple[str, ...] = ()


class Shared(msgspec.Struct, frozen=True, array_like=True):
    """What all samples of one call have in common; fields as in `ScoreInput`."""

    prompt_text: str | None
    messages: tuple[dict[str, Any], ...] | None
    task: dict[str, Any]
    metadata: dict[str, Any]

    def with_item(self, item: Item) -> ScoreInput:
        return ScoreInput(
            text=item.text,
            content=item.content,
            finish_reason=item.finish_reason,
            tokens=item.tokens,
            index=item.index,
            prompt_text=self.prompt_text,
            messages=self.messages,
            task=self.task,
            metadata=self.metadata,
            turn_texts=item.turn_texts,
        )


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Pool → worker: judge `items` with verifier `type` made from `params`."""

    number: int
    type: str
    params: dict[str, Any]
    shared: Shared
    items: tuple[Item, ...]


class ItemResult(msgspec.Struct, frozen=True, array_like=True):
    """`value` is None when the verifier failed; `detail` then says how.

    `network` holds what a watched worker saw the verifier do (see `watch`).
    """

    position: int
    value: float | None
    invalid_output: bool
    detail: str | None
    version: str
    duration_ms: float
    turn_values: tuple[float | None, ...] = ()
    network: tuple[str, ...] = ()


class Results(msgspec.Struct, frozen=True, array_like=True):
    """Worker → pool: some results of a call; `last` ends it, `worn` asks to be replaced."""

    number: int
    results: tuple[ItemResult, ...]
    last: bool
    worn: bool = False


class Progress(NamedTuple):
    """Where a worker is: the call, the item's position (or LOADING, REPORTING), monotonic ns of its start."""

    number: int
    position: int
    started_ns: int


class Cell:
    """24 bytes of shared memory, written by one worker and read by the pool."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _CELL.size)

    @classmethod
    def create(cls) -> Cell:
        fd = os.memfd_create("rollgrid-scorer", os.MFD_CLOEXEC)
        os.ftruncate(fd, _CELL.size)
        return cls(fd)

    def mark(self, number: int, position: int) -> None:
        # the start first: a reader in between sees the old position with a fresh start, and waits longer
        struct.pack_into("<Q", self._map, 16, time.monotonic_ns())
        struct.pack_into("<QQ", self._map, 0, number, position)

    def read(self) -> Progress:
        return Progress(*_CELL.unpack_from(self._map, 0))

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)


def frame(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(head: bytes) -> int:
    """The length behind a frame's head; raises ValueError over MAX_FRAME."""
    length: int = _LENGTH.unpack(head)[0]
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes is over {MAX_FRAME}")
    return length


HEAD_SIZE = _LENGTH.size


def receive(sock: socket.socket) -> bytes | None:
    """One frame's body from a blocking socket, None when the other end has closed."""
    head = _exactly(sock, HEAD_SIZE)
    return None if head is None else _exactly(sock, frame_length(head))


def _exactly(sock: socket.socket, size: int) -> bytes | None:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        count = sock.recv_into(view[got:])
        if count == 0:
            return None
        got += count
    return bytes(buffer)
