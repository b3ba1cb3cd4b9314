"""`python -m rollgrid_scorer.verify_test VERIFIER [--fixtures FILE] [--runs N] [--json]`: the kit as a command.

Exit code 0: everything holds; 7: something does not; 2: the verifier or the fixtures cannot be used.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
from rollgrid_runtime.errors import RollgridError

from .kit import BUILT_IN, Report, check, read_cases, shipped

PASSED, UNUSABLE, FAILED = 0, 2, 7


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rollgrid verify test", description="Check a verifier.")
    parser.add_argument("verifier", help="a registered name, module:attr or name=module:attr")
    parser.add_argument("--fixtures", type=Path, help="JSON lines, one case each; built-in verifiers have their own")
    parser.add_argument("--runs", type=int, default=2, choices=(2, 3), help="pools of fresh processes")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds one verdict on a hostile text may take")
    parser.add_argument("--json", action="store_true", help="one JSON object per case, then the summary")
    options = parser.parse_args(argv)
    try:
        if options.fixtures is not None:
            cases = read_cases(options.fixtures)
        else:
            cases = shipped(options.verifier) if options.verifier in BUILT_IN else []
        report = check(options.verifier, cases, runs=options.runs, timeout_s=options.timeout)
    except (OSError, ValueError, RollgridError) as error:
        sys.stderr.write(f"verify test: {error}\n")
        return UNUSABLE
    (_write_json if options.json else _write_table)(report)
    return PASSED if report.passed else FAILED


def _write_json(report: Report) -> None:
    for row in report.rows:
        outcome = row.outcome
        _line({"event": "case", "name": row.name, "kind": row.kind, "status": outcome.status, "value": outcome.value,
               "detail": outcome.detail, "ms": round(outcome.duration_ms, 3), "problems": row.problems})  # fmt: skip
    _line({"event": "summary", "verifier": report.verifier, "version": report.version, "passed": report.passed,
           "runs": report.runs, "network": report.network, "problems": report.findings()})  # fmt: skip


def _line(record: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(record) + b"\n")
    sys.stdout.flush()


def _write_table(report: Report) -> None:
    heads = ("case", "kind", "status", "value", "ms", "")
    lines = [heads]
    for row in report.rows:
        outcome = row.outcome
        value = "-" if outcome.value is None else f"{outcome.value:g}"
        verdict = "; ".join(row.problems) or "ok"
        lines.append((row.name, row.kind, outcome.status.value, value, f"{outcome.duration_ms:.1f}", verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads) - 1)]
    for line in lines:
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        sys.stdout.write("  ".join([*cells, line[-1]]).rstrip() + "\n")
    for problem in report.problems:
        sys.stdout.write(f"PROBLEM  {problem}\n")
    sys.stdout.write(
        f"\n{report.verifier} {report.version or '(no version)'}: {'passed' if report.passed else 'FAILED'}, "
        f"{report.runs} runs in fresh processes under different hash seeds\nnetwork: {report.network}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
