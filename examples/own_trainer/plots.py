"""A run's picture: rewards, staleness, |Δlogprob|, useful samples, tokens per second and bytes published over the steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .history import History
from .trainer import TOLERANCE

COLOURS = ("#1f6f8b", "#c8553d", "#588157", "#6d597a", "#b08968")


def draw(runs: Mapping[str, list[History]], path: Path, title: str) -> None:
    """One colour per name, one line per run of that name."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(16, 7), layout="constrained")
    panels: dict[str, Callable[[History], tuple[list[int], list[Any]]]] = {
        "reward on training questions": lambda run: _steps(run, "reward"),
        "reward on held-out questions": lambda run: (
            [e.step for e in run.exams],
            [e.reward for e in run.exams],
        ),
        "oldest token, versions behind": lambda run: _steps(run, "staleness_max"),
        "largest |Δlogprob| to the trainer's forward": lambda run: _steps(run, "difference"),
        "useful samples": lambda run: _steps(run, "useful"),
        "sampled tokens per second of the whole step": _throughput,
        "bytes published": lambda run: _steps(run, "published_bytes"),
        "seconds to publish": lambda run: _steps(run, "publish_s"),
    }
    for axis, (name, values) in zip(axes.flat, panels.items(), strict=True):
        for (label, histories), colour in zip(runs.items(), COLOURS, strict=False):
            for number, history in enumerate(histories):
                axis.plot(*values(history), color=colour, alpha=0.9 if len(histories) == 1 else 0.55, linewidth=1.3,
                          label=None if number else label)  # fmt: skip
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.25)
    for axis in axes.flat[:2]:
        axis.set_ylim(0, 1.02)
    axes.flat[2].yaxis.get_major_locator().set_params(integer=True)
    axes.flat[3].set_yscale("log")
    axes.flat[3].axhline(TOLERANCE, color="black", linewidth=0.8, linestyle="--")
    for axis in axes.flat[4:]:
        axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axes.flat[0].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _steps(run: History, field: str) -> tuple[list[int], list[Any]]:
    return [step.step for step in run.steps], [getattr(step, field) for step in run.steps]


def _throughput(run: History) -> tuple[list[int], list[float]]:
    return [step.step for step in run.steps], [step.tokens / step.seconds for step in run.steps]
