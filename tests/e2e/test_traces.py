"""One real sample on real vLLM as one trace, from the door to the archive, by way of a trace file."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.e2e.conftest import Door
from tests.e2e.doors import rollouts, samples
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240)]

STEPS = ["POST /v1/rollouts", "render prompts", "publish jobs", "queue jobs", "sample group", "generate sample",
         "publish samples", "queue samples", "score samples", "verify exact_match", "publish scores", "close group",
         "queue trajectories", "archive group"]  # fmt: skip


def spans_of(file: Path, trace: str) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [span for span in map(json.loads, lines) if span["context"]["trace_id"] == f"0x{trace}"]


def test_one_real_sample_is_one_trace(vllm_door: Door, http: httpx2.Client) -> None:
    trace = secrets.token_hex(16)
    body = {
        "policy": vllm_door.policy, "run": "traced", "n": 1, "sampling": {"max_tokens": 12, "ignore_eos": True},
        "tasks": [{"prompt": "One sample, please", "task": {"answer": "x"}}], "scorers": ["exact_match"],
    }  # fmt: skip
    http.headers["traceparent"] = f"00-{trace}-{'c' * 16}-01"
    (group,) = rollouts(http, body)
    wait_until(
        lambda: {"archive group"} <= {span["name"] for span in spans_of(vllm_door.spans, trace)}, 60, "archived", 0.2
    )
    found = spans_of(vllm_door.spans, trace)
    posted = [span for span in found if not span["name"].startswith("GET ")]  # the reads of results were traced too
    assert sorted(span["name"] for span in posted) == sorted(STEPS)
    named = {span["name"]: span for span in posted}
    ids = {span["context"]["span_id"]: span["name"] for span in posted}
    assert ids[named["archive group"]["parent_id"]] == "close group"
    assert ids[named["close group"]["parent_id"]] == "publish scores"
    assert ids[named["score samples"]["parent_id"]] == "publish samples"
    generated = named["generate sample"]
    (token,) = generated["events"]
    assert token["name"] == "first_token"
    assert generated["start_time"] <= token["timestamp"] <= generated["end_time"]
    assert generated["attributes"]["gen_ai.usage.output_tokens"] == 12
    (sample,) = samples(group)
    assert generated["attributes"]["rollgrid.version"] == sample["version_spans"][0]["version"]
    order = ["publish jobs", "sample group", "generate sample", "score samples", "close group", "archive group"]
    starts = [named[name]["start_time"] for name in order]
    assert starts == sorted(starts)


def test_the_engines_own_metrics_are_beside_ours(vllm_door: Door) -> None:
    text = vllm_door.stack["sampler-0"].metrics()
    assert "vllm:generation_tokens_total{" in text
    assert "rollgrid_sampler_tokens_total " in text
