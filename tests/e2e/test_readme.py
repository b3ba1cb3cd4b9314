"""The README's client code runs as it stands (A08, A21)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import scripted, stack

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_code_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert found
    names: dict[str, Any] = {}
    with stack(scripted(samplers=1)) as pipe:
        monkeypatch.setenv("ROLLGRID_URL", pipe.url)
        monkeypatch.chdir(tmp_path)
        for _ in range(2):  # the second time as after a crash
            names.clear()
            exec(compile(found.group(1), str(README), "exec"), names)
    assert names["arrays"]["completion_ids"].shape[0] == names["advantages"].shape[0] == 16 * 8
    assert len(README.read_text().splitlines()) <= 150
