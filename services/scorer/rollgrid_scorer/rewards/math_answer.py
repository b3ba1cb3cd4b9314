"""`math`: 1 when what the model answered equals the reference as mathematics, by the math-verify package.

Its own time limits are alarms, which would end the wrong thing in a worker process that has a
deadline already: they are off.  An expression that takes for ever ends as `verifier_timeout`.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib.metadata import version as installed
from typing import Any, Literal

import msgspec
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

from .base import ScoreInput, TaskError, Verdict, reference, typed

_MARKS = ("$", "\\boxed", "\\(", "\\[")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`answer` (text or number, or a list of accepted ones; else `task[field]`); `extract` from the model's text
    `latex` and plain `expr`essions, or one of them; `digits` to which decimals are compared; `strict` keeps the
    names of variables and the difference of sets and tuples.
    """

    answer: str | float | list[str | float] | None = None
    field: str = "answer"
    extract: Literal["auto", "latex", "expr"] = "auto"
    digits: int = 6
    strict: bool = True


class MathAnswer:
    """See `Params`."""

    name = "math"
    version = f"1+math-verify-{installed('math-verify')}"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        if not 0 <= self._params.digits <= 100:
            raise TaskError(f"params.digits: {self._params.digits} is not within 0 to 100")

    def score(self, task: ScoreInput) -> Verdict:
        given = reference(task, self._params.answer, self._params.field)
        gold = [expression for one in (given if isinstance(given, list) else [given]) for expression in _gold_of(one)]
        if not gold:
            raise TaskError(f"params.answer: {given!r} holds no reference")
        try:
            found = parse(task.answer, _targets(self._params.extract), parsing_timeout=None, raise_on_error=True)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - sympy and the parser raise of everything
            return Verdict(0.0, f"unreadable: {type(error).__name__}", invalid_output=True)
        if not found:
            return Verdict(0.0, "no expression found", invalid_output=True)
        right = any(self._equal(wanted, one) for wanted in gold for one in found)
        return Verdict(1.0 if right else 0.0, None if right else f"answered {str(found[-1])[:100]}")

    def _equal(self, wanted: Any, found: Any) -> bool:
        digits, strict = self._params.digits, self._params.strict
        try:
            return bool(
                verify(wanted, found, digits, strict=strict, timeout_seconds=None, raise_on_error=True),
            )
        except (MemoryError, RecursionError):
            raise
        except Exception:  # noqa: BLE001 - sympy cannot compare the two: they are not known to be equal
            return False


def _targets(extract: str) -> list[Any]:
    kinds: dict[str, list[Any]] = {
        "auto": [LatexExtractionConfig(), ExprExtractionConfig()],
        "latex": [LatexExtractionConfig()],
        "expr": [ExprExtractionConfig()],
    }
    return kinds[extract]


def _gold_of(given: Any) -> tuple[Any, ...]:
    if isinstance(given, bool) or not isinstance(given, (str, int, float)):
        raise TaskError(f"the reference {given!r} is neither text nor a number")
    return _gold(str(given).strip())


@lru_cache(maxsize=1024)
def _gold(text: str) -> tuple[Any, ...]:
    """The reference, parsed as one whole expression; raises TaskError."""
    whole = text if any(mark in text for mark in _MARKS) else f"${text}$"
    for candidate in (whole, text):
        try:
            found = parse(candidate, parsing_timeout=None, fallback_mode="no_fallback", raise_on_error=True)
        except MemoryError:
            raise
        except Exception as error:
            raise TaskError(f"the reference {text!r} is unreadable: {type(error).__name__}") from error
        if found:
            return (*found, text)  # the text itself: for answers that are no mathematics, equal as text
    raise TaskError(f"the reference {text!r} holds no expression")
