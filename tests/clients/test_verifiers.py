"""verifiers' evaluation client (streamed chats) and training client (token level), unmodified.

The harness is its `null` one: a program that `uv` runs, which talks to the rollout's interception
server, which talks to ingest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import MODEL_ID, Door

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
TASKS = Path(__file__).with_name("tasks")
EPISODES = 3 * 2
ROUNDING = 1e-4
"""traces.jsonl has logprobs to four decimals."""


def evaluated(door: Door, run_client: Callable[..., str], folder: Path, kind: str, *more: str) -> list[dict[str, Any]]:
    """The traces of `vf-eval` over the taskset."""
    command = ["vf-eval", "letters-v1", "--model", MODEL_ID, "--num-rollouts", "2"]
    command += ["--env.agent.harness.id", "null", "--env.agent.runtime.type", "subprocess"]
    command += [
        "--client.type",
        kind,
        "--client.base-url",
        f"{door.url}/v1",
        "--client.api-key-var",
        "ROLLGRID_API_KEY",
    ]
    command += ["--sampling.max-tokens", "16", "--sampling.temperature", "1.0"]
    command += ["--output-dir", str(folder), "--run.name", kind, "--no-push", *more]
    env = {"ROLLGRID_API_KEY": "any", "PYTHONPATH": str(TASKS), "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
    run_client("verifiers", command, env)
    lines = (folder / kind / "traces.jsonl").read_text().splitlines()
    assert len(lines) == EPISODES
    traces = []
    for line in lines:
        episode = json.loads(line)
        (trace,) = episode["traces"]
        assert episode["ok"] is True, (episode["errors"], trace["errors"])
        assert 0 <= trace["rewards"]["letters"]["score"] <= 1
        assert trace["metrics"]["length"] > 0
        traces.append(trace)
    return traces


def test_verifiers_evaluation_client(door: Door, run_client: Callable[..., str], tmp_path: Path) -> None:
    before = len(door.samples())
    traces = evaluated(door, run_client, tmp_path, "eval")
    records = door.samples()[before:]
    assert len(records) == EPISODES
    counted = sorted((trace["num_input_tokens"], trace["num_output_tokens"]) for trace in traces)
    assert counted == sorted((len(record["prompt"]), len(record["token_ids"])) for record in records)


def test_verifiers_training_client(door: Door, run_client: Callable[..., str], tmp_path: Path) -> None:
    before = len(door.samples())
    traces = evaluated(door, run_client, tmp_path, "train", "--client.renderer-model-name", str(door.model))
    records = {tuple(record["token_ids"]): record for record in door.samples()[before:]}
    assert len(records) == EPISODES
    for trace in traces:
        (sampled,) = [node for node in trace["nodes"] if node["sampled"]]
        trained = [token for token, own in zip(sampled["token_ids"], sampled["mask"], strict=True) if own]
        record = records.pop(tuple(trained))
        assert sampled["logprobs"] == pytest.approx(record["logprobs"], abs=ROUNDING)
        before_it = [token for node in trace["nodes"] if not node["sampled"] for token in node["token_ids"]]
        prefix = [token for token, own in zip(sampled["token_ids"], sampled["mask"], strict=True) if not own]
        assert record["prompt"][: len(before_it)] == before_it
        assert set(prefix) <= set(record["prompt"])
    assert not records
