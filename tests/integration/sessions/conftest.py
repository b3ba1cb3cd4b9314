"""One stack with two tenants for all tests of the doors of sessions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.servers import SeaweedServer
from tests.support.stack import Stack, scripted, stack
from tests.support.tiny_models import TinyModel

from .door import KEYS
from .store_stage import Grid, grid


@pytest.fixture(scope="package")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant} for tenant, key in KEYS.items()
    ]
    keys.write_text(json.dumps(entries))
    plan = scripted(samplers=2, eos_rate=0.1, token_rate=400.0, model=TinyModel(context=2048))
    with stack(plan._replace(service_env={"ingest": {"ROLLGRID_INGEST_KEYS_FILE": str(keys)}})) as running:
        yield running


@pytest.fixture(scope="package")
def made(s3_server: SeaweedServer) -> Iterator[Grid]:
    """A ledger on servers of its own, for the tests of the store."""
    with grid(s3_server) as running:
        yield running
