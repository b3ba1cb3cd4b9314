"""Fixtures of the sampler's tests."""

from __future__ import annotations

import pytest
from rollgrid_runtime.bus import Bus

from .stage import Stage


@pytest.fixture
def stage(bus: Bus) -> Stage:
    return Stage(bus)
