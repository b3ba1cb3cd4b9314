"""What decides a run, in one place: a dataclass whose fields are the command line's options.

A run is resumed with the settings it was started with, so they are written beside its state.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

LOSSES = ("grpo", "dr_grpo", "ppo", "gspo", "reinforce")


def option(default: Any, meaning: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": meaning})


@dataclasses.dataclass(frozen=True)
class Settings:
    """Defaults learn visibly within a few minutes on two cores."""

    seed: int = option(0, "of the model, the training tasks and the samples")
    steps: int = option(60, "optimizer steps on rollouts, one published version each")
    tasks: int = option(32, "questions per step")
    samples: int = option(8, "answers per question: one group")
    loss: str = option("grpo", " | ".join(LOSSES))
    epochs: int = option(2, "passes over the samples of a step")
    lr: float = option(1e-3, "learning rate on rollouts")
    clip_low: float = option(0.2, "lower clip of the ratio")
    clip_high: float = option(0.28, "upper clip of the ratio")
    grad_norm: float = option(1.0, "the gradient is scaled down to this norm")
    temperature: float = option(1.0, "of the samples, in training and examination")
    max_tokens: int = option(12, "longest answer")
    max_staleness: int = option(0, "0 = synchronous; else how many versions older than the trainer's a token may be")
    ahead: int = option(1, "asynchronous only: batches that are sampled while one is trained on")
    exam_every: int = option(10, "steps between examinations")
    exam_tasks: int = option(256, "held-out questions per examination")
    hidden: int = option(64, "width of the model")
    layers: int = option(2, "depth of the model")
    warm_until: float = option(0.05, "the warm start ends at this probability of the right answer")
    warm_lr: float = option(3e-3, "learning rate of the warm start")
    deadline_s: float = option(180.0, "a batch that takes longer closes with what it has")
    publish: str = option("full", "weights of each step as full | delta | auto (docs/reference/weights.md)")
    threads: int = option(1, "of torch; the engine has the other core")

    def __post_init__(self) -> None:
        if self.publish not in ("full", "delta", "auto"):
            raise ValueError(f"publish {self.publish!r} is none of full, delta, auto")
        if self.loss not in LOSSES:
            raise ValueError(f"loss {self.loss!r} is none of {', '.join(LOSSES)}")
        if min(self.steps, self.tasks, self.samples, self.epochs, self.max_tokens) < 1 or self.max_staleness < 0:
            raise ValueError("steps, tasks, samples, epochs and max_tokens are at least 1, max_staleness at least 0")
        if self.max_staleness and not 1 <= self.ahead <= self.max_staleness:
            raise ValueError("ahead: from 1 to max_staleness, else the bound could not be kept")

    @property
    def depth(self) -> int:
        """Batches in flight while one is trained on."""
        return self.ahead if self.max_staleness else 0

    @property
    def passes(self) -> int:
        """REINFORCE has no ratio: after one optimizer step the samples are no longer those of the weights."""
        return 1 if self.loss == "reinforce" else self.epochs

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def read(cls, path: Path) -> Settings:
        return cls(**json.loads(path.read_text()))


def add_options(parser: argparse.ArgumentParser) -> None:
    for field in dataclasses.fields(Settings):
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default,
            help=f"{field.metadata['help']} ({field.default})",
        )  # fmt: skip


def from_options(options: argparse.Namespace) -> Settings:
    return Settings(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Settings)})
