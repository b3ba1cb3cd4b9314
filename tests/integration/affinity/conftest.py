"""Stacks for the whole package: two replicas of ingest with three scripted samplers, and two samplers with real vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack, scripted, stack, vllm
from tests.support.tiny_models import TinyModel

NAMES = {f"sampler-{number}": f"w{number}" for number in range(3)}
"""Processes, and the workers that they are, also when they come back."""

ENGINES_MODEL = TinyModel(context=8192)
BLOCK = 32
"""Tokens per KV block of the engines."""


@pytest.fixture(scope="package")
def pipe() -> Iterator[Stack]:
    plan = scripted(samplers=3, slots=4, token_rate=200.0, model=TinyModel(context=2048))
    names = {process: {"ROLLGRID_SAMPLER_INSTANCE": name} for process, name in NAMES.items()}
    with stack(plan._replace(ingests=2, service_env=names)) as running:
        yield running


@pytest.fixture(scope="package")
def engines() -> Iterator[Stack]:
    """Workers named after their processes; what one that died held is delivered again soon."""
    env = {"ROLLGRID_SAMPLER_BLOCK_SIZE": str(BLOCK)}
    names = {name: {"ROLLGRID_SAMPLER_INSTANCE": name} for name in ("sampler-0", "sampler-1")}
    plan = vllm(slots=4, samplers=2, scorers=0, ack_wait_s=4.0, model=ENGINES_MODEL, env=env, service_env=names)
    with stack(plan, start=False) as running:
        running.start_servers()
        for service in running.services.values():  # one engine after the other: two at once take longer than both
            service.start().wait_ready(240)
        yield running
