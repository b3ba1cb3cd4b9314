"""Scores of verifiers: registered code in worker processes."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from rollgrid_contracts.samples import Sample, SamplesFinished, ScoringTask
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec, ScoreStatus
from rollgrid_runtime import telemetry

from .calls import Item, Shared
from .isolation import Outcome, Pool
from .registry import Registry
from .sessions import by_turn, path_of_task

NO_TEXT = Outcome(ScoreStatus.VERIFIER_ERROR, None, "the sample carries no text", "", 0.0, 1)


class Verifiers:
    """A `Judge`.  All that waits for a worker waits in the pool."""

    kind = ScorerKind.VERIFIER

    def __init__(self, pool: Pool, registry: Registry, max_timeout_s: float) -> None:
        self._pool, self._registry, self._max_timeout_s = pool, registry, max_timeout_s

    def turn(self, event: SamplesFinished, task: ScoringTask) -> AbstractAsyncContextManager[None]:
        return contextlib.nullcontext()

    async def judge(
        self, spec: ScorerSpec, event: SamplesFinished, task: ScoringTask, samples: Sequence[Sample], sequence: int
    ) -> list[Score]:
        return await self.scores(spec, task, samples)

    async def scores(self, spec: ScorerSpec, task: ScoringTask, samples: Sequence[Sample]) -> list[Score]:
        """A score for each of `samples`; raises IsolationError."""
        path = path_of_task(task)
        texts = tuple(turn.text or "" for turn in path)
        items = [item for place, sample in enumerate(samples) if (item := item_of(place, sample, texts)) is not None]
        shared = Shared(task.prompt_text, task.messages, task.task, task.metadata)
        timeout_s = min(spec.timeout_s, self._max_timeout_s)
        with telemetry.child(f"verify {self.label(spec)}", type=self.label(spec), samples=len(items)):
            outcomes = await self._pool.judge(spec.type, spec.params, shared, items, timeout_s) if items else {}
        found = [score_of(spec, outcomes.get(position, NO_TEXT)) for position in range(len(samples))]
        return [by_turn(score, path) for score in found]

    def label(self, spec: ScorerSpec) -> str:
        """The scorer's type for metrics and spans: a job cannot make new ones."""
        return spec.type if spec.type in self._registry else "unknown"


def item_of(position: int, sample: Sample, turn_texts: tuple[str, ...] = ()) -> Item | None:
    """The sample as workers are told of it; None without a text."""
    if sample.text is None:
        return None
    content = sample.parsed.content if sample.parsed is not None else None
    reason = sample.finish_reason.value if sample.finish_reason is not None else None
    return Item(position, sample.text, content, reason, len(sample.token_ids), sample.index, turn_texts)


def score_of(spec: ScorerSpec, outcome: Outcome) -> Score:
    return Score(
        scorer=spec.name,
        status=outcome.status,
        value=outcome.value,
        version=outcome.version,
        detail=outcome.detail,
        duration_ms=round(outcome.duration_ms, 3),
        attempt=outcome.attempt,
        turn_values=outcome.turn_values,
    )
