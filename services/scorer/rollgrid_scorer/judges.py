"""What a handler needs of those who give scores: verifiers in worker processes, customers' webhooks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rollgrid_contracts.samples import Sample, SamplesFinished, ScoringTask
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec


class NotNow(Exception):
    """The event shall go back to the stream and come again in `delay_s`: its key has had its share."""

    def __init__(self, delay_s: float) -> None:
        super().__init__(f"again in {delay_s:.2f} s")
        self.delay_s = delay_s


class Judge(Protocol):
    kind: ScorerKind

    def label(self, spec: ScorerSpec) -> str:
        """The scorer in metrics."""
        ...

    def turn(self, event: SamplesFinished, task: ScoringTask) -> AbstractAsyncContextManager[None]:
        """Around the work on one event; raises NotNow on entering."""
        ...

    async def judge(
        self, spec: ScorerSpec, event: SamplesFinished, task: ScoringTask, samples: Sequence[Sample], sequence: int
    ) -> list[Score]:
        """A score for each of `samples`, in order.  `sequence` is that of the event in RG_SAMPLES.

        Raises IsolationError when nothing can be said of any sample now.
        """
        ...
