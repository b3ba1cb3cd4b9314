"""One open group: what has been folded of it so far, and the `GroupClosed` it ends in.  Pure.

This is a group of single generations; a group of sessions is `open_sessions`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import GroupStatus
from rollgrid_contracts.jobs import Job, SampleGroup, VersionRule
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, Score, ScorerSpec, ScoreStatus, combine, reward_formula
from rollgrid_contracts.trajectories import CloseReason, Entry, GroupClosed

MISSING = {
    CloseReason.CANCELLED: (SampleStatus.CANCELLED, ErrorCode.CANCELLED, "cancelled before it finished"),
    CloseReason.EXPIRED: (SampleStatus.EXPIRED, ErrorCode.EXPIRED, "not finished at the group's deadline"),
}
"""How an index without a finish ends: its status and error, by the reason of the close."""


class Winner(NamedTuple):
    """The finish that counts for one (index, turn): the first in stream order, at RG_SAMPLES `seq`."""

    seq: int
    sample: Sample
    engine: str


class Ending(NamedTuple):
    """How a group was decided to end, at UNIX second `at`; nothing is folded into it any more.

    `unmet` says why nobody could even begin it: no worker had a version that it may be served by.
    """

    reason: CloseReason
    at: float
    epoch: int
    message: str | None = None
    unmet: str | None = None


@dataclass(slots=True, eq=False)
class OpenGroup:
    """Folded state.  `source` is the job that opened it, or the event by which ingest refused it.

    `need` is the lowest RG_SAMPLES sequence a refold must see (0 = none yet); `jobs` maps the
    RG_JOBS sequences held for it to the index set each covers.
    """

    source: Job | SamplesFinished
    deadline: float
    jobs: dict[int, tuple[int, ...]] = field(default_factory=dict)
    winners: dict[int, dict[int, Winner]] = field(default_factory=dict)
    scores: dict[tuple[int, int], dict[str, Score]] = field(default_factory=dict)
    first_finish: SamplesFinished | None = None
    need: int = 0
    cancelled: int = 0
    """RG_SAMPLES sequence of the cancel that ended it."""
    ending: Ending | None = None
    cause: str | None = None
    """Trace context of the last event that was folded."""

    @property
    def n(self) -> int:
        return self.source.n

    @property
    def scorers(self) -> tuple[ScorerSpec, ...]:
        return () if isinstance(self.source, SamplesFinished) else self.source.scorers

    @property
    def record_format(self) -> str:
        """In which form the close is stored: msgpack or json, as the submission asked."""
        return self.source.record_format

    @property
    def subject(self) -> str:
        return subjects.trajectories(self.source.tenant, self.source.run)

    @property
    def finished(self) -> int:
        """Samples that have ended."""
        return len(self.winners)

    @property
    def held(self) -> int:
        """Messages of RG_JOBS that are kept for it."""
        return len(self.jobs)

    @property
    def plain_need(self) -> int:
        """As `need`, of what lies on no session's subject."""
        return self.need

    @property
    def waits_for_versions(self) -> bool:
        """Nothing has come of a job that not every version may serve."""
        source = self.source
        asks = isinstance(source, SampleGroup) and source.weights.rule is not VersionRule.LATEST
        return asks and not self.winners

    # -- folding ------------------------------------------------------------------------------

    def hold(self, seq: int, job: Job) -> None:
        self.jobs[seq] = job.indexes if isinstance(job, SampleGroup) else ()

    def touch(self, seq: int) -> None:
        if not self.need:
            self.need = seq

    def finish(self, seq: int, event: SamplesFinished, sample: Sample) -> str | None:
        """Fold one finish; why it is superseded, or None when it counts."""
        if not 0 <= sample.index < self.n:
            return "index out of range"
        if sample.index in self.winners:
            return "duplicate"
        self.winners[sample.index] = {sample.turn: Winner(seq, sample, event.engine)}
        if self.first_finish is None:
            self.first_finish = event
        self.touch(seq)
        return None

    def score(self, finished_seq: int, result: SampleScores) -> str | None:
        """Fold one scorer's verdicts; why they are superseded, or None."""
        winner = self.winners.get(result.index, {}).get(result.turn)
        if winner is None or winner.seq != finished_seq:
            return "scores of a superseded finish"
        self._take(result)
        return None

    def _take(self, result: SampleScores) -> None:
        """Of two verdicts of one scorer the first counts; those nobody asked for do not."""
        asked = {spec.name for spec in self.scorers}
        held = self.scores.setdefault((result.index, result.turn), {})
        for score in result.scores:
            if score.scorer in asked and score.scorer not in held:
                held[score.scorer] = _finite(score)

    def is_complete(self) -> bool:
        """Every index has ended, and every score asked for is in."""
        if self.finished < self.n:
            return False
        return not self.scorers or all(self._is_scored(index) for index in range(self.n))

    def _is_scored(self, index: int) -> bool:
        last = self._last_turn(index)
        if last is None or last.sample.status is not SampleStatus.SUCCEEDED:
            return True
        return len(self.scores.get((index, last.sample.turn), ())) == len(self.scorers)

    def _last_turn(self, index: int) -> Winner | None:
        turns = self.winners.get(index)
        return turns[max(turns)] if turns else None

    # -- ending -------------------------------------------------------------------------------

    def record(self) -> GroupClosed:
        """The terminal record of a decided group; indexes without a finish end as the decision says."""
        assert self.ending is not None
        reason, now, epoch = self.ending.reason, self.ending.at, self.ending.epoch
        entries = tuple(self._entry(index, self.ending) for index in range(self.n))
        source = self.source
        finish = self.first_finish
        lost = next((e.sample.error for e in entries if e.sample.status is not SampleStatus.SUCCEEDED), None)
        shared: dict[str, Any] = {
            "tenant": source.tenant,
            "run": source.run,
            "batch_id": source.batch_id,
            "group_id": source.group_id,
            "n": source.n,
            "policy": source.policy,
            "reason": reason,
            "scorers": self.scorers,
            "reward_formula": reward_formula(self.scorers),
            "closed_at": now,
            "job_seqs": tuple(self.jobs),
            "ledger_epoch": epoch,
            "error": None if reason is CloseReason.COMPLETE else lost,
            "entries": entries,
            "traceparent": source.traceparent,
            "logprobs_mode": finish.logprobs_mode if finish else "processed_logprobs",
        }
        if isinstance(source, SamplesFinished):
            told = source.scoring.metadata if source.scoring else {}
            return GroupClosed(**shared, metadata=told, sampling=source.sampling, created_at=now)
        shared |= {
            "task": source.task,
            "metadata": source.metadata,
            "rights": source.rights,
            "engagement_id": source.engagement_id,
            "created_at": source.created_at,
            "deadline": source.deadline,
        }
        return self._with_source(shared)

    def _with_source(self, shared: dict[str, Any]) -> GroupClosed:
        source = self.source
        assert isinstance(source, SampleGroup)
        return GroupClosed(
            **shared,
            position=source.position,
            model=source.model,
            pool=source.pool,
            prompt_token_ids=source.prompt_token_ids,
            prompt_text=source.prompt_text,
            messages=source.messages,
            sampling=source.sampling,
            weights=source.weights,
            priority=source.priority,
        )

    def _entry(self, index: int, ending: Ending) -> Entry:
        winner = self._last_turn(index)
        if winner is None:
            return self._scored(Entry(sample=missing(index, ending)))
        return self._scored(Entry(sample=winner.sample, engine=winner.engine))

    def _scored(self, entry: Entry) -> Entry:
        if not self.scorers:
            return entry
        if entry.sample.status is not SampleStatus.SUCCEEDED:
            return msgspec.structs.replace(entry, score_status=ScoreStatus.NOT_RUN)
        held = self.scores.get((entry.sample.index, entry.sample.turn), {})
        scores = tuple(held[spec.name] for spec in self.scorers if spec.name in held)
        reward, status = combine(self.scorers, scores)
        if reward is not None and not math.isfinite(reward):
            reward, status = None, ScoreStatus.VERIFIER_ERROR
        return msgspec.structs.replace(entry, reward=reward, score_status=status, scores=scores)

    # -- what others ask ----------------------------------------------------------------------

    def status(self) -> GroupStatus:
        """How far it is, as the ledger's answers say it."""
        source = self.source
        done = {index: turns[min(turns)].seq for index, turns in self.winners.items()}
        return GroupStatus(group_id=source.group_id, batch_id=source.batch_id, run=source.run, n=self.n, done=done)


def _finite(score: Score) -> Score:
    """A verdict that is no number counts as a failure of its scorer, whatever it says of itself."""
    if score.value is not None and math.isfinite(score.value):
        return score if score.status.has_value else msgspec.structs.replace(score, value=None)
    if not score.status.has_value:
        return score if score.value is None else msgspec.structs.replace(score, value=None)
    return msgspec.structs.replace(
        score, status=ScoreStatus.VERIFIER_ERROR, value=None, detail=f"value {score.value} is not a finite number"
    )


def missing(index: int, ending: Ending) -> Sample:
    status, code, text = MISSING[ending.reason]
    if ending.unmet is not None:
        code, text = ErrorCode.VERSION_UNAVAILABLE, ending.unmet
    error = ErrorInfo(
        code=code,
        message=ending.message or text,
        boundary=Boundary.LEDGER,
        retryable=ending.reason is CloseReason.EXPIRED,
        field="weights" if ending.unmet is not None else None,
    )
    return Sample(index=index, status=status, finish_reason=FinishReason.ABORT, error=error)
