"""One open group: what has been folded of it so far, and the `GroupClosed` it ends in.  Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.episodes import SessionEnded, SessionOutcome
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Job, OpenEpisode, SampleGroup, VersionRule
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
    ended: dict[int, SessionEnded] = field(default_factory=dict)
    fences: dict[int, int] = field(default_factory=dict)
    turn_jobs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    first_finish: SamplesFinished | None = None
    need: int = 0
    ending: Ending | None = None
    cause: str | None = None
    """Trace context of the last event that was folded."""

    @property
    def n(self) -> int:
        return self.source.n

    @property
    def is_episode(self) -> bool:
        return isinstance(self.source, OpenEpisode)

    @property
    def scorers(self) -> tuple[ScorerSpec, ...]:
        return () if isinstance(self.source, SamplesFinished) else self.source.scorers

    @property
    def record_format(self) -> str:
        """In which form the close is stored: msgpack or json, as the submission asked."""
        return "msgpack" if isinstance(self.source, OpenEpisode) else self.source.record_format

    @property
    def subject(self) -> str:
        return subjects.trajectories(self.source.tenant, self.source.run)

    @property
    def finished(self) -> int:
        """Samples that have ended."""
        return len(self.ended) if self.is_episode else len(self.winners)

    @property
    def waits_for_versions(self) -> bool:
        """Nothing has come of a job that not every version may serve."""
        source = self.source
        asks = isinstance(source, SampleGroup) and source.weights.rule is not VersionRule.LATEST
        return asks and not self.winners

    # -- folding ------------------------------------------------------------------------------

    def hold(self, seq: int, job: Job) -> None:
        """Keep a job of this group; a turn's job is held until its finish is folded."""
        if self.is_episode and isinstance(job, SampleGroup) and job.session is not None:
            for index in job.indexes:
                self.turn_jobs.setdefault((index, job.session.turn), []).append(seq)
        else:
            self.jobs[seq] = job.indexes if isinstance(job, SampleGroup) else ()

    def touch(self, seq: int) -> None:
        if not self.need:
            self.need = seq

    def finish(self, seq: int, event: SamplesFinished, sample: Sample) -> str | None:
        """Fold one finish; why it is superseded, or None when it counts."""
        if not 0 <= sample.index < self.n:
            return "index out of range"
        turns = self.winners.get(sample.index)
        if self.is_episode:
            if sample.index in self.ended:
                return "session has ended"
            fence = event.fence or event.job_seq
            if fence < self.fences.get(sample.index, 0):
                return "stale fence"
            if turns is not None and sample.turn in turns:
                return "duplicate"
            self.fences[sample.index] = fence
        elif turns is not None:
            return "duplicate"
        self.winners.setdefault(sample.index, {})[sample.turn] = Winner(seq, sample, event.engine)
        if self.first_finish is None:
            self.first_finish = event
        self.touch(seq)
        return None

    def score(self, finished_seq: int, result: SampleScores) -> str | None:
        """Fold one scorer's verdicts; why they are superseded, or None."""
        winner = self.winners.get(result.index, {}).get(result.turn)
        if winner is None or winner.seq != finished_seq:
            return "scores of a superseded finish"
        asked = {spec.name for spec in self.scorers}
        held = self.scores.setdefault((result.index, result.turn), {})
        for score in result.scores:
            if score.scorer in asked and score.scorer not in held:
                held[score.scorer] = _finite(score)
        return None

    def folded_turns(self, event: SamplesFinished) -> tuple[int, ...]:
        """RG_JOBS sequences of turns whose finish is now folded: they need not be held any longer."""
        done: list[int] = []
        for sample in event.samples:
            done += self.turn_jobs.pop((sample.index, sample.turn), [])
        return tuple(done)

    def is_complete(self) -> bool:
        """Every index has ended, and every score asked for is in."""
        if self.finished < self.n:
            return False
        return not self.scorers or all(self._is_scored(index) for index in range(self.n))

    def _is_scored(self, index: int) -> bool:
        last = self._last_turn(index)
        if last is None or last.sample.status is not SampleStatus.SUCCEEDED:
            return True
        if self.is_episode and self.ended[index].outcome is not SessionOutcome.CLOSED:
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
        if isinstance(source, OpenEpisode):
            return GroupClosed(**shared, sampling=finish.sampling if finish else None)
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
        if self.is_episode:
            return self._episode_entry(index, ending)
        winner = self._last_turn(index)
        if winner is None:
            return self._scored(Entry(sample=_missing(index, ending)))
        return self._scored(Entry(sample=winner.sample, engine=winner.engine))

    def _episode_entry(self, index: int, ending: Ending) -> Entry:
        """`turns` hold what was generated; `sample` only says how the episode ended."""
        turns = self.winners.get(index, {})
        played = tuple(turns[turn].sample for turn in sorted(turns))
        last = self._last_turn(index)
        ended = self.ended.get(index)
        if ended is None:
            sample = _missing(index, ending)
        else:
            sample = _outcome(index, ended.outcome, last.sample if last else None)
        return self._scored(Entry(sample=sample, turns=played, engine=last.engine if last else ""))

    def _scored(self, entry: Entry) -> Entry:
        if not self.scorers:
            return entry
        if entry.sample.status is not SampleStatus.SUCCEEDED:
            return msgspec.structs.replace(entry, score_status=ScoreStatus.NOT_RUN)
        last = self._last_turn(entry.sample.index)
        held = self.scores.get((entry.sample.index, last.sample.turn), {}) if last else {}
        scores = tuple(held[spec.name] for spec in self.scorers if spec.name in held)
        reward, status = combine(self.scorers, scores)
        if reward is not None and not math.isfinite(reward):
            reward, status = None, ScoreStatus.VERIFIER_ERROR
        return msgspec.structs.replace(entry, reward=reward, score_status=status, scores=scores)


def _finite(score: Score) -> Score:
    """A verdict that is no number counts as a failure of its scorer, whatever it says of itself."""
    if score.value is not None and math.isfinite(score.value):
        return score if score.status.has_value else msgspec.structs.replace(score, value=None)
    if not score.status.has_value:
        return score if score.value is None else msgspec.structs.replace(score, value=None)
    return msgspec.structs.replace(
        score, status=ScoreStatus.VERIFIER_ERROR, value=None, detail=f"value {score.value} is not a finite number"
    )


def _missing(index: int, ending: Ending) -> Sample:
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


def _outcome(index: int, outcome: SessionOutcome, last: Sample | None) -> Sample:
    status = {
        SessionOutcome.CLOSED: SampleStatus.SUCCEEDED,
        SessionOutcome.FAILED: SampleStatus.FAILED,
        SessionOutcome.EXPIRED: SampleStatus.EXPIRED,
    }[outcome]
    error = None
    if status is SampleStatus.FAILED:
        error = last.error if last and last.error else None
        error = error or ErrorInfo(code=ErrorCode.INTERNAL, message="the session failed", boundary=Boundary.LEDGER)
    elif status is SampleStatus.EXPIRED:
        error = ErrorInfo(
            code=ErrorCode.EXPIRED, message="the session expired", boundary=Boundary.LEDGER, retryable=True
        )
    if last is None:
        return Sample(index=index, status=status, error=error)
    return Sample(
        index=index,
        turn=last.turn,
        attempt=last.attempt,
        status=status,
        finish_reason=last.finish_reason,
        worker=last.worker,
        timings=last.timings,
        error=error,
    )
