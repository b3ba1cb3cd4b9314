"""How a measurement is printed and kept."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"


class Budget(NamedTuple):
    """A bound of the design (section 13) on one figure."""

    figure: str
    at_least: float | None = None
    at_most: float | None = None

    def verdict(self, value: float) -> str:
        """How the value stands to the bound, in words."""
        if self.at_least is not None:
            return f"{'meets' if value >= self.at_least else 'MISSES'} >= {self.at_least:g}"
        assert self.at_most is not None
        return f"{'meets' if value <= self.at_most else 'MISSES'} <= {self.at_most:g}"


class Result(NamedTuple):
    """`figures` by name; names that begin with `cpu_` are CPU seconds of one part."""

    name: str
    setting: dict[str, Any]
    figures: dict[str, float]
    budgets: tuple[Budget, ...] = ()


def print_result(result: Result) -> None:
    print(f"\n{result.name}   ({', '.join(f'{key} {value}' for key, value in result.setting.items())})")
    for key, value in result.figures.items():
        if not key.startswith("cpu_") or key.startswith("cpu_ms"):
            verdicts = [budget.verdict(value) for budget in result.budgets if budget.figure == key]
            print(f"  {key:28s} {value:12,.{3 if 'ratio' in key else 2}f}  {'; '.join(verdicts)}".rstrip())
    parts = {key[4:]: value for key, value in result.figures.items() if key.startswith("cpu_") and "_ms_" not in key}
    total = sum(parts.values())
    if total:
        print("  where the CPU time goes")
        for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
            print(f"    {name:26s} {seconds:8.2f} s {100 * seconds / total:5.1f} %")


def missed(result: Result) -> list[str]:
    """The budgets that this result does not keep, each with its value and setting."""
    found = []
    for budget in result.budgets:
        verdict = budget.verdict(result.figures[budget.figure])
        if verdict.startswith("MISSES"):
            setting = " ".join(str(value) for value in result.setting.values())
            value = result.figures[budget.figure]
            found.append(f"{result.name} ({setting}): {budget.figure} {value:.3f} {verdict}")
    return found


def save(result: Result) -> Path:
    RESULTS.mkdir(exist_ok=True)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path = RESULTS / f"{stamp}-{re.sub(r'[^a-z]+', '-', result.name)}.json"
    path.write_text(json.dumps(result._asdict(), indent=2) + "\n")
    return path
