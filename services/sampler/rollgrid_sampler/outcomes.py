"""The terminal entry of one sample: what the engine made of it, or why it made nothing."""

from __future__ import annotations

import time

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import SampleGroup, VersionSpan
from rollgrid_contracts.samples import FinishReason, Parsed, Sample, SampleStatus, Timings

from . import metrics
from .engines.base import Generated
from .jobs import HeldJob
from .weights import Weights


class Outcomes:
    """Of this worker; notes when the first tokens of a version came."""

    def __init__(self, weights: Weights, worker: str) -> None:
        self._weights, self._worker = weights, worker
        self._fresh: set[int] = set()

    def succeeded(
        self, held: HeldJob, index: int, result: Generated, parsed: Parsed | None, seed: int | None, started: float
    ) -> Sample:
        weights, tokens = self._weights, len(result.token_ids)
        spans = result.version_spans or (VersionSpan(version=weights.current, start=0, end=tokens),)
        self._observe_fresh(spans, result)
        fingerprint, confirmed = weights.fingerprint(spans[-1].version)
        return Sample(
            index=index,
            turn=turn(held.job),
            attempt=held.attempt,
            status=SampleStatus.SUCCEEDED,
            token_ids=TokenIds.of(result.token_ids),
            logprobs=Floats(result.logprobs.tobytes()),
            top_logprobs=result.top_logprobs,
            text=result.text,
            parsed=parsed,
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            version_spans=spans,
            weight_fingerprint=fingerprint,
            fingerprint_confirmed=confirmed,
            seed=seed,
            resumed_from=result.resumed_from,
            worker=self._worker,
            cached_tokens=result.cached_tokens,
            timings=Timings(
                dequeued_at=held.dequeued_at,
                started_at=started,
                first_token_at=result.first_token_at,
                finished_at=time.time(),
            ),
            prompt_logprobs=result.prompt_logprobs,
            node=node(held.job),
        )

    def _observe_fresh(self, spans: tuple[VersionSpan, ...], result: Generated) -> None:
        """The first token of a version: known to the millisecond where a sample began on it, else by its end."""
        for span in spans:
            if span.version in self._fresh:
                continue
            self._fresh.add(span.version)
            committed = self._weights.committed_at(span.version)
            if committed:
                began_on_it = span.start == 0 and not result.resumed_from and result.first_token_at
                metrics.FRESH_LAG.observe(max(0.0, (result.first_token_at if began_on_it else time.time()) - committed))

    def failed(
        self,
        held: HeldJob,
        index: int,
        error: ErrorInfo,
        seed: int | None,
        started: float,
        *,
        status: SampleStatus = SampleStatus.FAILED,
        reason: FinishReason = FinishReason.ERROR,
    ) -> Sample:
        return Sample(
            index=index,
            turn=turn(held.job),
            attempt=held.attempt,
            status=status,
            finish_reason=reason,
            seed=seed,
            worker=self._worker,
            timings=Timings(dequeued_at=held.dequeued_at, started_at=started, finished_at=time.time()),
            error=error,
            node=node(held.job),
        )

    def expired(self, held: HeldJob, index: int, started: float) -> Sample:
        """A turn whose deadline came first."""
        error = ErrorInfo(
            code=ErrorCode.EXPIRED,
            message="the turn was not finished at its deadline",
            boundary=Boundary.ENGINE,
            retryable=True,
            field="deadline_s",
        )
        status, reason = SampleStatus.EXPIRED, FinishReason.ABORT
        return self.failed(held, index, error, None, started, status=status, reason=reason)

    def cancelled(self, held: HeldJob, index: int, seed: int | None, started: float) -> Sample:
        """A turn that its caller gave up; its session goes on."""
        error = ErrorInfo(code=ErrorCode.CANCELLED, message="the turn was cancelled", boundary=Boundary.INGEST)
        return self.failed(held, index, error, seed, started, status=SampleStatus.CANCELLED, reason=FinishReason.ABORT)


def turn(job: SampleGroup) -> int:
    return job.session.turn if job.session is not None else 0


def node(job: SampleGroup) -> TurnNode | None:
    """Where the turn stands in its session's tree."""
    return job.session.node if job.session is not None else None
