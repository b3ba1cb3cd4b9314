"""The kit for authors of verifiers, and the built-in verifiers under it (A36)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_scorer.kit import BUILT_IN, Case, Kind, check, check_all, probes, read_cases, shipped

FLAWED = "tests.support.flawed_verifiers"
ROOT = Path(__file__).resolve().parents[3]
CASES = [
    Case(name="right", kind=Kind.FULL, text="it is\n\n42", task={"answer": "42"}, turn_values=(0.0, None, 1.0)),
    Case(name="wrong", kind=Kind.ZERO, text="41", task={"answer": "42"}),
    Case(name="nothing", kind=Kind.MALFORMED, text=" ", task={"answer": "42"}),
    Case(name="no reference", kind=Kind.ERROR, text="42"),
]

WRONG = [
    Case(name="a", kind=Kind.FULL, text="41", task={"answer": "42"}),
    Case(name="b", kind=Kind.ZERO, text="", task={"answer": "42"}),
    Case(name="b", kind=Kind.PARTIAL, text="42", task={"answer": "42"}),
    Case(name="c", kind=Kind.FULL, text="42", task={"answer": "42"}, turn_values=(0.5,)),
]

SESSION = [
    Case(
        name="two turns", kind=Kind.PARTIAL, text="bad", value=0.5, messages=({"role": "user", "content": "?"},),
        turn_texts=("good", "bad"), turn_values=(1.0, 0.0),
    )
]  # fmt: skip


def test_A36_built_in_verifiers_hold_their_fixtures_in_fresh_processes() -> None:
    reports = check_all({name: shipped(name) for name in BUILT_IN})
    assert {name: report.findings() for name, report in reports.items()} == {name: [] for name in BUILT_IN}
    assert all(len(report.rows) >= 8 + 4 for report in reports.values())


def test_the_kit_sees_what_is_wrong() -> None:
    names = ["Sound", "HashOrder", "Counting", "Phoning", "Fragile", "Sleeping", "Nameless"]
    bare = [case for case in CASES if case.name != "right"]
    plain = [Case(name="right", kind=Kind.FULL, text="it is 42", task={"answer": "42"}), *bare]
    cases = {f"{name}={FLAWED}:{name}": plain for name in names}
    cases[f"Sound={FLAWED}:Sound"] = CASES
    cases[f"Expected={FLAWED}:Sound"] = WRONG
    cases["Session=tests.support.verifiers:Attentive"] = SESSION
    reports = {key.partition("=")[0]: report for key, report in check_all(cases, timeout_s=1.0).items()}
    findings = {name: " | ".join(report.findings()) for name, report in reports.items()}
    reports["Sound"].must_pass()
    assert reports["Sound"].version == "3"
    assert "right: not deterministic" in findings["HashOrder"]
    assert "not deterministic: 1.0 scored call" in findings["Counting"]
    assert "right: asked for the network: socket.getaddrinfo" in findings["Phoning"]
    assert "control characters: verifier_error: what a model writes must get a number" in findings["Fragile"]
    assert "open brackets: verifier_error" in findings["Fragile"]
    assert "200,000 characters: verifier_timeout" in findings["Sleeping"]
    assert findings["Nameless"] == "there is no version"
    assert reports["Session"].rows[0].problems == (), "a session's turns are its verifier's to see"
    assert reports["Session"].rows[0].outcome.detail == "user|good/bad|1|stop"
    assert reports["Expected"].findings() == [
        "no fixture of kind malformed",
        "two fixtures are named 'b'",
        "a: value 0.0, not 1.0",
        "b: invalid_output, not scored (nothing)",
        "b: value 1.0 is no partial credit",
        "c: turn values (1.0,), not (0.5,)",
    ]
    with pytest.raises(AssertionError, match="not deterministic"):
        reports["Counting"].must_pass()


def test_probes_need_a_full_case_to_be_like() -> None:
    assert probes(CASES[1:]) == []
    assert all(probe.task == {"answer": "42"} for probe in probes(CASES))


def test_unknown_verifiers_and_runs_are_refused() -> None:
    with pytest.raises(ValueError, match="no verifier is named 'nobody'"):
        check("nobody", CASES)
    with pytest.raises(ValueError, match="runs=9"):
        check("numeric", CASES, runs=9)


def test_fixture_files_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text('{"name": "a", "kind": "full"}\n\n{"name": "b", "kind": "half"}\n')
    with pytest.raises(ValueError, match=r"line 3: Invalid enum value 'half'"):
        read_cases(path)
    path.write_text('{"name": "a", "kind": "timeout", "status": "verifier_timeout"}\n')
    assert read_cases(path)[0].status is ScoreStatus.VERIFIER_TIMEOUT


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollgrid_scorer.verify_test", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, cwd=ROOT)


def test_the_command_prints_a_table_or_lines_and_says_so_by_its_code(tmp_path: Path) -> None:
    good = run_command("format")
    assert good.returncode == 0, good.stderr
    assert "format 1: passed, 2 runs in fresh processes" in good.stdout
    assert "network: " in good.stdout
    fixtures = tmp_path / "cases.jsonl"
    fixtures.write_text('{"name": "wrong", "kind": "full", "text": "41", "task": {"answer": "42"}}\n')
    bad = run_command(f"{FLAWED}:Sound", "--fixtures", str(fixtures), "--json")
    assert bad.returncode == 7, bad.stderr
    lines = [json.loads(line) for line in bad.stdout.splitlines()]
    assert lines[0]["problems"] == ["value 0.0, not 1.0"]
    assert lines[-1]["event"] == "summary"
    assert not lines[-1]["passed"]
    assert run_command("no-such-verifier").returncode == 2
    assert run_command("format", "--fixtures", str(tmp_path / "none")).returncode == 2
