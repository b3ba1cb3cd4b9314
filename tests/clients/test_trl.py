"""TRL's GRPOTrainer trains on rollouts of the fleet: `examples/trl_grpo.py`, and what must stop it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollgrid import Client

from tests.openai_suite.model import MODEL

from .conftest import Door, run_in

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = Path(__file__).with_name("tasks") / "trl_trainings.py"
STEPS, SAMPLES, MARGIN, TOLERANCE = 25, 32, 0.4, 1e-4


@pytest.fixture(scope="module")
def trainings(door: Door, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the program measured; the policy runs its base model again afterwards."""
    folder = tmp_path_factory.mktemp("trl")
    command = ["python", str(PROGRAM), "--model", str(door.model), "--report", "report.json", "--scratch", "scratch"]
    env = {"ROLLGRID_URL": door.url, "PYTHONPATH": str(EXAMPLES)}
    others = run_in(folder, "trl", command, env).splitlines()[-1]
    yield {"example": json.loads((folder / "report.json").read_text()), **json.loads(others)}
    with Client(door.url) as client:
        client.weights.publish(MODEL, door.model).wait_live(timeout=60)


def test_trl_learns_on_rollouts_of_each_steps_weights(door: Door, trainings: dict[str, Any]) -> None:
    measured = trainings["example"]
    rewards = measured["rewards"]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 - rewards[0] >= MARGIN

    # TRL's own forward pass under each step's weights gives what the fleet says it sampled by
    assert len(measured["differences"]) == STEPS
    assert max(measured["differences"]) < TOLERANCE

    versions = measured["versions"]
    assert sorted(set(versions)) == versions
    records = door.samples("trl")
    assert all(record["status"] == "succeeded" and record["token_ids"] for record in records)
    spans = [[(span["version"], span["start"], span["end"]) for span in record["version_spans"]] for record in records]
    assert all(start == 0 and end == len(r["token_ids"]) for r, [(_, start, end)] in zip(records, spans, strict=True))
    assert Counter(version for [(version, _, _)] in spans) == dict.fromkeys(versions, SAMPLES)


def test_trl_stops_at_the_first_step_whose_weights_were_not_published(trainings: dict[str, Any]) -> None:
    stopped = trainings["unpublished"]
    assert stopped["error"] == "OffPolicy"
    assert stopped["before"] < TOLERANCE < 1e-3 < stopped["difference"]
    assert stopped["step"] == stopped["steps_taken"] == 1


def test_trl_stops_when_no_samples_come_in_time(trainings: dict[str, Any]) -> None:
    stopped = trainings["late"]
    assert stopped["error"] == "RolloutsFailed"
    assert stopped["missing"] == stopped["rows"] == SAMPLES
    assert stopped["batches"] == 2


def test_trl_stops_when_its_weights_are_refused(trainings: dict[str, Any]) -> None:
    stopped = trainings["refused"]
    assert stopped["error"] == "VersionRefused"
    assert "dtype BF16, not F32" in stopped["said"]


def test_trl_trains_lora_on_rollouts_of_each_steps_adapter(door: Door, trainings: dict[str, Any]) -> None:
    measured = trainings["lora"]
    assert measured["kinds"] == [["lora", measured["base"], step] for step in range(4)]
    assert len(measured["differences"]) == 4
    assert max(measured["differences"]) < TOLERANCE
    sampled = Counter(span["version"] for record in door.samples("trl-lora") for span in record["version_spans"])
    assert sorted(sampled.values()) == [SAMPLES] * 4
