"""One whole stack on real vLLM with a tiny float32 model, shared by the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx2
import pytest

from tests.support.stack import POLICY, Stack, stack, vllm
from tests.support.tiny_models import TinyModel, tiny_model

MODEL = TinyModel(context=2048)


class Door(NamedTuple):
    """A running stack, the folder of the weights behind it, and the policy's name."""

    stack: Stack
    model: Path
    policy: str


@pytest.fixture(scope="package")
def vllm_door() -> Iterator[Door]:
    with stack(vllm(slots=64, model=MODEL, env={"ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(192 * 2**20)})) as pipe:
        yield Door(pipe, tiny_model(MODEL), POLICY)


@pytest.fixture
def http(vllm_door: Door) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=vllm_door.stack.url, timeout=120) as client:
        yield client
