"""Scores: what to run, what came out, and what a missing number means.

Only `scored` and `invalid_output` carry a number.  Every other status is a failure of the
scoring machinery: its value is null, it stays out of group baselines and is counted beside
every mean.  Retries are for infrastructure failures only and raise `attempt`.
"""

from __future__ import annotations

import keyword
from enum import StrEnum
from typing import Any

import msgspec


class ScorerKind(StrEnum):
    """Who must act next on a finished sample; the `todo` token of its subject."""

    VERIFIER = "verifier"
    WEBHOOK = "webhook"
    REWARD_MODEL = "reward-model"
    JUDGE = "judge"
    DONE = "done"


class ScoreStatus(StrEnum):
    SCORED = "scored"
    INVALID_OUTPUT = "invalid_output"
    VERIFIER_ERROR = "verifier_error"
    VERIFIER_TIMEOUT = "verifier_timeout"
    JUDGE_ERROR = "judge_error"
    JUDGE_UNPARSEABLE = "judge_unparseable"
    SANDBOX_ERROR = "sandbox_error"
    NOT_RUN = "not_run"
    MASKED = "masked"

    @property
    def has_value(self) -> bool:
        return self in (ScoreStatus.SCORED, ScoreStatus.INVALID_OUTPUT)


class ScorerSpec(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One scorer asked for by a job: `type` is the registered scorer, `name` its label, unique in the job.

    `weight` enters reward = Σ weight · value; a `gate` multiplies the sum by its value instead.
    """

    name: str
    type: str
    kind: ScorerKind = ScorerKind.VERIFIER
    params: dict[str, Any] = {}
    weight: float = 1.0
    gate: bool = False
    timeout_s: float = 10.0


class Score(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One scorer's verdict on one sample; `scorer` is the spec's name, `value` None unless `status.has_value`."""

    scorer: str
    status: ScoreStatus
    value: float | None = None
    version: str = ""
    detail: str | None = None
    duration_ms: float = 0.0
    attempt: int = 1
    turn_values: tuple[float | None, ...] = ()


class SampleScores(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Verdicts on the sample `index` (turn `turn`) as finished by `attempt`."""

    index: int
    turn: int = 0
    attempt: int = 1
    scores: tuple[Score, ...]


class SamplesScored(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="samples_scored"):
    """Event: a scorer has judged samples of one group.  scorer → ledger, next scorer.

    `finished_seq` is the RG_SAMPLES sequence of the `SamplesFinished` that was judged: verdicts
    on a superseded finish are dropped.
    """

    tenant: str
    run: str
    group_id: str
    job_seq: int
    finished_seq: int
    results: tuple[SampleScores, ...]
    scorer_id: str = ""
    traceparent: str | None = None


def combine(specs: tuple[ScorerSpec, ...], scores: tuple[Score, ...]) -> tuple[float | None, ScoreStatus]:
    """The sample's reward and status: gates multiply the weighted sum; any null makes it null.

    The status is that of the first scorer (in the order asked) that has no value, `not_run` when
    one has not answered, else `invalid_output` if any said so, else `scored`.
    """
    by_name = {score.scorer: score for score in scores}
    total, gates, status = 0.0, list[float](), ScoreStatus.SCORED
    for spec in specs:
        score = by_name.get(spec.name)
        if score is None:
            return None, ScoreStatus.NOT_RUN
        if not score.status.has_value or score.value is None:
            return None, score.status
        if score.status is ScoreStatus.INVALID_OUTPUT:
            status = score.status
        if spec.gate:
            gates.append(score.value)
        else:
            total += spec.weight * score.value
    for gate in gates:
        total *= gate
    return total, status


def reward_formula(specs: tuple[ScorerSpec, ...]) -> str | None:
    """What `combine` computes from these scorers' values: `(1*numeric + 0.2*format) * gate(length)`.

    Exact: evaluated from left to right in doubles it gives the very reward.  Weights are written so that
    reading them gives the same double; a name that is no identifier stands in quotes (Python can parse it).
    """
    if not specs:
        return None
    terms = ""
    for spec in specs:
        if not spec.gate:
            sign = " - " if spec.weight < 0 else " + "
            terms += (sign if terms else sign.strip(" +")) + f"{_number(abs(spec.weight))}*{_name(spec.name)}"
    gates = "".join(f" * gate({_name(spec.name)})" for spec in specs if spec.gate)
    return f"({terms}){gates}" if gates and terms else (terms or "0") + gates


def _number(value: float) -> str:
    return repr(float(value)).removesuffix(".0")


def _name(name: str) -> str:
    return name if name.isidentifier() and not keyword.iskeyword(name) else f'"{name}"'


def next_todo(specs: tuple[ScorerSpec, ...], after: ScorerKind | None = None) -> ScorerKind:
    """The scorer kind that must act next, in declaration order of `ScorerKind`; `done` when none."""
    kinds = list(ScorerKind)
    start = 0 if after is None else kinds.index(after) + 1
    wanted = {spec.kind for spec in specs}
    return next((kind for kind in kinds[start:] if kind in wanted), ScorerKind.DONE)
