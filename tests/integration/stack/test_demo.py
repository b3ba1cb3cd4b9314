"""`rollgrid demo`, with the scripted engine: the whole way, its report, and nothing left running."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rollgrid.stack.home import find_stack

from tests.integration.stack.stack_process import stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_the_demo_ends_with_figures_a_picture_and_parquet() -> None:
    with stack() as found:
        out = found.home.parent / "out"
        answer = found.run(
            "demo", "--engine", "scripted", "--tasks", "8", "-n", "4", "--out", str(out), "--json", timeout_s=250
        )
        assert answer.returncode == 0, answer.stderr
        figures = json.loads(answer.stdout)
        assert figures["samples"] == {"succeeded": 32}
        assert set(figures["datasets"]) == {"letter_counting", "count_bits", "gcd", "syllogism"}
        assert figures["tokens"] > 0
        assert "one trajectory in full" in answer.stderr
        assert Path(figures["picture"]).read_bytes().startswith(b"\x89PNG")
        rows = pq.read_table(out / "parquet").to_pylist()
        assert len({(row["group_id"], row["index"]) for row in rows}) == 32
        assert find_stack(out / "stack") is None
