"""The tasks of `rollgrid demo`: easy ones of reasoning_gym that a model of 135 million parameters sometimes solves.

Two solved examples stand before each question, so that the model marks its result as the scorer
looks for it.
"""

from __future__ import annotations

from typing import Any

from rollgrid.errors import ConfigurationError

DATASETS: dict[str, dict[str, Any]] = {
    "letter_counting": {"min_words": 1, "max_words": 2},
    "count_bits": {"max_n": 16},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 12},
    "syllogism": {},
}
ANSWER = "Let me see. The answer to this question is <answer>{}</answer>"
SHOTS = 2
SHOT_SEED = 1000


def demo_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """`count` tasks, the datasets in turn.  Raises ConfigurationError without reasoning_gym."""
    try:
        import reasoning_gym
    except ModuleNotFoundError as error:
        raise ConfigurationError("the demo's tasks come from reasoning_gym: make setup") from error
    per_dataset = -(-count // len(DATASETS))
    columns = []
    for name, config in DATASETS.items():
        examples = _entries(reasoning_gym, name, SHOTS, SHOT_SEED, config)
        shots = [message for entry in examples for message in _turn(entry)]
        entries = _entries(reasoning_gym, name, per_dataset, seed, config)
        columns.append([_task(name, config, entry, shots) for entry in entries])
    return [task for row in zip(*columns, strict=True) for task in row][:count]


def _entries(package: Any, name: str, size: int, seed: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    dataset = package.create_dataset(name, size=size, seed=seed, **config)
    return [dataset[index] for index in range(size)]


def _turn(entry: dict[str, Any]) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": entry["question"].strip()},
        {"role": "assistant", "content": ANSWER.format(entry["answer"].strip())},
    ]


def _task(name: str, config: dict[str, Any], entry: dict[str, Any], shots: list[dict[str, str]]) -> dict[str, Any]:
    question = {"role": "user", "content": entry["question"].strip()}
    return {
        "messages": [*shots, question],
        "task": {"dataset": name, "config": config, "entry": entry},
        "metadata": {"dataset": name},
    }
