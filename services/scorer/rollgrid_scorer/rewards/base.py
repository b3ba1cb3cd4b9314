"""What a verifier is.  Users write their own against this module and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")


class ScoreInput(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sample and its task.

    `text` is everything the model wrote, `content` the part behind the reasoning when the sampler
    parsed it (None = not parsed); `tokens` counts the sampled tokens.  `task` is the caller's own
    payload (answer, dataset, entry, …), as is `metadata`.

    Of a session they are those of its last answer; `messages` is then the whole conversation, that answer
    included, and `turn_texts` what the model wrote in each of its turns (empty = a single generation).
    """

    text: str
    content: str | None = None
    finish_reason: str | None = None
    tokens: int = 0
    index: int = 0
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    turn_texts: tuple[str, ...] = ()

    @property
    def answer(self) -> str:
        """The text to judge: `content` when there is one, else `text`."""
        return self.text if self.content is None else self.content


class Verdict(msgspec.Struct, frozen=True):
    """A number for one sample.

    `invalid_output` says that the model's output could not be read (`value` is then its price,
    usually 0).  A verifier that itself cannot work raises instead: that is never a number.
    `turn_values` are the parts of a verdict that belong to single turns of the episode, one per
    turn (item of `turn_texts`) in order, None where there is none; they are recorded beside `value`,
    never added to it.
    """

    value: float
    detail: str | None = None
    invalid_output: bool = False
    turn_values: tuple[float | None, ...] = ()


class Verifier(Protocol):
    """Judges samples: deterministic, without side effects, safe to call again for the same input.

    Made by its factory with the job's `params` as keyword arguments, once per worker process and
    parameter set.  `score` may return a plain number for a `Verdict` without detail.
    """

    name: str
    version: str

    def score(self, task: ScoreInput) -> Verdict | float: ...


class TaskError(ValueError):
    """The job's task or parameters lack what the verifier needs: a failure, never a reward."""


def reference(task: ScoreInput, answer: Any, field: str) -> Any:
    """The right answer: the job's parameter `answer`, else `task[field]`; raises TaskError without one."""
    found = task.task.get(field) if answer is None else answer
    if found is None:
        raise TaskError(f"the task has no field {field!r} and the scorer no parameter 'answer'")
    return found


def typed(kind: type[T], params: Mapping[str, Any]) -> T:
    """The job's `params` as a struct; raises TaskError naming the field at fault."""
    try:
        return msgspec.convert(dict(params), kind)
    except msgspec.ValidationError as error:
        what, _, where = str(error).partition(" - at `$")
        field = "params" + where.rstrip("`")
        raise TaskError(f"{field}: {what}") from None
