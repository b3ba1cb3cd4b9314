"""Figures over finished groups, kept while they arrive."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from typing import Any

from rollgrid.results import Group


@dataclasses.dataclass
class Tally:
    """Counts of what has been read so far.  Null rewards are counted, never averaged."""

    started_at: float = dataclasses.field(default_factory=time.time)
    groups: int = 0
    samples: Counter[str] = dataclasses.field(default_factory=Counter)
    score_statuses: Counter[str] = dataclasses.field(default_factory=Counter)
    error_codes: Counter[str] = dataclasses.field(default_factory=Counter)
    tokens: int = 0
    prompt_tokens: int = 0
    rewards: list[float] = dataclasses.field(default_factory=list)
    null_rewards: int = 0
    latencies_s: list[float] = dataclasses.field(default_factory=list)
    ended_at: float | None = None

    def add(self, group: Group) -> None:
        self.groups += 1
        self.prompt_tokens += len(group.prompt_ids)
        for sample in group.samples:
            self.samples[sample.status.value] += 1
            self.tokens += len(sample)
            if sample.reward is not None:
                self.rewards.append(sample.reward)
            elif group.closed.scorers:
                self.null_rewards += 1
            if sample.score_status is not None:
                self.score_statuses[sample.score_status.value] += 1
            if sample.error is not None:
                self.error_codes[sample.error.code.value] += 1
            if (finished := sample.record.timings.finished_at) and group.closed.created_at:
                self.latencies_s.append(max(0.0, finished - group.closed.created_at))

    @property
    def ended(self) -> int:
        return sum(self.samples.values())

    @property
    def failed(self) -> int:
        """Samples that ended otherwise than succeeded."""
        return self.ended - self.samples["succeeded"]

    @property
    def reward_mean(self) -> float:
        """Mean of the rewards there are; NaN when there are none."""
        return sum(self.rewards) / len(self.rewards) if self.rewards else math.nan

    def elapsed_s(self) -> float:
        return (self.ended_at or time.time()) - self.started_at

    def summary(self) -> dict[str, Any]:
        """JSON-compatible; percentiles by nearest rank, seconds from submission to the sample's end."""
        elapsed = self.elapsed_s()
        return {
            "groups": self.groups,
            "samples": dict(self.samples),
            "prompt_tokens": self.prompt_tokens,
            "tokens": self.tokens,
            "reward_mean": None if math.isnan(self.reward_mean) else self.reward_mean,
            "rewards": len(self.rewards),
            "null_rewards": self.null_rewards,
            "score_statuses": dict(self.score_statuses),
            "errors": dict(self.error_codes),
            "elapsed_s": round(elapsed, 3),
            "tokens_per_s": round(self.tokens / elapsed, 1) if elapsed > 0 else 0.0,
            "latency_p50_s": percentile(self.latencies_s, 0.5),
            "latency_p95_s": percentile(self.latencies_s, 0.95),
        }


def percentile(values: list[float], fraction: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]
