"""Fixtures: real servers for every test that asks for one, and typed connections to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from hypothesis import settings
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import provision
from rollgrid_runtime.settings import NatsSettings, S3Settings

from tests.support.servers import (
    NatsServer,
    SeaweedServer,
    ValkeyServer,
    nats_server,
    new_bucket,
    seaweed_server,
    valkey_server,
)

settings.register_profile("rollgrid", deadline=None)  # what an example takes says more of the machine than of the code
settings.load_profile("rollgrid")


@pytest.fixture
def nats() -> Iterator[NatsServer]:
    """An empty nats-server of this test's own (about 20 ms)."""
    with nats_server() as server:
        yield server


@pytest.fixture
def nats_settings(nats: NatsServer) -> NatsSettings:
    return nats.settings()


@pytest.fixture
def valkey() -> Iterator[ValkeyServer]:
    with valkey_server() as server:
        yield server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """One SeaweedFS for the session; do not kill or pause it (make your own for that)."""
    with seaweed_server() as server:
        yield server


@pytest.fixture
def s3(s3_server: SeaweedServer) -> S3Settings:
    """Settings with a bucket of this test's own (made by whoever first needs it)."""
    return s3_server.settings(new_bucket())


@pytest.fixture
async def blobs(s3: S3Settings) -> AsyncIterator[Blobs]:
    store = Blobs(s3)
    await store.ensure_bucket()
    yield store
    store.close()


@pytest.fixture
async def bus(nats_settings: NatsSettings, blobs: Blobs) -> AsyncIterator[Bus]:
    """Connected, provisioned, with S3 for claim checks."""
    connection = await Bus.connect(nats_settings, "test", blobs)
    await provision(connection)
    yield connection
    await connection.close()


@pytest.fixture
def stack_env(nats: NatsServer, valkey: ValkeyServer, s3_server: SeaweedServer, s3: S3Settings) -> dict[str, str]:
    """The environment under which a service finds this test's servers."""
    return {**nats.env(), **valkey.env(), **s3_server.env(s3.bucket)}
