"""What callers hand to `submit`: sent as they mean it, or refused before anything is sent."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from rollgrid import Unsendable
from rollgrid.calls import submit
from rollgrid.tasks import submission, task_body
from rollgrid_contracts.jobs import SamplingParams

NAN = float("nan")


def body(*tasks: Any, **more: Any) -> dict[str, Any]:
    sampling = more.pop("sampling", {"max_tokens": 4})
    found: dict[str, Any] = json.loads(submission(tasks, n=1, sampling=sampling, run="r", policy=None, **more))
    return found


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"sampling": {"max_tokens": 4, "temperature": NAN}}, "sampling.temperature"),
        ({"sampling": SamplingParams(max_tokens=4, top_p=float("inf"))}, "sampling.top_p"),
        ({"deadline_s": NAN}, "deadline_s"),
        ({"metadata": {"a": [1.0, {"b": NAN}]}}, r"metadata.a\[1\].b"),
    ],
)
def test_what_json_would_turn_into_a_default_is_refused(more: dict[str, Any], named: str) -> None:
    with pytest.raises(Unsendable, match=named):
        body("x", **more)


@pytest.mark.parametrize(
    "task", [{"prompt": "x", "task": {"answer": NAN}}, {"prompt": "x", "task": {"answer": np.float32("nan")}}, "\ud800"]
)
def test_tasks_that_json_cannot_say_are_refused(task: Any) -> None:
    with pytest.raises(Unsendable):
        body(task)


def test_numbers_that_json_can_say_go_through() -> None:
    task = {"prompt_token_ids": np.array([1, 2]), "task": {"answer": np.float64(0.5), "table": np.eye(2)}}
    assert body(task)["tasks"] == [{"prompt_token_ids": [1, 2], "task": {"answer": 0.5, "table": [[1, 0], [0, 1]]}}]


def test_no_message_of_a_list_is_dropped() -> None:
    mixed = [{"role": "user", "content": "hi"}, "and this"]
    assert task_body(mixed) == {"messages": mixed}  # for the server to refuse by name


@pytest.mark.parametrize("key", ["", "a\nb", "ключ"])
def test_an_idempotency_key_that_no_header_can_carry_is_refused(key: str) -> None:
    with pytest.raises(Unsendable):
        submit(b"{}", key)


def test_what_versions_and_pace_a_batch_asks_for_is_sent_only_when_given() -> None:
    assert not {"weights", "pin", "on_refresh", "pace"} & set(body("x"))
    asked = body("x", weights={"min_version": 3}, pin=True, on_refresh="keep", pace={"batch": 4, "max_staleness": 1})
    assert (asked["weights"], asked["pin"], asked["on_refresh"], asked["pace"]) == (
        {"min_version": 3},
        True,
        "keep",
        {"batch": 4, "max_staleness": 1},
    )
