"""Names of verifiers → factories: the built-in ones, installed ones, and those named in the settings.

An installed distribution offers its own through the entry-point group `rollgrid.verifiers`
(`name = "module:factory"`).  A deployment without a distribution names them in
`ROLLGRID_SCORER_VERIFIERS`.  Nothing is imported until a worker process needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import entry_points
from typing import Any

from .rewards.base import TaskError, Verifier

GROUP = "rollgrid.verifiers"
BUILT_IN = {
    "exact_match": "rollgrid_scorer.rewards.exact:ExactMatch",
    "format": "rollgrid_scorer.rewards.format:Format",
    "json_schema": "rollgrid_scorer.rewards.json_schema:JsonSchema",
    "length": "rollgrid_scorer.rewards.length:Length",
    "math": "rollgrid_scorer.rewards.math_answer:MathAnswer",
    "multiple_choice": "rollgrid_scorer.rewards.multiple_choice:MultipleChoice",
    "numeric": "rollgrid_scorer.rewards.numeric:Numeric",
    "regex": "rollgrid_scorer.rewards.regular_expression:Regex",
    "reasoning_gym": "rollgrid_scorer.rewards.reasoning_gym:ReasoningGym",
}


def parse_reference(text: str) -> tuple[str, str]:
    """(name, "module:attr") of `name=module:attr`, or of `module:attr`, whose name is then `attr`.

    Raises ValueError for anything else.
    """
    name, separator, target = text.strip().rpartition("=")
    module, colon, attr = target.strip().partition(":")
    if not colon or not module or not attr or (separator and not name.strip()):
        raise ValueError(f"verifier {text!r} is not of the form name=module:attr")
    return (name.strip() or attr), f"{module}:{attr}"


class Registry:
    """Every known verifier by name.  Raises ValueError when two sources claim one name."""

    def __init__(self, extra: Iterable[str] = ()) -> None:
        self._targets: dict[str, str] = dict(BUILT_IN)
        for point in entry_points(group=GROUP):
            self._add(point.name, point.value)
        for text in extra:
            self._add(*parse_reference(text))

    def _add(self, name: str, target: str) -> None:
        if self._targets.get(name, target) != target:
            raise ValueError(f"verifier {name!r} is both {self._targets[name]} and {target}")
        self._targets[name] = target

    def __contains__(self, name: str) -> bool:
        return name in self._targets

    @property
    def names(self) -> list[str]:
        return sorted(self._targets)

    def make(self, name: str, params: Mapping[str, Any]) -> Verifier:
        """Import the factory and call it with `params`.

        Raises TaskError for an unknown name and whatever the import or the factory raises.
        """
        target = self._targets.get(name)
        if target is None:
            raise TaskError(f"no verifier is named {name!r}; known: {', '.join(self.names)}")
        module, _, attr = target.partition(":")
        found: Any = importlib.import_module(module)
        for part in attr.split("."):
            found = getattr(found, part)
        factory: Callable[..., Verifier] = found
        return factory(**params)
