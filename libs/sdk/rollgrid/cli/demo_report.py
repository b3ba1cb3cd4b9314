"""What `rollgrid demo` shows at its end: figures by dataset, one trajectory in full, a picture."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollgrid.results import Group, Sample

from .tally import Tally, percentile

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")


def dataset_of(group: Group) -> str:
    return str(group.metadata.get("dataset", "?"))


def latency_s(group: Group, sample: Sample) -> float:
    """From submission to the sample's end, seconds; NaN when it was not generated."""
    finished = sample.record.timings.finished_at
    return finished - group.closed.created_at if finished else math.nan


def rewards_table(groups: list[Group]) -> Table:
    """One row a dataset: mean reward, share of perfect ones, and those without a number."""
    from rich.table import Table

    rows: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rows[dataset_of(group)] += [float(reward) for reward in group.rewards]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("dataset", "samples", "mean reward", "perfect", "no reward"):
        table.add_column(heading, justify="left" if heading == "dataset" else "right")
    for name, rewards in sorted(rows.items()):
        numbers = [reward for reward in rewards if not math.isnan(reward)]
        mean = f"{sum(numbers) / len(numbers):.3f}" if numbers else "-"
        perfect = f"{100 * sum(reward == 1 for reward in numbers) / len(numbers):.0f} %" if numbers else "-"
        table.add_row(name, str(len(rewards)), mean, perfect, str(len(rewards) - len(numbers)))
    return table


def figures(tally: Tally, groups: list[Group]) -> dict[str, Any]:
    """The numbers of the run, JSON-compatible."""
    return {
        **tally.summary(),
        "datasets": {name: _mean(groups, name) for name in sorted({dataset_of(g) for g in groups})},
    }


def _mean(groups: list[Group], name: str) -> float | None:
    numbers = [float(r) for group in groups if dataset_of(group) == name for r in group.rewards if not math.isnan(r)]
    return sum(numbers) / len(numbers) if numbers else None


def print_trajectory(screen: Console, group: Group, sample: Sample) -> None:
    """Everything a trainer learns from, of one sample."""
    record = sample.record
    messages = group.closed.messages or ()
    question = messages[-1]["content"] if messages else group.closed.prompt_text
    lines = [
        f"group      {group.id}, task {group.position}, {dataset_of(group)}; sample {sample.index} of {group.n}",
        f"question   {question!r}",
        f"prompt     {len(group.prompt_ids)} tokens: {_ids(group.prompt_ids[:8])} …",
        f"answer     {sample.text!r}   (right: {group.task.get('entry', {}).get('answer')!r})",
        f"token_ids  {_ids(sample.token_ids)}",
        f"logprobs   {' '.join(f'{value:.4f}' for value in sample.logprobs)}   ({group.closed.logprobs_mode})",
        f"finish     {sample.finish_reason}, stop_reason {record.stop_reason}, seed {record.seed}, attempt {record.attempt}",
        "weights    " + ", ".join(f"version {span.version} for tokens {span.start}-{span.end}" for span in sample.spans)
        + f", fingerprint {(record.weight_fingerprint or 'none')[:16]}",
        f"reward     {sample.reward} ({sample.score_status}): "
        + ", ".join(f"{score.scorer} {score.version} = {score.value}" for score in sample.scores),
        f"worker     {record.worker}, {sample.entry.engine}, {latency_s(group, sample):.2f} s after submission",
        f"cursor     {group.cursor} (where a trainer goes on reading)",
    ]  # fmt: skip
    for line in lines:
        screen.print(line, markup=False, soft_wrap=True)


def _ids(values: Any) -> str:
    return " ".join(str(int(value)) for value in values)


def interesting(groups: list[Group]) -> tuple[Group, Sample]:
    """A sample worth showing: solved if there is one, with the most tokens."""
    pairs = [(group, sample) for group in groups for sample in group.samples]
    return max(pairs, key=lambda pair: ((pair[1].reward or 0.0) >= 1.0, pair[1].ok, len(pair[1])))


def draw(groups: list[Group], tally: Tally, path: Path) -> None:
    """Distributions of reward, by dataset, and of latency, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({dataset_of(group) for group in groups})
    rewards = [
        [
            float(reward)
            for group in groups
            if dataset_of(group) == name
            for reward in group.rewards
            if not math.isnan(reward)
        ]
        for name in names
    ]
    latencies = [
        [value for g in groups if dataset_of(g) == name for s in g.samples if not math.isnan(value := latency_s(g, s))]
        for name in names
    ]
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(names))]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    left.hist(rewards, bins=[i / 10 for i in range(11)], stacked=True, label=names, color=colours)
    left.set(xlabel="reward", ylabel="samples", title=f"Reward of {tally.ended} samples, mean {tally.reward_mean:.3f}")
    left.legend(frameon=False)
    right.hist(latencies, bins=20, stacked=True, color=colours)
    for fraction, style in ((0.5, "-"), (0.95, "--")):
        at = percentile(tally.latencies_s, fraction)
        if at is not None:
            right.axvline(at, color="black", linestyle=style, linewidth=1, label=f"p{fraction * 100:.0f} {at:.1f} s")
    right.set(
        xlabel="seconds from submission to the sample's end", ylabel="samples", title="Latency of the whole batch"
    )
    right.legend(frameon=False)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
