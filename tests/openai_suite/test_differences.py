"""The table of differences names tests that exist, and the reference page explains each of them."""

from __future__ import annotations

import ast
from pathlib import Path

from .differences import DIFFERENCES

SUITE = Path(__file__).parent
PAGE = SUITE.parents[1] / "docs" / "reference" / "compatibility.md"


def test_every_difference_is_a_test_of_the_suite() -> None:
    trees = [ast.parse(path.read_text()) for path in SUITE.glob("test_*.py")]
    names = {node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert {test for test, _ in DIFFERENCES} <= names


def test_the_reference_page_has_every_difference_and_no_other() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| `test_")]
    assert {line.split("`")[1] for line in lines} == {test for test, _ in DIFFERENCES}
