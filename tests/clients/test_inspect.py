"""Inspect evaluates a policy behind ingest by its `openai-api/` provider, with nothing of ours installed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import MODEL_ID, Door

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = Path(__file__).with_name("tasks")
SAMPLES = 4 * 2


def test_inspect_evaluates_through_the_chat_door(door: Door, run_client: Callable[..., str], tmp_path: Path) -> None:
    before = len(door.samples())
    shutil.copy(TASKS / "inspect_sums.py", tmp_path)  # it wants a relative path
    command = ["inspect", "eval", "inspect_sums.py", "--model", f"openai-api/rollgrid/{MODEL_ID}"]
    command += ["--log-dir", str(tmp_path / "logs"), "--log-format", "json", "--display", "plain"]
    run_client("inspect", command, {"ROLLGRID_BASE_URL": f"{door.url}/v1", "ROLLGRID_API_KEY": "any"})
    (log,) = [json.loads(path.read_text()) for path in (tmp_path / "logs").glob("*.json")]
    assert log["status"] == "success"
    assert log["results"]["completed_samples"] == log["results"]["total_samples"] == SAMPLES
    assert {score["name"] for score in log["results"]["scores"]} == {"includes", "match"}

    records = door.samples()[before:]
    assert len(records) == SAMPLES
    assert all(record["status"] == "succeeded" for record in records)
    (usage,) = log["stats"]["model_usage"].values()
    assert usage["input_tokens"] == sum(len(record["prompt"]) for record in records)
    assert usage["output_tokens"] == sum(len(record["token_ids"]) for record in records)
    counted = []
    for sample in log["samples"]:
        assert set(sample["scores"]) == {"includes", "match"}
        (choice,) = sample["output"]["choices"]
        content = choice["logprobs"]["content"]
        assert len(content) == sample["output"]["usage"]["output_tokens"]
        assert all(len(entry["top_logprobs"]) >= 2 for entry in content)
        counted.append([entry["logprob"] for entry in content])
    for ours, theirs in zip(sorted(record["logprobs"] for record in records), sorted(counted), strict=True):
        assert theirs == pytest.approx(ours, abs=1e-6)
