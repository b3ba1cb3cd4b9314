"""What a client did and saw, one JSON object a line, written as it happens.

A line is on disk before the next step: a client that is killed leaves a journal that claims no
more than it knew.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.arrays import Floats, TokenIds


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """About to submit `groups` groups of `n` under `key`; whether it was accepted is not known yet."""

    at: float
    tenant: str
    run: str
    key: str
    groups: int
    n: int


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """The door said yes: these groups are promised one terminal record each by `deadline` or so."""

    at: float
    tenant: str
    run: str
    key: str
    group_ids: tuple[str, ...]
    n: int
    deadline: float


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The door said no: nothing of `key` may exist unless another attempt was accepted."""

    at: float
    key: str
    status: int
    code: str
    retry_after: float | None = None


class RepliedSample(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: TokenIds
    logprobs: Floats
    finish_reason: str | None


class Replied(msgspec.Struct, frozen=True, kw_only=True, tag="replied"):
    """The interactive door answered with these samples of `group_id`."""

    at: float
    group_id: str
    samples: tuple[RepliedSample, ...]


class CancelAsked(msgspec.Struct, frozen=True, kw_only=True, tag="cancel_asked"):
    at: float
    group_ids: tuple[str, ...]


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """The iterator of `reader` yielded a closed group; `cursor` is where it would resume."""

    at: float
    reader: str
    run: str
    cursor: int
    group_id: str


class Posted(msgspec.Struct, frozen=True, kw_only=True, tag="posted"):
    """The door stored a reward posted onto `group_id` under `key`, at `cursor`."""

    at: float
    key: str
    group_id: str
    cursor: int


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """The door said yes to what was asked of a session under `key`."""

    at: float
    key: str


class TurnReplied(msgspec.Struct, frozen=True, kw_only=True, tag="turn_replied"):
    """A turn of a session was answered, under `key`."""

    at: float
    key: str
    group_id: str
    index: int
    turn: int
    token_ids: TokenIds
    logprobs: Floats


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True, tag="session_closed"):
    """The door took the close of a session that then had `turns` turns."""

    at: float
    key: str
    group_id: str
    index: int
    reward: float
    scored: bool
    turns: int


Line = Attempted | Accepted | Refused | Replied | CancelAsked | Delivered | Posted | Taken | TurnReplied | SessionClosed


class Journal:
    """Appends lines to one file.  Safe over crashes of its process, not for two writers at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def write(self, line: Line) -> None:
        os.write(self._out, codec.encode(line, codec.JSON) + b"\n")

    def close(self) -> None:
        os.close(self._out)


def read(path: Path) -> list[Line]:
    """All whole lines; one cut off by a kill at the very end is no claim."""
    whole = (raw for raw in path.read_bytes().splitlines(keepends=True) if raw.endswith(b"\n"))
    return [codec.decode(raw, Line, codec.JSON) for raw in whole]  # type: ignore[arg-type]


def now() -> float:
    return time.time()
