"""The lanes of scripts/test.sh: processes side by side that share the tests, so that none is idle while another works.

`pytest -p tests.lanes --lane=faults --claims=FOLDER`.  A lane runs the tests that are its alone (the engine's, those that
kill servers and cut the power), then takes from those that are anybody's, a module or a folder with a package-scoped
fixture at a time: whoever makes the file in FOLDER has it.  Each test runs in exactly one lane.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

OWN = {"engine": frozenset({"vllm", "clients"}), "faults": frozenset({"chaos", "power"}), "others": frozenset[str]()}
"""Marks of the tests that only this lane runs; the engine's come first where a test has both."""
ANYBODYS = "others"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes")
    group.addoption("--lane", choices=sorted(OWN), required=True, help="which of the processes this is")
    group.addoption(
        "--claims", type=Path, required=True, help="a folder that all lanes of this run share, empty at first"
    )


def lane_of(item: pytest.Item) -> str:
    marks = {mark.name for mark in item.iter_markers()}
    return next((lane for lane, own in OWN.items() if own & marks), ANYBODYS)


@functools.cache
def unit_of(module: Path) -> Path:
    """What one lane runs as a whole, so that its fixtures are made once."""
    conftest = module.parent / "conftest.py"
    return module.parent if conftest.exists() and 'scope="package"' in conftest.read_text() else module


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lane = config.getoption("--lane")
    own = [item for item in items if lane_of(item) == lane != ANYBODYS]
    shared = [item for item in items if lane_of(item) == ANYBODYS]
    config.hook.pytest_deselected(items=[item for item in items if lane_of(item) not in (lane, ANYBODYS)])
    shared.sort(key=lambda item: unit_of(item.path) == item.path)  # folders first: what is begun last should be short
    items[:] = own + shared


def claimed(items: list[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """The lane's own, then those of each unit that it is the first to ask for."""

    @functools.cache
    def is_ours(unit: Path) -> bool:
        try:
            (folder / hashlib.sha256(bytes(unit)).hexdigest()).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    return (item for item in items if lane_of(item) != ANYBODYS or is_ours(unit_of(item.path)))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """As pytest's own loop, over what is claimed meanwhile."""
    if session.testsfailed or session.config.getoption("collectonly"):
        return None  # errors of the collection are pytest's own affair
    mine = claimed(session.items, session.config.getoption("--claims"))
    item = next(mine, None)
    while item is not None:
        following = next(mine, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
    return True
