"""Bodies are read strictly, and every refusal names its field."""

from __future__ import annotations

import msgspec
import pytest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_ingest.openai_schema import CompletionRequest
from rollgrid_ingest.rollout_schema import RolloutRequest
from rollgrid_ingest.wire import check_payload, decode_json
from rollgrid_runtime.errors import RollgridError

ROLLOUT = msgspec.json.Decoder(RolloutRequest)
COMPLETION = msgspec.json.Decoder(CompletionRequest)


def refusal(body: bytes, decoder: msgspec.json.Decoder = ROLLOUT) -> RollgridError:
    with pytest.raises(RollgridError) as refused:
        decode_json(body, decoder)
    return refused.value


@pytest.mark.parametrize(
    ("body", "code", "field"),
    [
        (b"", ErrorCode.INVALID_REQUEST, None),
        (b"  ", ErrorCode.INVALID_REQUEST, None),
        (b"[]", ErrorCode.INVALID_REQUEST, None),
        (b"{", ErrorCode.INVALID_REQUEST, None),
        (b'{"run":"a","tasks":[]} x', ErrorCode.INVALID_REQUEST, None),
        (b'{"run":"\xff","tasks":[]}', ErrorCode.INVALID_REQUEST, None),
        (b'{"run":"\\ud800","tasks":[]}', ErrorCode.INVALID_REQUEST, None),
        (b'{"run":"a"}', ErrorCode.INVALID_REQUEST, "tasks"),
        (b'{"run":3,"tasks":[]}', ErrorCode.INVALID_REQUEST, "run"),
        (b'{"run":"a","tasks":[],"x":1}', ErrorCode.UNKNOWN_FIELD, "x"),
        (b'{"run":"a","tasks":[{"prompt":"a","y":1}]}', ErrorCode.UNKNOWN_FIELD, "tasks[0].y"),
        (b'{"run":"a","tasks":[{"prompt":"a","sampling":{"z":1}}]}', ErrorCode.UNKNOWN_FIELD, "tasks[0].sampling.z"),
        (b'{"run":"a","tasks":[{"prompt_token_ids":[1,"b"]}]}', ErrorCode.INVALID_REQUEST, "tasks[0].prompt_token_ids[1]"),
        (b'{"run":"a","tasks":[],"deadline_s":NaN}', ErrorCode.INVALID_REQUEST, None),
        (b'{"run":"a","tasks":[],"deadline_s":1e999}', ErrorCode.INVALID_REQUEST, "deadline_s"),
        (b'{"run":"a","tasks":[],"metadata":' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", ErrorCode.INVALID_REQUEST, None),
    ],
)  # fmt: skip
def test_refusals(body: bytes, code: ErrorCode, field: str | None) -> None:
    found = refusal(body)
    assert found.code is code
    assert found.field == field
    assert found.http_status == 400


def test_booleans_are_not_token_ids() -> None:
    assert refusal(b'{"prompt":[true]}', COMPLETION).field == "prompt[0]"
    assert refusal(b'{"prompt":[1.5]}', COMPLETION).field == "prompt[0]"


def test_payloads_must_fit_the_wire_between_services() -> None:
    check_payload({"a": [1, {"b": 2**64 - 1}]}, "task", 4)
    with pytest.raises(RollgridError) as deep:
        check_payload({"a": [[[[1]]]]}, "task", 4)
    assert deep.value.limit == "max_depth=4"
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(RollgridError):
            check_payload({"a": number}, "task", 4)
