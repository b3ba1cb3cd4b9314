"""Parts of scoring again: which scorers run, how verdicts are compared, what the process says of bad input."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer
from rollgrid.cli.agreement import Agreement
from rollgrid.cli.rescoring import Choice, chosen_specs
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec, ScoreStatus

RECORDED = (
    ScorerSpec(name="right", type="numeric", params={"tolerance": 0.1}),
    ScorerSpec(name="form", type="regex", params={"pattern": "a"}),
    ScorerSpec(name="form2", type="regex", params={"pattern": "b"}),
    ScorerSpec(name="hook", type="webhook", kind=ScorerKind.WEBHOOK),
)


def chosen(*texts: str) -> list[tuple[str, str, object]]:
    specs = chosen_specs([Choice(text, number) for number, text in enumerate(texts)], RECORDED)
    return [(spec.name, spec.type, spec.params.get("pattern")) for spec in specs]


def test_which_scorers_run() -> None:
    assert [name for name, *_ in chosen()] == ["right", "form", "form2"]  # webhooks are not run here
    assert chosen("form") == [("form", "regex", "a")]
    assert chosen("regex") == [("form", "regex", "a"), ("form2", "regex", "b")]
    assert chosen("right", "form2=my.module:Other") == [("right", "numeric", None), ("form2", "rerun-1", "b")]
    assert chosen('{"type": "length", "params": {"max": 3}}') == [("length", "length", None)]
    assert chosen("new") == [("new", "new", None)]
    assert Choice("a=my.module:Other", 3).verifier == "rerun-3=my.module:Other"
    for bad in ("a=module", "=m:x", '{"name": "x"}', '{"type": 7}', "{"):
        with pytest.raises(typer.BadParameter):
            Choice(bad, 0)


def score(value: float | None, status: ScoreStatus = ScoreStatus.SCORED, **more: object) -> Score:
    return Score(scorer="s", status=status, value=value, **more)  # type: ignore[arg-type]


def test_a_null_is_never_a_zero_in_the_comparison() -> None:
    found = Agreement("s")
    failed = score(None, ScoreStatus.VERIFIER_ERROR)
    assert found.add("g", 0, score(1.0), score(1.0, detail="new words")) is None
    assert found.add("g", 1, failed, failed) is None
    assert found.add("g", 2, score(0.0), failed) is not None
    assert found.add("g", 3, score(0.0), score(0.25)) is not None
    assert found.add("g", 4, score(1.0, turn_values=(1.0,)), score(1.0, turn_values=(0.0,))) is not None
    assert found.add("g", 5, None, score(1.0)) is None
    facts = found.to_dict()
    assert (facts["samples"], facts["compared"], facts["equal"], facts["changed"]) == (6, 5, 2, 3)
    assert (facts["old"]["mean"], facts["old"]["numbers"], facts["old"]["nulls"]) == (0.5, 4, 2)
    assert (facts["new"]["mean"], facts["new"]["numbers"], facts["new"]["nulls"]) == (0.8125, 4, 2)
    assert facts["old"]["statuses"] == {"absent": 1, "scored": 4, "verifier_error": 1}
    assert facts["largest_difference"] == 0.25


@pytest.mark.parametrize(
    ("arguments", "data", "message"),
    [
        (["--verifier", "nonsense"], b"", "name=module:attr"),
        ([], b"\x05\x00\x00\x00\xc1\xc1\xc1\xc1\xc1", "rerun: "),
        ([], b"\x05\x00", "ends within a record"),
    ],
)
def test_the_process_says_what_is_wrong_with_its_input(arguments: list[str], data: bytes, message: str) -> None:
    command = [sys.executable, "-m", "rollgrid_scorer.rerun", *arguments]
    done = subprocess.run(command, input=data, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert message in done.stderr.decode()
