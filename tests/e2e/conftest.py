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
    """A running stack, the folder of the weights behind it, the policy's name, and where spans are written."""

    stack: Stack
    model: Path
    policy: str
    spans: Path


@pytest.fixture(scope="package")
def vllm_door(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    spans = tmp_path_factory.mktemp("traces") / "spans.jsonl"
    env = {"ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(192 * 2**20), "ROLLGRID_TRACE_FILE": str(spans)}
    with stack(vllm(slots=64, model=MODEL, env=env)) as pipe:
        yield Door(pipe, tiny_model(MODEL), POLICY, spans)


@pytest.fixture
def http(vllm_door: Door) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=vllm_door.stack.url, timeout=120) as client:
        yield client
