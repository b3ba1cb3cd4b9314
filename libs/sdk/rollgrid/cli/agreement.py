"""Old verdicts against new ones: counts by status, means beside their nulls, the samples that changed.  Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rollgrid_contracts.scoring import Score

KEPT_CHANGES = 1000
ABSENT = "absent"


@dataclass(slots=True)
class Side:
    """One of the two: statuses and the mean of its numbers."""

    statuses: Counter[str] = field(default_factory=Counter)
    versions: set[str] = field(default_factory=set)
    total: float = 0.0
    numbers: int = 0

    def add(self, score: Score | None) -> None:
        self.statuses[ABSENT if score is None else score.status.value] += 1
        if score is not None:
            self.versions.add(score.version)
            if score.value is not None:
                self.total += score.value
                self.numbers += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.numbers if self.numbers else None

    @property
    def nulls(self) -> int:
        return sum(self.statuses.values()) - self.numbers

    def to_dict(self) -> dict[str, Any]:
        return {
            "mean": self.mean,
            "numbers": self.numbers,
            "nulls": self.nulls,
            "statuses": dict(sorted(self.statuses.items())),
            "versions": sorted(self.versions),
        }


@dataclass(slots=True)
class Agreement:
    """Of one scorer.  A sample agrees when status, value and turn values are the same; one that was never
    scored by it (`absent`) is compared with nothing.
    """

    scorer: str
    old: Side = field(default_factory=Side)
    new: Side = field(default_factory=Side)
    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    changes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def changed(self) -> int:
        return self.compared - self.equal

    def add(self, group_id: str, index: int, old: Score | None, new: Score) -> dict[str, Any] | None:
        """Count one sample; what changed about it, or None."""
        self.old.add(old)
        self.new.add(new)
        if old is None:
            return None
        self.compared += 1
        if (old.status, old.value, old.turn_values) == (new.status, new.value, new.turn_values):
            self.equal += 1
            return None
        if old.value is not None and new.value is not None:
            self.largest = max(self.largest, abs(new.value - old.value))
        change = {"scorer": self.scorer, "group_id": group_id, "index": index, "old": _brief(old), "new": _brief(new)}
        if len(self.changes) < KEPT_CHANGES:
            self.changes.append(change)
        return change

    def to_dict(self) -> dict[str, Any]:
        return {
            "scorer": self.scorer,
            "samples": sum(self.new.statuses.values()),
            "compared": self.compared,
            "equal": self.equal,
            "changed": self.changed,
            "largest_difference": self.largest,
            "old": self.old.to_dict(),
            "new": self.new.to_dict(),
        }


def _brief(score: Score) -> dict[str, Any]:
    brief: dict[str, Any] = {"status": score.status.value, "value": score.value}
    if score.turn_values:
        brief["turn_values"] = list(score.turn_values)
    if score.detail is not None:
        brief["detail"] = score.detail
    return brief
