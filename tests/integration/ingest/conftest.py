"""Fixtures of ingest's tests."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2
import pytest

from tests.support.servers import SeaweedServer

from .door import Door, door


@pytest.fixture(scope="module")
def ingest(s3_server: SeaweedServer) -> Iterator[Door]:
    """One ingest for a module, without keys, samplers or ledger."""
    with door(s3_server) as running:
        yield running


@pytest.fixture
def http(ingest: Door) -> Iterator[httpx2.Client]:
    with ingest.client() as client:
        yield client
