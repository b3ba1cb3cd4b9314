"""A driver on this test's own servers."""

from __future__ import annotations

import pytest
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus

from .driver import Driver


@pytest.fixture
async def driver(bus: Bus, blobs: Blobs) -> Driver:
    made = Driver(bus, blobs)
    await made.open_lane()
    return made
