"""Tasks of reasoning_gym in two parts that never share a question: one to train on, one to examine.

Which part a question belongs to follows from the question alone (its digest), and the two parts are
drawn with different seeds on top.  So the split holds whoever draws, however often.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import reasoning_gym

DATASET = "number_sorting"
CONFIG = {
    "min_numbers": 5, "max_numbers": 5, "min_value": 0, "max_value": 9, "min_decimals": 0, "max_decimals": 0,
}  # fmt: skip
"""Five numbers from 0 to 9, up or down: 200,000 questions.

The reward is 1 or 0: a well-formed list in order, each number within 1 of the true one.
"""
PHRASES = (
    "Sort these numbers in ascending order: ", "Sort these numbers in descending order: ", ".0, ", "['", ".0', '", ".0']",
)  # fmt: skip
"""What every question and answer is made of, beside digits and the instructions at the end of the question."""
HELD_OUT_TENTHS = 2
"""Of ten questions, two are for the examination only."""
TRAIN_SEED, HELD_OUT_SEED = 1_000_000_000, 2_000_000_000
"""Far apart: the dataset draws its i-th question with `seed + i`."""
RUN_STRIDE = 1_000_000
"""Questions that one run of the trainer may draw before it meets those of the next."""
SCORER = {"type": "reasoning_gym", "params": {"extract": "whole"}}
"""The reward: reasoning_gym's own scoring function, run by rollgrid's scorer on the whole output."""


class Task(NamedTuple):
    """A question, its answer, and the dataset's entry that the scorer needs."""

    question: str
    answer: str
    entry: dict[str, Any]

    @property
    def prompt(self) -> str:
        return self.question

    @property
    def payload(self) -> dict[str, Any]:
        """What rollgrid's scorer `reasoning_gym` wants to know of a task."""
        return {"dataset": DATASET, "config": CONFIG, "entry": self.entry}


def is_held_out(question: str) -> bool:
    """Whether a question is for the examination: a property of its text."""
    return hashlib.sha256(question.encode()).digest()[0] % 10 < HELD_OUT_TENTHS


@dataclasses.dataclass
class TaskStream:
    """Training tasks without end, the same for the same `seed`."""

    seed: int

    def __post_init__(self) -> None:
        self._tasks = _draw(TRAIN_SEED + self.seed * RUN_STRIDE, held_out=False)

    def take(self, count: int) -> list[Task]:
        return [next(self._tasks) for _ in range(count)]


def examination(count: int, seed: int = 0) -> list[Task]:
    """`count` different held-out questions; the same ones for every run unless `seed` says otherwise."""
    found: dict[str, Task] = {}
    for task in _draw(HELD_OUT_SEED + seed * RUN_STRIDE, held_out=True):
        found.setdefault(task.question, task)
        if len(found) == count:
            break
    return list(found.values())


def instructions() -> str:
    """The end of every question, from the last number on."""
    question = str(_dataset(0)[0]["question"])
    return ".0" + question[question.index("\n") :]


def score(answer: str, task: Task) -> float:
    """The reward as the scorer gives it, for a trainer that asks no scorer."""
    return float(_dataset(0).score_answer(answer.strip() or None, task.entry))


def _draw(seed: int, *, held_out: bool) -> Iterator[Task]:
    dataset = _dataset(seed)
    for position in range(RUN_STRIDE):
        entry = dataset[position]
        if is_held_out(entry["question"]) == held_out:
            yield Task(entry["question"], entry["answer"], entry)


@functools.cache
def _dataset(seed: int) -> Any:
    return reasoning_gym.create_dataset(DATASET, seed=seed, size=RUN_STRIDE, **CONFIG)
