"""One stack that exports traces to a collector of the tests, writes every log line, and is asked for metrics."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollgrid import Client, Retries

from tests.integration.telemetry.collector import Collector, collector
from tests.support.services import SERVICES
from tests.support.stack import Stack, scripted, stack

TOKEN_RATE = 100.0


@pytest.fixture(scope="package")
def otlp() -> Iterator[Collector]:
    with collector() as found:
        yield found


@pytest.fixture(scope="package")
def pipe(otlp: Collector) -> Iterator[Stack]:
    """Killed services are started again by whoever killed them."""
    loud = {f"ROLLGRID_{service.upper()}_LOG_LEVEL": "DEBUG" for service in SERVICES}
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.endpoint,
        "ROLLGRID_TRACE_RATIO": "0",
        "ROLLGRID_LOG_LEVEL": "DEBUG",
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.5",
        **loud,
    }
    plan = scripted(samplers=2, token_rate=TOKEN_RATE, eos_rate=0.0, ack_wait_s=2.0, env=env)
    with stack(plan) as running:
        yield running


@pytest.fixture
def client(pipe: Stack) -> Iterator[Client]:
    with Client(pipe.url, retries=Retries(budget_s=60, outage_budget_s=60)) as connected:
        yield connected
