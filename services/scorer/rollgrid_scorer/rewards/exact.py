"""`exact_match`: 1 when the answer equals the reference as text, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from .base import ScoreInput, TaskError, Verdict, reference
from .extraction import extract, extract_mode


class ExactMatch:
    """Parameters: `answer` (text or list of accepted texts; else `task[field]`), `field`, `strip`,
    `casefold`, `extract` (whole | auto | tags | last_line).
    """

    name = "exact_match"
    version = "1"

    def __init__(
        self,
        *,
        answer: str | Sequence[str] | None = None,
        field: str = "answer",
        strip: bool = True,
        casefold: bool = False,
        extract: str = "whole",
    ) -> None:
        self._answer, self._field = answer, field
        self._strip, self._casefold = strip, casefold
        self._mode = extract_mode(extract)

    def score(self, task: ScoreInput) -> Verdict:
        accepted = reference(task, self._answer, self._field)
        if not isinstance(accepted, (list, tuple)):
            accepted = [accepted]
        if not accepted or any(isinstance(item, (dict, list, tuple)) or item is None for item in accepted):
            raise TaskError(f"{self._field!r} must be a text or a list of texts")
        found = task.answer if self._mode == "whole" else extract(task.answer, self._mode)
        if found is None:
            return Verdict(0.0, "no answer found", invalid_output=True)
        right = self._normal(found) in {self._normal(str(item)) for item in accepted}
        return Verdict(1.0 if right else 0.0)

    def _normal(self, text: str) -> str:
        if self._strip:
            text = text.strip()
        return text.casefold() if self._casefold else text
