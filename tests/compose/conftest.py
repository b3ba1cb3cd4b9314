"""One engine and one project for the package; the phases' durations are printed at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .engine import Engine, NoEngine, engine
from .project import Project

# It builds images and needs an engine: only where it is asked for.
collect_ignore = [] if os.environ.get("ROLLGRID_COMPOSE") else ["test_stack.py"]


@pytest.fixture(scope="package")
def docker(pytestconfig: pytest.Config) -> Iterator[Engine]:
    started = time.monotonic()
    try:
        with engine() as found:
            _say(pytestconfig, f"Docker {found.version}, {'started for this test' if found.own else 'of this machine'}")
            _say(pytestconfig, f"engine and base images: {time.monotonic() - started:.1f} s")
            yield found
    except NoEngine as why:
        pytest.skip(f"the compose stack was not brought up: {why}")


@pytest.fixture(scope="package")
def project(docker: Engine, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Project]:
    """Built, up and healthy."""
    found = Project(docker, _folder(tmp_path_factory))
    try:
        found.build()
        try:
            found.up()
        except RuntimeError as error:
            raise AssertionError(f"{error}\n{found.logs()}") from error
        yield found
    finally:
        found.down()
        for phase, seconds in found.phases.items():
            _say(pytestconfig, f"compose {phase}: {seconds:.1f} s")


def _folder(factory: pytest.TempPathFactory) -> Path:
    return factory.mktemp("compose")


def _say(config: pytest.Config, text: str) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.ensure_newline()
        reporter.write_line(text)
