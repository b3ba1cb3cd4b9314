"""Dashboard and alarms ask for metrics that exist, with labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "observability"
NAME = re.compile(r"\brollgrid_\w+")
GROUPED = re.compile(r"\bby \(([\w, ]+)\)")
OF_TARGETS = {"le", "instance", "service", "job"}
"""Labels that the scrape gives, and the bucket's."""


def documented() -> dict[str, set[str]]:
    """Labels by metric, as docs/reference/metrics.md has them."""
    rows = [line.split("|") for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines()]
    return {
        row[1].strip(" `"): set(filter(None, row[3].strip().split(", ")))
        for row in rows
        if len(row) > 3 and row[1].startswith(" `rollgrid_")
    }


def expressions() -> Iterator[str]:
    dashboard = json.loads((FOLDER / "grafana-dashboard.json").read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for rule in (FOLDER / "alarms.yml").read_text().split("- alert:")[1:]:
        yield rule.partition("expr:")[2].partition("labels:")[0].partition("for:")[0]


def base(name: str, known: dict[str, set[str]]) -> str:
    for ending in ("_bucket", "_count", "_sum"):
        if name not in known and name.endswith(ending):
            return name.removesuffix(ending)
    return name


@pytest.mark.parametrize("expression", list(expressions()))
def test_an_expression_names_metrics_and_labels_that_exist(expression: str) -> None:
    known = documented()
    names = {base(name, known) for name in NAME.findall(expression)}
    assert names <= known.keys(), names - known.keys()
    labels = {label for group in GROUPED.findall(expression) for label in group.split(", ")}
    allowed = OF_TARGETS.union(*(known[name] for name in names))
    assert labels <= allowed, labels - allowed


def test_every_service_is_scraped() -> None:
    text = (FOLDER / "prometheus.yml").read_text()
    assert all(name in text for name in ("ingest", "sampler", "scorer", "trajectory-logger", "checkpoint-sync"))


def test_panels_do_not_overlap_and_have_titles() -> None:
    panels = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
    seen: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & seen, panel["title"]
        seen |= cells
        assert panel["title"]
