"""`regex`: 1 when a pattern is found in what the model wrote, or when what it captures is the reference.

Python's `re` may backtrack without end: it runs in a worker process, whose deadline ends it.
"""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from .base import ScoreInput, TaskError, Verdict, reference, typed

_FLAGS = {"a": re.ASCII, "i": re.IGNORECASE, "m": re.MULTILINE, "s": re.DOTALL, "x": re.VERBOSE}


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`pattern` (else `task["pattern"]`); `flags` from a, i, m, s, x; `match` search or full; `on` answer
    (behind the reasoning) or text (everything).  With `group` (number or name) the text captured by the last
    match must be `answer` (else `task[field]`).
    """

    pattern: str | None = None
    flags: str = ""
    match: Literal["search", "full"] = "search"
    group: int | str | None = None
    answer: str | None = None
    field: str = "answer"
    on: Literal["answer", "text"] = "answer"


class Regex:
    """See `Params`."""

    name = "regex"
    version = "1"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        self._flags = re.RegexFlag(0)
        for letter in self._params.flags:
            if letter not in _FLAGS:
                raise TaskError(f"params.flags: {letter!r} is none of {', '.join(_FLAGS)}")
            self._flags |= _FLAGS[letter]
        self._own = None if self._params.pattern is None else self._compile(self._params.pattern, "params.pattern")

    def score(self, task: ScoreInput) -> Verdict:
        pattern = self._own or self._compile(task.task.get("pattern"), "task.pattern")
        text = task.text if self._params.on == "text" else task.answer
        group = self._params.group
        found = pattern.fullmatch(text) if self._params.match == "full" else _last(pattern, text, group is None)
        if group is None:
            return Verdict(1.0 if found else 0.0)
        wanted = reference(task, self._params.answer, self._params.field)
        if found is None or found[group] is None:
            return Verdict(0.0, "the pattern captures nothing", invalid_output=True)
        right = found[group].strip() == str(wanted).strip()
        return Verdict(1.0 if right else 0.0, None if right else f"captured {found[group][:100]!r}")

    def _compile(self, pattern: Any, field: str) -> re.Pattern[str]:
        if not isinstance(pattern, str):
            raise TaskError(f"{field}: Expected `str`, got `{type(pattern).__name__}`")
        try:
            compiled = re.compile(pattern, self._flags)
        except (re.error, RecursionError, OverflowError) as error:
            raise TaskError(f"{field}: {error}") from None
        group = self._params.group
        known = (
            group is None or group in compiled.groupindex or (isinstance(group, int) and 0 <= group <= compiled.groups)
        )
        if not known:
            raise TaskError(f"params.group: {field} has no group {group!r}")
        return compiled


def _last(pattern: re.Pattern[str], text: str, any_will_do: bool) -> re.Match[str] | None:
    if any_will_do:
        return pattern.search(text)
    last = None
    for found in pattern.finditer(text):
        last = found
    return last
