"""What a caller may hand to `submit`, turned into the body of POST /v1/rollouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import msgspec
import numpy as np
from rollgrid_contracts.arrays import PackedArray
from rollgrid_contracts.jobs import SamplingParams, VersionRule, WeightConstraint
from rollgrid_contracts.scoring import ScorerSpec

from .errors import Unsendable

TaskLike: TypeAlias = "str | Sequence[int] | Sequence[Mapping[str, Any]] | Mapping[str, Any] | np.ndarray[Any, Any]"
"""A prompt as text, as token ids or as chat messages; or a mapping with one of `prompt`, `messages` and
`prompt_token_ids`, and with `task` (what scorers get: answer, dataset, …) and `metadata` (returned untouched)."""

ScorerLike: TypeAlias = "str | Mapping[str, Any] | ScorerSpec"
"""A scorer by its type, or with its `name`, `params`, `weight`, `gate` and `timeout_s`."""


def task_body(task: object) -> dict[str, Any]:
    """One task as the server takes it; raises TypeError when its form is none of `TaskLike`."""
    if isinstance(task, str):
        return {"prompt": task}
    if isinstance(task, Mapping):
        return dict(task)
    if isinstance(task, (np.ndarray, PackedArray)):
        return {"prompt_token_ids": task.tolist()}
    if isinstance(task, Sequence) and not isinstance(task, bytes):
        if any(isinstance(item, Mapping) for item in task):
            return {"messages": list(task)}
        return {"prompt_token_ids": list(task)}
    raise TypeError(f"a task is a text, token ids, messages or a mapping, not {type(task).__name__}")


def scorer_body(scorer: ScorerLike) -> dict[str, Any]:
    if isinstance(scorer, str):
        return {"type": scorer, "name": scorer}
    if isinstance(scorer, ScorerSpec):
        return dict(msgspec.to_builtins(scorer))
    return {"name": scorer.get("type"), **scorer}


def weights_body(weights: WeightConstraint | Mapping[str, Any] | None) -> dict[str, Any] | None:
    """`{"min_version": 3}` and the like; None for the latest."""
    if isinstance(weights, WeightConstraint):
        return None if weights.rule is VersionRule.LATEST else {weights.rule.value: weights.value}
    return None if weights is None else dict(weights)


def submission(
    tasks: Iterable[TaskLike],
    *,
    n: int,
    sampling: Mapping[str, Any] | SamplingParams,
    scorers: Iterable[ScorerLike] = (),
    run: str,
    policy: str | None,
    deadline_s: float | None = None,
    priority: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    weights: WeightConstraint | Mapping[str, Any] | None = None,
    pin: bool = False,
    on_refresh: str | None = None,
    pace: Mapping[str, int] | None = None,
    reward_formula: str | None = None,
    record_format: str | None = None,
) -> bytes:
    """The JSON body of one submission; what is None is left to the server's defaults.

    Raises Unsendable for what JSON would silently change.
    """
    optional = {
        "policy": policy,
        "deadline_s": deadline_s,
        "priority": priority,
        "metadata": None if metadata is None else dict(metadata),
        "weights": weights_body(weights),
        "pin": True if pin else None,
        "on_refresh": on_refresh,
        "pace": None if pace is None else dict(pace),
        "reward_formula": reward_formula,
        "record_format": record_format,
    }
    body = {
        "run": run,
        "tasks": [task_body(task) for task in tasks],
        "n": n,
        "sampling": sampling if isinstance(sampling, SamplingParams) else dict(sampling),
        "scorers": [scorer_body(scorer) for scorer in scorers],
        **{name: value for name, value in optional.items() if value is not None},
    }
    return json_body(body)


def score_body(
    token_ids: Sequence[int] | Sequence[Sequence[int]],
    *,
    top_logprobs: int,
    policy: str | None,
    weights: WeightConstraint | Mapping[str, Any] | None,
    deadline_s: float,
) -> bytes:
    """The JSON body of a call of `score_tokens`.  Raises Unsendable."""
    lists = [ids.tolist() if isinstance(ids, (np.ndarray, PackedArray)) else ids for ids in token_ids]
    plain = [list(ids) if isinstance(ids, Sequence) else int(ids) for ids in lists]
    optional = {"model": policy, "weights": weights_body(weights), "top_logprobs": top_logprobs or None}
    given = {name: value for name, value in optional.items() if value is not None}
    return json_body({"token_ids": plain, "deadline_s": deadline_s, **given})


@runtime_checkable
class PydanticLike(Protocol):
    """A message as the `openai` package returns it; sent as that package sends it: what was set."""

    def model_dump(self, *, mode: str, exclude_unset: bool) -> Any: ...


Message: TypeAlias = Mapping[str, Any] | PydanticLike


def json_body(body: dict[str, Any]) -> bytes:
    """A request as JSON.  Raises Unsendable for what JSON would silently change."""
    _refuse_nan(body, "")
    try:
        return msgspec.json.encode(body, enc_hook=_plain)
    except UnicodeEncodeError as error:
        raise Unsendable(f"a text is not Unicode: {error}") from error


def _refuse_nan(value: object, path: str) -> None:
    """JSON has no NaN and no infinity: sent as null they would mean "the default"."""
    if isinstance(value, float) and not math.isfinite(value):
        raise Unsendable(f"{path} is {value}: a request cannot say that")
    if isinstance(value, SamplingParams):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name != "prompt_token_ids":  # long, and integers
                _refuse_nan(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _refuse_nan(item, f"{path}[{index}]")


def _plain(value: object) -> object:
    if isinstance(value, (np.ndarray, np.generic, PackedArray)):
        plain = value.tolist()
        _refuse_nan(plain, "an array")
        return plain
    if isinstance(value, PydanticLike):
        return value.model_dump(mode="json", exclude_unset=True)
    raise TypeError(f"cannot send a {type(value).__name__}")
