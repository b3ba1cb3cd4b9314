"""One stack for the whole package: two replicas of ingest, three samplers with names of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, scripted, stack
from tests.support.tiny_models import TinyModel

NAMES = {f"sampler-{number}": f"w{number}" for number in range(3)}
"""Processes, and the workers that they are, also when they come back."""


@pytest.fixture(scope="package")
def pipe() -> Iterator[Stack]:
    plan = scripted(samplers=3, slots=4, token_rate=200.0, model=TinyModel(context=2048))
    names = {process: {"ROLLGRID_SAMPLER_INSTANCE": name} for process, name in NAMES.items()}
    with stack(plan._replace(ingests=2, service_env=names)) as running:
        yield running
