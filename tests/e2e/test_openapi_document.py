"""A26, A49: requests made from the OpenAPI document find no 5xx, no hang, and nothing the document does not say.

Twice over: bodies as the document allows them, which are mostly refused, and the same around a core
that is valid, which mostly go all the way through a scripted sampler, the ledger and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.stack import POLICY, Stack, scripted, stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
REQUEST_S = 20.0
DEADLINE_S = 8.0
"""Whatever a request asks for, a door must answer within this and some grace."""

CORES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/score_tokens": {"token_ids": [5, 6, 7]},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 4}},
    "/v1/rollouts": {"run": "fuzz", "n": 2, "sampling": {"max_tokens": 4}, "tasks": [{"prompt": "hi"}]},
}
FREE = {"model", "deadline_s", "weights"}
"""Fields of the document that are not put around a core: they say who answers and when."""

BOUNDED = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    limits = {"MAX_N": 8, "MAX_GROUPS": 8, "MAX_SAMPLES": 64, "MAX_WAIT_S": 0.5, "MAX_DEADLINE_S": DEADLINE_S}
    limits |= {"INTERACTIVE_DEADLINE_S": DEADLINE_S, "BATCH_DEADLINE_S": DEADLINE_S, "REPLY_GRACE_S": 2}
    env = {f"ROLLGRID_INGEST_{name}": str(value) for name, value in limits.items()}
    with stack(scripted(samplers=1, slots=64, env=env)) as running:
        yield running


@pytest.fixture(scope="module")
def operations(pipe: Stack) -> list[Any]:
    """Every route and method of the document."""
    schema = schemathesis.openapi.from_url(f"{pipe.url}/openapi.json")
    found: list[Any] = list(schema.get_all_operations())
    return [result.ok() for result in found]


def fuzz(operation: Any, check: Callable[[schemathesis.Case], None]) -> None:
    """`check` on a bounded number of requests to one operation."""

    @BOUNDED
    @given(case=operation.as_strategy())
    def requests(case: schemathesis.Case) -> None:
        check(case)

    requests()


def test_A49_what_the_document_allows_is_answered_as_it_says(operations: list[Any], subtests: pytest.Subtests) -> None:
    assert len(operations) > 15
    for operation in operations:
        with subtests.test(operation.label):
            fuzz(operation, answered)


def test_A49_what_goes_all_the_way_comes_back(operations: list[Any], subtests: pytest.Subtests) -> None:
    def within(case: schemathesis.Case) -> None:
        body = case.body if isinstance(case.body, dict) else {}
        around = {name: value for name, value in body.items() if name not in FREE}
        case.body = {**around, **CORES[case.path], "model": POLICY}
        answered(case)

    cored = [operation for operation in operations if operation.path in CORES]
    assert {operation.path for operation in cored} == set(CORES)
    for operation in cored:
        with subtests.test(operation.label):
            fuzz(operation, within)


def answered(case: schemathesis.Case) -> None:
    """Within `REQUEST_S`, with a documented status and shape, and never by a bug."""
    case.headers.pop("accept", None)
    response = case.call(timeout=REQUEST_S)
    if response.status_code == 504 and response.json()["error"]["code"] == "expired":
        return  # a deadline of its own that nobody could meet
    if response.headers["content-type"][0].startswith("text/event-stream"):
        whole_stream(response.text)
        case.validate_response(response, checks=CHECKS[:3])  # it takes the document's string for the shape of an event
    else:
        case.validate_response(response, checks=CHECKS)


def whole_stream(text: str) -> None:
    """Events of JSON; the last one says that all was sent, or why not."""
    data = [event.removeprefix("data: ") for event in text.split("\n\n") if event and not event.startswith(":")]
    assert data
    assert data[-1] == "[DONE]" or "error" in json.loads(data[-1]), text[-2000:]
    for event in data[:-1]:
        assert isinstance(json.loads(event), dict)


def test_A49_every_route_of_the_clients_is_in_the_document(pipe: Stack) -> None:
    paths = httpx2.get(f"{pipe.url}/openapi.json", timeout=20).json()["paths"]
    assert set(CORES) <= set(paths)
    assert {"/v1/models", "/v1/models/{model}"} <= set(paths)


def test_A49_after_all_that_the_pipe_is_whole(pipe: Stack) -> None:
    for path, core in CORES.items():
        answer = httpx2.post(pipe.url + path, json={**core, "model": POLICY}, timeout=REQUEST_S)
        assert answer.status_code in (200, 202), (path, answer.text)
