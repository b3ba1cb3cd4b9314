"""A live view of a batch while its groups arrive."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollgrid.errors import RollgridError
from rollgrid.results import Group

from .tally import Tally

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from rollgrid.client import Batch

_POLL_S = 1.0


def followed(batch: Batch, groups: Iterable[Group], tally: Tally, samples: int, console: Console) -> Iterator[Group]:
    """Pass `groups` on while a bar on `console` shows samples by status, tokens and mean reward."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=False) as progress:
        bar = progress.add_task(batch.run, total=samples, figures="")
        with _generated(batch, progress, bar, tally):
            for group in groups:
                tally.add(group)
                progress.update(bar, completed=tally.ended, figures=figures(tally))
                yield group


def figures(tally: Tally, finished: int = 0) -> str:
    """One line: statuses that occur, tokens, tokens per second, mean reward and how many are null."""
    parts = [f"{count} {status}" for status, count in tally.samples.items() if count]
    if finished > tally.ended:
        parts.append(f"{finished - tally.ended} generated")
    elapsed = tally.elapsed_s()
    parts.append(f"{tally.tokens} tokens" + (f" ({tally.tokens / elapsed:.0f}/s)" if elapsed > 1 else ""))
    if not math.isnan(tally.reward_mean):
        parts.append(f"reward {tally.reward_mean:.3f}")
    if tally.null_rewards:
        parts.append(f"{tally.null_rewards} without reward")
    return " · ".join(parts)


@contextmanager
def _generated(batch: Batch, progress: Progress, bar: TaskID, tally: Tally) -> Iterator[None]:
    """Meanwhile ask how many samples are generated but not closed yet: long groups close late."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_POLL_S):
            try:
                finished = batch.status().finished
            except RollgridError as error:  # the iterator decides what an outage means; this only shows it
                progress.update(bar, figures=f"{figures(tally)} · waiting: {type(error).__name__}")
            else:
                progress.update(bar, completed=max(finished, tally.ended), figures=figures(tally, finished))

    thread = threading.Thread(target=poll, name="rollgrid-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
