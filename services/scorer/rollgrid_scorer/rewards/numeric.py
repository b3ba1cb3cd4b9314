r"""`numeric`: 1 when the number the model answered is the reference within a tolerance, else 0.

The number is looked for in the last `\boxed{…}`, else behind the last `####`, else in the last
`<answer>` element, else in the whole text; of what is found there the last number counts.
Arithmetic is rational, so 0.1 + 0.2 = 3/10.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction
from typing import Any

from .base import ScoreInput, TaskError, Verdict, reference
from .extraction import answer_tag, boxed

MAX_DIGITS = 400
"""Longer numbers and larger exponents are unreadable: they would cost memory, not meaning."""

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-+])?\$?"
    rf"(?:\\[dt]?frac\{{\s*(?P<top>-?[0-9]+)\s*\}}\{{\s*(?P<bottom>-?[0-9]+)\s*\}}"
    rf"|(?P<plain>{_UNSIGNED})(?:[eE](?P<exponent>[-+]?[0-9]+)(?![0-9A-Za-z]))?"
    rf"(?P<below>(?:\s?/\s?(?:{_UNSIGNED})(?![0-9]))+)?)"
    r"(?P<percent>\s?\\?%)?"
)
_LATEX = str.maketrans({"\u2212": "-", "\u2013": "-", "\u00a0": " ", "\u202f": "", "\u2009": ""})


def last_number(text: str, percent_is_ratio: bool = False) -> Fraction | None:
    """The last number written in `text`, None when there is none that can be read."""
    text = text.translate(_LATEX).replace("{,}", ",").replace("\\,", "").replace("\\!", "").replace("\\$", "$")
    found = deque(_NUMBER.finditer(text, _last_run(text)), maxlen=1)
    return _value(found[0], percent_is_ratio) if found else None


def _last_run(text: str) -> int:
    """Where the run of characters begins that holds the last digit: all before it need not be searched."""
    last = next((at for at in range(len(text) - 1, -1, -1) if text[at] in "0123456789"), 0)
    start = last
    while start > 0 and last - start < 8 * MAX_DIGITS and _may_be_in_number(text[start - 1]):
        start -= 1
    return start


def _may_be_in_number(character: str) -> bool:
    return character in "0123456789.,/$+-\\{}eEdtfrac" or character.isspace()


def _value(match: re.Match[str], percent_is_ratio: bool) -> Fraction | None:
    if match["top"] is not None:
        value = _ratio(_decimal(match["top"]), _decimal(match["bottom"]))
    else:
        value = _decimal(match["plain"], match["exponent"])
        if match["below"] is not None:
            below = [part.strip() for part in match["below"].split("/")[1:]]
            # more than one slash is a date or a list: its last part counts
            value = _ratio(value, _decimal(below[0])) if len(below) == 1 else _decimal(below[-1])
    if value is None:
        return None
    if match["sign"] == "-":
        value = -value
    return value / 100 if match["percent"] and percent_is_ratio else value


def _decimal(text: str, exponent: str | None = None) -> Fraction | None:
    if len(text) > MAX_DIGITS or (exponent is not None and (len(exponent) > 5 or abs(int(exponent)) > MAX_DIGITS)):
        return None
    value = Fraction(text.replace(",", ""))
    return value if exponent is None else value * Fraction(10) ** int(exponent)


def _ratio(top: Fraction | None, bottom: Fraction | None) -> Fraction | None:
    return None if top is None or not bottom else top / bottom


def answered_number(text: str, percent_is_ratio: bool = False) -> Fraction | None:
    """The number a solution ends in, by the conventions in the module's docstring."""
    candidate = boxed(text)
    if candidate is None and "####" in text:
        candidate = text.rpartition("####")[2].strip().partition("\n")[0]
    if candidate is None:
        candidate = answer_tag(text)
    return last_number(text if candidate is None else candidate, percent_is_ratio)


class Numeric:
    """Parameters: `answer` (number or text; else `task[field]`), `field`, `tolerance` (absolute),
    `relative` (of the reference), `percent` ("number": 50% is 50, "ratio": 50% is 1/2).
    """

    name = "numeric"
    version = "1"

    def __init__(
        self,
        *,
        answer: float | str | None = None,
        field: str = "answer",
        tolerance: float = 1e-6,
        relative: float = 0.0,
        percent: str = "number",
    ) -> None:
        if percent not in ("number", "ratio"):
            raise TaskError(f"percent={percent!r} is neither 'number' nor 'ratio'")
        self._answer, self._field = answer, field
        self._absolute, self._relative = _bound("tolerance", tolerance), _bound("relative", relative)
        self._ratio = percent == "ratio"

    def score(self, task: ScoreInput) -> Verdict:
        wanted = self._wanted(reference(task, self._answer, self._field))
        found = answered_number(task.answer, self._ratio)
        if found is None:
            return Verdict(0.0, "no number found", invalid_output=True)
        right = abs(found - wanted) <= self._absolute + self._relative * abs(wanted)
        return Verdict(1.0 if right else 0.0, None if right else f"answered {_short(found)}")

    def _wanted(self, given: Any) -> Fraction:
        if isinstance(given, bool) or not isinstance(given, (int, float, str)):
            raise TaskError(f"the reference {given!r} is not a number")
        found = answered_number(str(given), self._ratio)
        if found is None:
            raise TaskError(f"the reference {given!r} is not a number")
        return found


def _bound(name: str, value: float) -> Fraction:
    try:
        bound = Fraction(value)
    except (ValueError, OverflowError, TypeError):
        raise TaskError(f"{name}={value!r} is not a finite number") from None
    if bound < 0:
        raise TaskError(f"{name}={value!r} is negative")
    return bound


def _short(value: Fraction) -> str:
    try:
        return f"{float(value):.12g}"
    except OverflowError:
        return "a very large number"
