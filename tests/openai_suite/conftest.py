"""Every test runs on both endpoints, one after the other; each is started once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
from openai import AsyncOpenAI, OpenAI

from .differences import DIFFERENCES
from .endpoints import PLAIN, ROLLGRID, Endpoint
from .endpoints import endpoint as started

BOTH = (PLAIN, ROLLGRID)
REQUEST_S = 60.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A module's `ENDPOINTS` says where its tests can run; the default is everywhere."""
    if "endpoint" not in metafunc.fixturenames:
        return
    names = getattr(metafunc.module, "ENDPOINTS", BOTH)
    own = metafunc.function.__name__
    marked = [
        pytest.param(
            name,
            marks=[pytest.mark.xfail(strict=True, reason=DIFFERENCES[own, name])] if (own, name) in DIFFERENCES else [],
        )
        for name in names
    ]
    metafunc.parametrize("endpoint", marked, indirect=True, scope="package", ids=names)


@pytest.fixture(scope="package")
def endpoint(request: pytest.FixtureRequest) -> Iterator[Endpoint]:
    with started(request.param) as running:
        yield running


@pytest.fixture
def client(endpoint: Endpoint) -> Iterator[OpenAI]:
    """The SDK as everybody uses it, but without retries: a test sees the first answer."""
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, max_retries=0, timeout=REQUEST_S) as found:
        yield found


@pytest.fixture
async def aclient(endpoint: Endpoint) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.key, max_retries=0, timeout=REQUEST_S) as it:
        yield it
