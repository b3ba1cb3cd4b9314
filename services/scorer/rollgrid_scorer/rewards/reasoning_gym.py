"""`reasoning_gym`: the package's own scoring functions, for every one of its datasets.

The task carries `dataset` (its name), `entry` (question, answer, metadata, as the dataset gave it)
and, where the dataset was made with other than the default settings, `config`.

Several datasets evaluate what the model wrote (sympy): it runs in the scorer's worker processes
only, under their limits.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from typing import Any

import msgspec
import reasoning_gym

from .base import ScoreInput, TaskError, Verdict
from .extraction import extract, extract_mode

_COMPARES_TUPLES = frozenset({"arc_agi", "rearc"})
"""Datasets that compare grids of tuples: on the wire they have become lists."""


class ReasoningGym:
    """Parameters: `dataset` and `config` (else the task's), `extract` (auto | tags | last_line | whole)."""

    name = "reasoning_gym"
    version = f"1+reasoning_gym-{reasoning_gym.__version__}"

    def __init__(
        self, *, dataset: str | None = None, config: dict[str, Any] | None = None, extract: str = "auto"
    ) -> None:
        self._dataset, self._config = dataset, config
        self._mode = extract_mode(extract)

    def score(self, task: ScoreInput) -> Verdict:
        entry = task.task.get("entry")
        if not isinstance(entry, dict):
            raise TaskError("the task has no 'entry' of a reasoning_gym dataset")
        name = self._dataset or task.task.get("dataset")
        if not isinstance(name, str):
            raise TaskError("the task has no 'dataset' of reasoning_gym")
        config = self._config if self._config is not None else task.task.get("config")
        dataset = _dataset(name, msgspec.msgpack.encode(config or {}))
        if name in _COMPARES_TUPLES:
            entry = {**entry, "metadata": _tuples(entry.get("metadata"))}
        found = extract(task.answer, self._mode)
        if found is None:
            return Verdict(0.0, "no answer found", invalid_output=True)
        return _score(dataset, found, entry)


def _score(dataset: Any, answer: str, entry: dict[str, Any]) -> Verdict:
    """A few datasets (prime_factorization, game_of_life, …) raise on text they cannot parse.  Where
    the same function then accepts the entry's own answer it works, and it is the output that is invalid.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Verdict(float(dataset.score_answer(answer, entry)))
    except MemoryError:
        raise
    except Exception as error:
        own = entry.get("answer")
        if own is None or own == answer or float(dataset.score_answer(own, entry)) <= 0:
            raise
        return Verdict(0.0, f"unreadable answer: {type(error).__name__}: {error}", invalid_output=True)


@lru_cache(maxsize=64)
def _dataset(name: str, packed_config: bytes) -> Any:
    config = msgspec.msgpack.decode(packed_config)
    if not isinstance(config, dict):
        raise TaskError("'config' of a reasoning_gym dataset must be an object")
    try:
        return reasoning_gym.create_dataset(name, **config)
    except (ValueError, TypeError, AssertionError) as error:
        raise TaskError(f"reasoning_gym dataset {name!r}: {error}") from error


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value
