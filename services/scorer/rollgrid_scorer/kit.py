"""Checks for authors of verifiers: fixtures of every kind, hostile texts, determinism, no network.

    from rollgrid_scorer.kit import Case, Kind, check

    def test_my_verifier() -> None:
        check("my_rewards:ShortAnswer", [
            Case(name="right", kind=Kind.FULL, text="42", task={"answer": "42"}),
            Case(name="wrong", kind=Kind.ZERO, text="41", task={"answer": "42"}),
            Case(name="no number", kind=Kind.MALFORMED, text="I do not know", task={"answer": "42"}),
        ]).must_pass()

Everything runs as it does in the scorer: in worker processes that are killed at the deadline.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.scoring import ScoreStatus

from . import watch
from .calls import Item, Shared
from .isolation import Outcome, Pool
from .registry import BUILT_IN, Registry, parse_reference

FIXTURES = Path(__file__).parent / "rewards" / "fixtures"
HASH_SEEDS = (0, 4242, 31337)
"""Of each fresh pool of processes; a set or a dict key order that decides shows up between them."""


class Kind(StrEnum):
    """What a case shows.  `full`, `zero` and `malformed` must be there."""

    FULL = "full"
    PARTIAL = "partial"
    ZERO = "zero"
    MALFORMED = "malformed"
    ERROR = "error"
    TIMEOUT = "timeout"


REQUIRED = (Kind.FULL, Kind.ZERO, Kind.MALFORMED)
_STATUS = {
    Kind.MALFORMED: ScoreStatus.INVALID_OUTPUT,
    Kind.ERROR: ScoreStatus.VERIFIER_ERROR,
    Kind.TIMEOUT: ScoreStatus.VERIFIER_TIMEOUT,
}
_VALUE = {Kind.FULL: 1.0, Kind.ZERO: 0.0, Kind.MALFORMED: 0.0}


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One input and what must come out: the kind's status and value (full 1, zero and malformed 0), unless given.

    `tokens` defaults to the number of words.  Other fields as in `ScoreInput`; `params` are the job's.
    """

    name: str
    kind: Kind
    text: str = ""
    content: str | None = None
    finish_reason: str | None = "stop"
    tokens: int | None = None
    index: int = 0
    prompt_text: str | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    task: dict[str, Any] = {}
    metadata: dict[str, Any] = {}
    params: dict[str, Any] = {}
    timeout_s: float = 10.0
    status: ScoreStatus | None = None
    value: float | None = None
    turn_values: tuple[float | None, ...] | None = None
    turn_texts: tuple[str, ...] = ()


class Row(NamedTuple):
    """One case (or probe) and what was found; `problems` is empty when all is well."""

    name: str
    kind: str
    outcome: Outcome
    problems: tuple[str, ...]


class Report(NamedTuple):
    """The whole check.  `network` says what of "no network" was enforced here."""

    verifier: str
    version: str
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    network: str
    runs: int

    @property
    def passed(self) -> bool:
        return not self.problems and not any(row.problems for row in self.rows)

    def findings(self) -> list[str]:
        return [*self.problems, *(f"{row.name}: {problem}" for row in self.rows for problem in row.problems)]

    def must_pass(self) -> None:
        """Raises AssertionError with every finding."""
        if not self.passed:
            raise AssertionError(f"{self.verifier}: " + "; ".join(self.findings()))


def read_cases(path: Path) -> list[Case]:
    """Cases of a JSON-lines file; raises ValueError naming the line."""
    cases = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            try:
                cases.append(msgspec.json.decode(line, type=Case))
            except msgspec.DecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
    return cases


def shipped(name: str) -> list[Case]:
    """The fixtures of a built-in verifier."""
    return read_cases(FIXTURES / f"{name}.jsonl")


def probes(cases: Sequence[Case]) -> list[Case]:
    """Texts a model may well write, with the task of the first full case: they may score anything, never fail."""
    like = next((case for case in cases if case.kind is Kind.FULL), None)
    if like is None:
        return []
    texts = {
        "empty text": "",
        "white space": " \n\t\r\n ",
        "200,000 characters": "word " * 40_000,
        "control characters": "".join(map(chr, range(32))) + "\x7f\u2028\ufeff\U0010ffff",
        "open brackets": "{[(<" * 2_000,
        "open tags": "<answer>" * 500 + "\\boxed{" * 500 + "```json\n" * 100,
        "digits": "9" * 20_000,
        "null and NaN": "null NaN Infinity -Infinity 1e999999999",
    }
    return [
        msgspec.structs.replace(like, name=f"probe: {name}", text=text, content=None, tokens=len(text.split()))
        for name, text in texts.items()
    ]


def check(verifier: str, cases: Sequence[Case], *, runs: int = 2, timeout_s: float = 10.0) -> Report:
    """Check one verifier: a registered name, "module:attr" or "name=module:attr"."""
    return check_all({verifier: cases}, runs=runs, timeout_s=timeout_s)[verifier]


def check_all(subjects: Mapping[str, Sequence[Case]], *, runs: int = 2, timeout_s: float = 10.0) -> dict[str, Report]:
    """Check several verifiers in the same processes; `runs` pools of fresh ones, each under another hash seed."""
    if not 2 <= runs <= len(HASH_SEEDS):
        raise ValueError(f"runs={runs} is not within 2 to {len(HASH_SEEDS)}")
    return asyncio.run(_check_all(subjects, runs, timeout_s))


async def _check_all(subjects: Mapping[str, Sequence[Case]], runs: int, timeout_s: float) -> dict[str, Report]:
    names = {verifier: _registered(verifier) for verifier in subjects}
    extra = [verifier for verifier in subjects if ":" in verifier]
    everything = {
        verifier: [*cases, *(msgspec.structs.replace(probe, timeout_s=timeout_s) for probe in probes(cases))]
        for verifier, cases in subjects.items()
    }
    found: list[dict[str, list[Outcome]]] = []
    for run in range(runs):
        environment = {"PYTHONHASHSEED": str(HASH_SEEDS[run]), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pool = Pool(2, verifiers=extra, environment=environment, watched=True)
        try:
            await pool.start()
            found.append(
                {
                    verifier: await _outcomes(pool, names[verifier], cases, backwards=bool(run % 2))
                    for verifier, cases in everything.items()
                }
            )
        finally:
            await pool.close()
    network = watch.enforcement()
    return {
        verifier: _report(verifier, subjects[verifier], cases, [run[verifier] for run in found], network)
        for verifier, cases in everything.items()
    }


def _registered(verifier: str) -> str:
    """The name under which workers know it; raises ValueError."""
    if ":" in verifier:
        return parse_reference(verifier)[0]
    if verifier not in Registry():
        raise ValueError(f"no verifier is named {verifier!r}; known: {', '.join(Registry().names)}")
    return verifier


async def _outcomes(pool: Pool, name: str, cases: Sequence[Case], *, backwards: bool) -> list[Outcome]:
    """Each case by a call of its own, in this order or the reverse: what one leaves behind must not change another."""
    found: dict[int, Outcome] = {}
    positions = range(len(cases))
    for position in reversed(positions) if backwards else positions:
        case = cases[position]
        tokens = len(case.text.split()) if case.tokens is None else case.tokens
        item = Item(0, case.text, case.content, case.finish_reason, tokens, case.index, case.turn_texts)
        shared = Shared(case.prompt_text, case.messages, case.task, case.metadata)
        found[position] = (await pool.judge(name, case.params, shared, [item], case.timeout_s))[0]
    return [found[position] for position in positions]


def _report(
    verifier: str, cases: Sequence[Case], everything: Sequence[Case], runs: Sequence[Sequence[Outcome]], network: str
) -> Report:
    rows = []
    for position, case in enumerate(everything):
        outcomes = [run[position] for run in runs]
        is_probe = position >= len(cases)
        problems = _probe_problems(outcomes[0]) if is_probe else _problems(case, outcomes[0])
        problems += _always(outcomes)
        rows.append(Row(case.name, "probe" if is_probe else case.kind.value, outcomes[0], tuple(problems)))
    kinds = {case.kind for case in cases}
    problems = [f"no fixture of kind {kind.value}" for kind in REQUIRED if kind not in kinds]
    names = [case.name for case in cases]
    problems += [f"two fixtures are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    versions = {row.outcome.version for row in rows if row.outcome.version}
    if len(versions) != 1:
        problems.append(f"the version is not one text: {sorted(versions)}" if versions else "there is no version")
    return Report(verifier, next(iter(versions), ""), tuple(rows), tuple(problems), network, len(runs))


def _problems(case: Case, outcome: Outcome) -> list[str]:
    wanted = case.status or _STATUS.get(case.kind, ScoreStatus.SCORED)
    if outcome.status is not wanted:
        return [f"{outcome.status.value}, not {wanted.value}" + (f" ({outcome.detail})" if outcome.detail else "")]
    if not wanted.has_value:
        return []
    problems = []
    value = _VALUE.get(case.kind) if case.value is None else case.value
    if value is not None and outcome.value != value:
        problems.append(f"value {outcome.value}, not {value}")
    elif value is None and outcome.value in (0.0, 1.0):
        problems.append(f"value {outcome.value} is no partial credit")
    if case.turn_values is not None and outcome.turn_values != case.turn_values:
        problems.append(f"turn values {outcome.turn_values}, not {case.turn_values}")
    return problems


def _probe_problems(outcome: Outcome) -> list[str]:
    if outcome.status.has_value:
        return []
    return [f"{outcome.status.value}: what a model writes must get a number ({outcome.detail})"]


def _always(outcomes: Sequence[Outcome]) -> list[str]:
    problems = []
    if len({_comparable(outcome) for outcome in outcomes}) > 1:
        seen = " / ".join(f"{o.value} {o.status.value} {o.detail or ''}".strip() for o in outcomes)
        problems.append(f"not deterministic: {seen}")
    calls = sorted({call for outcome in outcomes for call in outcome.network})
    return problems + [f"asked for the network: {call}" for call in calls]


def _comparable(outcome: Outcome) -> tuple[Any, ...]:
    detail = None if outcome.status is ScoreStatus.VERIFIER_TIMEOUT else outcome.detail
    return outcome.status, repr(outcome.value), detail, outcome.version, repr(outcome.turn_values)


__all__ = ["BUILT_IN", "Case", "Kind", "Report", "Row", "check", "check_all", "probes", "read_cases", "shipped"]
