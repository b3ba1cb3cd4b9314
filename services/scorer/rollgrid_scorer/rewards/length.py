"""`length`: 1 while the answer is as long as asked for, falling in a straight line to 0 beyond the bounds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from .base import ScoreInput, TaskError, Verdict, typed

Count = Annotated[int, msgspec.Meta(ge=0)]


class Params(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`min` and `max` (at least one), counted in `unit`s; `ramp` units beyond a bound the value has fallen to 0
    (0 = at once).  Tokens are those sampled, reasoning included; characters those of the answer behind it, unless
    `on` is text.
    """

    min: Count | None = None
    max: Count | None = None
    unit: Literal["tokens", "characters"] = "tokens"
    ramp: Count = 0
    on: Literal["answer", "text"] = "answer"


class Length:
    """See `Params`."""

    name = "length"
    version = "1"

    def __init__(self, **params: Any) -> None:
        self._params = typed(Params, params)
        low, high = self._params.min, self._params.max
        if low is None and high is None:
            raise TaskError("params.max: neither it nor params.min is given")
        if low is not None and high is not None and low > high:
            raise TaskError(f"params.min: {low} is over params.max={high}")

    def score(self, task: ScoreInput) -> Verdict:
        text = task.text if self._params.on == "text" else task.answer
        length = task.tokens if self._params.unit == "tokens" else len(text)
        low, high = self._params.min, self._params.max
        beyond = max(0 if low is None else low - length, 0 if high is None else length - high, 0)
        if not beyond:
            return Verdict(1.0)
        value = max(0.0, 1.0 - beyond / self._params.ramp) if self._params.ramp else 0.0
        return Verdict(value, f"{length} {self._params.unit}")
