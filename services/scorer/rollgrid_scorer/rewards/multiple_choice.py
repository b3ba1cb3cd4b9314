r"""`multiple_choice`: 1 when the letter the model chose is the reference; several letters are `invalid_output`.

The letter is looked for in the last `\boxed{…}`, else the last `<answer>` element, else behind the
last "answer:" or "answer is", else in the last line that holds one standing alone.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .base import ScoreInput, TaskError, Verdict, reference, typed
from .extraction import answer_tag, boxed

_STATED = re.compile(r"\b(?:answer|choice|option)\b[\s*_]*(?:is|are|:|=|\uff1a)[\s*_:]*([^\n]*)", re.IGNORECASE)
_LATEX = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm|bf)\b\s*")


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`answer` (a letter, else `task[field]`); `letters` that may be chosen; `casefold` also takes small ones."""

    answer: str | None = None
    field: str = "answer"
    letters: str = "ABCDE"
    casefold: bool = False


class MultipleChoice:
    """See `Params`."""

    name = "multiple_choice"
    version = "1"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        letters = self._params.letters
        if len(letters) < 2 or not letters.isalpha() or not letters.isupper() or len(set(letters)) != len(letters):
            raise TaskError(f"params.letters: {letters!r} are not two or more different capital letters")
        chosen = letters + letters.lower() if self._params.casefold else letters
        # alone: no letter, digit, apostrophe or hyphen beside it ("A-level", "B's")
        self._alone = re.compile(rf"(?<![\w'\u2019-])([{chosen}])(?![\w'\u2019-])")
        self._leading = re.compile(rf"[\s*_(\[\"'`]*([{chosen}])(?![\w'\u2019-])")
        self._joined = re.compile(rf"[\s)\]*_]*(?:,|/|&|\bor\b|\band\b)[\s(\[*_]*([{chosen}])(?![\w'\u2019-])")

    def score(self, task: ScoreInput) -> Verdict:
        wanted = self._wanted(reference(task, self._params.answer, self._params.field))
        found = self._chosen(task.answer)
        if len(found) != 1:
            what = f"several letters: {', '.join(sorted(found))}" if found else "no letter found"
            return Verdict(0.0, what, invalid_output=True)
        (letter,) = found
        return Verdict(1.0 if letter == wanted else 0.0, None if letter == wanted else f"chose {letter}")

    def _wanted(self, given: Any) -> str:
        text = given.strip("() .").upper() if isinstance(given, str) else ""
        if len(text) != 1 or text not in self._params.letters:
            raise TaskError(f"the reference {given!r} is none of the letters {self._params.letters}")
        return text

    def _chosen(self, text: str) -> set[str]:
        """The letters at the first place that holds any."""
        in_box = boxed(text)
        for place in (None if in_box is None else _LATEX.sub(" ", in_box), answer_tag(text)):
            if place is not None and (found := self._letters(place, everywhere=True)):
                return found
        stated = _STATED.findall(text)
        if stated and (found := self._led(stated[-1]) or self._letters(stated[-1], everywhere=True)):
            return found
        lines = reversed(text.splitlines())
        return next((found for line in lines if (found := self._led(line, line=True) or self._letters(line))), set())

    def _led(self, text: str, *, line: bool = False) -> set[str]:
        """The letter that a statement begins with, and those joined to it: "B, because A …" is B, "A or B" both."""
        first = self._leading.match(text)
        if first is None or (_is_word(text, first, 1) if line or first[1].islower() else False):
            return set()
        found, position = {first[1].upper()}, first.end()
        while more := self._joined.match(text, position):
            found.add(more[1].upper())
            position = more.end()
        return found

    def _letters(self, text: str, *, everywhere: bool = False) -> set[str]:
        """Letters standing alone; `everywhere` a capital A or I is a choice even where it could be a word."""
        return {
            match[1].upper()
            for match in self._alone.finditer(text)
            if (everywhere and match[1].isupper()) or not _is_word(text, match, 1)
        }


def _is_word(text: str, match: re.Match[str], group: int) -> bool:
    """Whether "A" or "I" stands as a word of a sentence: a small letter follows, and nothing marks it as a choice."""
    if match[group] not in ("A", "a", "I", "i"):
        return False
    behind = text[match.end(group) : match.end(group) + 2]
    before = text[: match.start(group)][-1:]
    return len(behind) == 2 and behind[0] == " " and behind[1].islower() and before not in ("(", "[", "*")
