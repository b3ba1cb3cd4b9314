"""exact_match, and how answers are found in text."""

from __future__ import annotations

import pytest
from rollgrid_scorer.rewards.base import ScoreInput, TaskError
from rollgrid_scorer.rewards.exact import ExactMatch
from rollgrid_scorer.rewards.extraction import Extract, answer_tag, boxed, extract


def said(text: str, content: str | None = None, **task: object) -> ScoreInput:
    return ScoreInput(text=text, content=content, task=dict(task))


@pytest.mark.parametrize(
    ("params", "text", "answer", "value"),
    [
        ({}, " Paris \n", "Paris", 1.0),
        ({}, "paris", "Paris", 0.0),
        ({"casefold": True}, "PARIS", "paris", 1.0),
        ({"casefold": True}, "STRASSE", "straße", 1.0),
        ({"strip": False}, "Paris ", "Paris", 0.0),
        ({}, "b", ["a", "b"], 1.0),
        ({}, "7", 7, 1.0),
        ({}, "", "", 1.0),
        ({"extract": "tags"}, "so <answer> 4 </answer>", "4", 1.0),
        ({"extract": "last_line"}, "steps\n\n4\n\n", "4", 1.0),
    ],
)
def test_values(params: dict[str, object], text: str, answer: object, value: float) -> None:
    assert ExactMatch(**params).score(said(text, answer=answer)).value == value  # type: ignore[arg-type]


def test_parameter_answer_and_field() -> None:
    assert ExactMatch(answer="x").score(said("x")).value == 1.0
    assert ExactMatch(field="gold").score(said("x", gold="x")).value == 1.0


def test_content_behind_the_reasoning_is_judged() -> None:
    assert ExactMatch().score(said("<think>4</think>5", content="5", answer="5")).value == 1.0


def test_no_answer_is_invalid_output_not_an_error() -> None:
    verdict = ExactMatch(extract="tags").score(said("4", answer="4"))
    assert (verdict.value, verdict.invalid_output) == (0.0, True)


@pytest.mark.parametrize("task", [{}, {"answer": None}, {"answer": {"a": 1}}, {"answer": []}, {"answer": [None]}])
def test_a_task_without_reference_raises(task: dict[str, object]) -> None:
    with pytest.raises(TaskError):
        ExactMatch().score(ScoreInput(text="x", task=task))


def test_unknown_extract_raises() -> None:
    with pytest.raises(TaskError, match="last_line"):
        ExactMatch(extract="nowhere")


def test_extraction() -> None:
    assert answer_tag("<answer>1</answer> no: <answer>\n2 </answer>") == "2"
    assert answer_tag("<answer>1") is None
    assert answer_tag("</answer><answer>") is None
    assert extract("a\n b \n\n", Extract.AUTO) == "b"
    assert extract("a\n<answer></answer>", Extract.AUTO) == ""
    assert extract(" \n ", Extract.AUTO) is None
    assert extract("a\nb", Extract.WHOLE) == "a\nb"
    assert boxed(r"\boxed{1} then \boxed{\frac{1}{2}} .") == r"\frac{1}{2}"
    assert boxed(r"\boxed{1") is None
