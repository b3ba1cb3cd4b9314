"""One stack for the tests of this folder that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollgrid import Client, Retries

from tests.support.stack import Stack, scripted, stack


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    """The scripted engine, fast; killed services are started again by whoever killed them."""
    with stack(scripted(samplers=1, slots=64)) as running:
        yield running


@pytest.fixture
def client(pipe: Stack) -> Iterator[Client]:
    with Client(pipe.url, retries=Retries(budget_s=60, outage_budget_s=60)) as connected:
        yield connected
