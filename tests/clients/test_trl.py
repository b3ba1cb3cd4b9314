"""TRL's GRPOTrainer trains on rollouts of the fleet: `examples/trl_grpo.py`, and what must stop it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollgrid import Client

from tests.openai_suite.model import MODEL

from .conftest import Door

pytestmark = [pytest.mark.clients, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_grpo.py"
FAULTS = Path(__file__).with_name("tasks") / "trl_faults.py"
STEPS, SAMPLES, MARGIN, TOLERANCE = 25, 32, 0.4, 1e-4


@pytest.fixture(scope="module")
def base(door: Door) -> Iterator[Path]:
    """The folder of the base model; the policy runs its weights again afterwards."""
    yield door.model
    with Client(door.url) as client:
        client.weights.publish(MODEL, door.model).wait_live(timeout=60)


def test_trl_learns_on_rollouts_of_the_weights_of_each_step(
    door: Door, base: Path, run_client: Callable[..., str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    command = ["python", str(EXAMPLE), "--model", str(base), "--report", str(report), "--scratch", str(tmp_path)]
    print(run_client("trl", command, {"ROLLGRID_URL": door.url}).splitlines()[-2:])
    measured = json.loads(report.read_text())
    rewards = measured["rewards"]
    assert len(rewards) == STEPS
    assert sum(rewards[-3:]) / 3 - rewards[0] >= MARGIN

    # TRL's own forward pass under the weights of each step gives what the fleet says it sampled by
    assert len(measured["differences"]) == STEPS
    assert max(measured["differences"]) < TOLERANCE

    versions = measured["versions"]
    assert sorted(set(versions)) == versions
    records = door.samples("trl")
    assert all(record["status"] == "succeeded" and record["token_ids"] for record in records)
    spans = [[(span["version"], span["start"], span["end"]) for span in record["version_spans"]] for record in records]
    assert all(start == 0 and end == len(r["token_ids"]) for r, [(_, start, end)] in zip(records, spans, strict=True))
    assert Counter(version for [(version, _, _)] in spans) == dict.fromkeys(versions, SAMPLES)


def test_trl_stops_where_weights_or_samples_are_missing(
    door: Door, base: Path, run_client: Callable[..., str], tmp_path: Path
) -> None:
    command = ["python", str(FAULTS), str(base), str(tmp_path)]
    printed = run_client("trl", command, {"ROLLGRID_URL": door.url, "PYTHONPATH": str(EXAMPLE.parent)})
    unpublished, late = (json.loads(line) for line in printed.splitlines()[-2:])
    # the first step was sampled from what it trains; the second was not, and was not taken
    assert unpublished["error"] == "OffPolicy"
    assert unpublished["step"] == unpublished["steps_taken"] == 1
    assert unpublished["before"] < TOLERANCE < 1e-3 < unpublished["difference"]
    assert late["error"] == "RolloutsFailed"
    assert late["missing"] == late["rows"] == SAMPLES
    assert late["batches"] == 2
