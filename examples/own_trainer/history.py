"""What a run has measured: a row per step, a row per examination, and the figures drawn from them."""

from __future__ import annotations

import dataclasses
from typing import Any

from .settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """One step.  `difference` is the largest |Δlogprob|, `ids` a digest of all sampled tokens in order.

    Staleness is in versions, times are in seconds.
    """

    step: int
    version: int
    ids: str
    reward: float
    loss: float
    difference: float
    staleness_max: int
    staleness_mean: float
    samples: int
    useful: int
    tokens: int
    seconds: float
    rollout_s: float
    train_s: float
    publish_s: float
    published_bytes: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exam:
    """Held-out reward of the weights after `step` steps, sampled as in training and greedy."""

    step: int
    reward: float
    greedy: float


class History:
    """Everything a run has measured."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.steps: list[Step] = []
        self.exams: list[Exam] = []

    @property
    def rise(self) -> float:
        """How much the held-out reward has grown."""
        return self.exams[-1].reward - self.exams[0].reward

    def summary(self) -> dict[str, Any]:
        seconds = sum(step.seconds for step in self.steps)
        samples = sum(step.samples for step in self.steps)
        return {
            "held_out_reward": [self.exams[0].reward, self.exams[-1].reward],
            "held_out_greedy": [self.exams[0].greedy, self.exams[-1].greedy],
            "train_reward": [self.steps[0].reward, self.steps[-1].reward],
            "max_difference": max(step.difference for step in self.steps),
            "max_staleness": max(step.staleness_max for step in self.steps),
            "samples": samples,
            "useful": sum(step.useful for step in self.steps),
            "tokens": sum(step.tokens for step in self.steps),
            "tokens_per_s": sum(step.tokens for step in self.steps) / seconds,
            "seconds": seconds,
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "settings": dataclasses.asdict(self.settings),
            "summary": self.summary(),
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "exams": [dataclasses.asdict(exam) for exam in self.exams],
        }

    @classmethod
    def from_dict(cls, settings: Settings, found: dict[str, Any]) -> History:
        history = cls(settings)
        history.steps = [Step(**step) for step in found["steps"]]
        history.exams = [Exam(**exam) for exam in found["exams"]]
        return history
