"""One server with accounts for the attacks: each test looks at the whole of it afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from pydantic import SecretStr
from rollgrid_contracts import topology
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import ensure_consumer, provision
from rollgrid_runtime.settings import NatsSettings

from tests.support.servers import scratch

from .accounts import ACME, BOLT, AccountsServer


@pytest.fixture(scope="module")
def server() -> Iterator[AccountsServer]:
    limits = {"max_connections": 4, "max_subscriptions": 8, "max_payload": 64 * 1024}
    with scratch("accounts") as folder, AccountsServer(folder, **limits) as running:
        yield running.start().wait_ready(10)


@pytest.fixture
async def operator(server: AccountsServer) -> AsyncIterator[Bus]:
    settings = NatsSettings(url=server.url, user=server.user, password=SecretStr(server.password))
    bus = await Bus.connect(settings, "operator")
    await provision(bus)
    for tenant in (ACME, BOLT):
        for name in ("default", "eval"):
            await ensure_consumer(bus, topology.tenant_consumer(tenant, name))
    yield bus
    await bus.close()
