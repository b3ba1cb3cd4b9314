"""`format`: 1 when the required sections are there, each exactly once, in order and closed, else 0."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from .base import ScoreInput, TaskError, Verdict, typed

Mark = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`sections` are names of tags ("think" is `<think>…</think>`) or pairs of marks (["## Answer", "## End"]).
    `exclusive`: nothing but white space outside of them; `filled`: none is empty; `prefix` is put before the text
    (where the prompt has already opened the first section).  Judges everything the model wrote.
    """

    sections: tuple[Mark | list[Mark], ...] = ("think", "answer")
    exclusive: bool = True
    filled: bool = True
    prefix: str = ""


class Format:
    """See `Params`."""

    name = "format"
    version = "1"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        if not self._params.sections:
            raise TaskError("params.sections: none is given")
        self._marks = [_marks(section, index) for index, section in enumerate(self._params.sections)]
        flat = [mark for pair in self._marks for mark in pair]
        if len(set(flat)) != len(flat):
            raise TaskError("params.sections: a mark occurs twice")

    def score(self, task: ScoreInput) -> Verdict:
        fault = self._fault(self._params.prefix + task.text)
        return Verdict(1.0 if fault is None else 0.0, fault)

    def _fault(self, text: str) -> str | None:
        for mark in (mark for pair in self._marks for mark in pair):
            count = text.count(mark)
            if count != 1:
                return f"{mark} occurs {count} times"
        end = 0
        for opened, closed in self._marks:
            start, stop = text.index(opened), text.index(closed)
            if start < end or stop < start + len(opened):
                return f"{opened} is out of order"
            if self._params.exclusive and text[end:start].strip():
                return f"text outside the sections before {opened}"
            if self._params.filled and not text[start + len(opened) : stop].strip():
                return f"{opened} is empty"
            end = stop + len(closed)
        return "text outside the sections at the end" if self._params.exclusive and text[end:].strip() else None


def _marks(section: str | list[str], index: int) -> tuple[str, str]:
    if isinstance(section, str):
        return f"<{section}>", f"</{section}>"
    if len(section) != 2:
        raise TaskError(f"params.sections[{index}]: {len(section)} marks, not an opening and a closing one")
    return section[0], section[1]
