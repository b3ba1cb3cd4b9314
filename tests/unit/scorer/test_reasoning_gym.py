"""The reasoning_gym verifier agrees with the package's own scoring, also after a trip over the wire."""

from __future__ import annotations

import json

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS
from rollgrid_contracts import codec
from rollgrid_scorer.rewards.base import ScoreInput, TaskError
from rollgrid_scorer.rewards.reasoning_gym import ReasoningGym

NAMES = sorted(set(DATASETS) - {"composite"})
UNSOLVED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""Their entries carry no single answer of full score."""


def task(name: str, text: str, entry: object, **more: object) -> ScoreInput:
    wired = codec.decode(codec.encode({"dataset": name, "entry": entry, **more}), dict)
    return ScoreInput(text=text, task=wired)


def score(name: str, text: str, entry: object, **params: object) -> float:
    return ReasoningGym(**params).score(task(name, text, entry)).value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name in NAMES if name.lstrip(".") not in UNSOLVED])
def test_every_dataset_accepts_its_own_answer_after_the_wire(name: str) -> None:
    entry = json.loads(json.dumps(reasoning_gym.create_dataset(name, size=1, seed=3)[0]))
    assert score(name, f"<answer>{entry['answer']}</answer>", entry) == 1.0


def test_values_equal_the_packages_own() -> None:
    for name in ("chain_sum", "leg_counting", "basic_arithmetic"):
        dataset = reasoning_gym.create_dataset(name, size=5, seed=1)
        for entry in dataset:
            for answer in (entry["answer"], f"{entry['answer']} ", "17", "no idea"):
                expected = dataset.score_answer(answer.strip(), entry)
                assert score(name, f"thinking…\n<answer>{answer}</answer>", entry) == expected


def test_extraction_modes() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1)[0]
    right = entry["answer"]
    assert score("chain_sum", f"Let me see.\n{right}", entry) == 1.0
    assert score("chain_sum", f"Let me see.\n{right}", entry, extract="whole") < 1.0
    assert score("chain_sum", right, entry, extract="whole") == 1.0
    verdict = ReasoningGym(extract="tags").score(task("chain_sum", right, entry))
    assert (verdict.value, verdict.invalid_output) == (0.0, True)


def test_text_the_dataset_cannot_parse_is_invalid_output() -> None:
    entry = reasoning_gym.create_dataset("prime_factorization", size=1, seed=1)[0]
    verdict = ReasoningGym().score(task("prime_factorization", "<answer>hello</answer>", entry))
    assert (verdict.value, verdict.invalid_output) == (0.0, True)
    assert "ValueError" in (verdict.detail or "")


def test_a_broken_entry_raises() -> None:
    with pytest.raises(Exception, match=r".+"):
        ReasoningGym().score(task("prime_factorization", "<answer>hello</answer>", {"answer": "x", "metadata": {}}))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"dataset": "chain_sum"},
        {"entry": {"answer": "1"}},
        {"dataset": "no_such", "entry": {}},
        {"dataset": "chain_sum", "entry": {}, "config": {"no_such": 1}},
        {"dataset": "chain_sum", "entry": {}, "config": [1]},
    ],
)
def test_a_task_that_lacks_something_raises(given: dict[str, object]) -> None:
    with pytest.raises(TaskError):
        ReasoningGym().score(ScoreInput(text="<answer>1</answer>", task=given))


def test_config_and_parameters_reach_the_dataset() -> None:
    entry = reasoning_gym.create_dataset("chain_sum", size=1, seed=1, min_terms=3)[0]
    text = f"<answer>{entry['answer']}</answer>"
    assert ReasoningGym().score(task("chain_sum", text, entry, config={"min_terms": 3})).value == 1.0
    verifier = ReasoningGym(dataset="chain_sum", config={"min_terms": 3})
    assert verifier.score(ScoreInput(text=text, task={"entry": dict(entry)})).value == 1.0
