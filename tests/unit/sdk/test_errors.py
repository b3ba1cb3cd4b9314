"""From an HTTP answer to a typed exception."""

from __future__ import annotations

import email.utils
import json
import time
from typing import Any

import pytest
from rollgrid import errors
from rollgrid.errors import api_error, retry_after_seconds
from rollgrid_contracts.failures import ErrorCode


def answer(status: int, error: dict[str, Any], headers: dict[str, str] | None = None) -> errors.RollgridAPIError:
    return api_error(status, headers or {}, json.dumps({"error": error}).encode())


def test_the_envelope_is_kept_whole() -> None:
    error = answer(
        400,
        {"code": "limit_exceeded", "message": "n is too large", "field": "n", "limit": "1024", "boundary": "ingest"},
        {"x-request-id": "req-1"},
    )
    assert isinstance(error, errors.LimitExceeded)
    assert isinstance(error, errors.InvalidRequest)
    assert (error.code, error.field, error.limit, error.status) == ("limit_exceeded", "n", "1024", 400)
    assert (error.retryable, error.request_id) == (False, "req-1")
    assert str(error) == "limit_exceeded: n is too large (field=n, limit=1024)"


def test_openai_style_param_names_the_field() -> None:
    assert answer(400, {"code": "invalid_request", "message": "?", "param": "top_p"}).field == "top_p"


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_of_the_contract_becomes_an_exception(code: ErrorCode) -> None:
    error = answer(400, {"code": code.value, "message": "m", "retryable": True})
    assert error.code == code.value
    assert error.retryable


def test_a_code_of_a_newer_server_is_still_typed_by_its_status() -> None:
    assert type(answer(422, {"code": "brand_new", "message": "m"})) is errors.InvalidRequest
    assert type(answer(500, {"code": "brand_new", "message": "m"})) is errors.ServerError


@pytest.mark.parametrize(
    ("status", "kind", "retryable"),
    [
        (401, errors.Unauthenticated, False),
        (404, errors.NotFound, False),
        (413, errors.PayloadTooLarge, False),
        (429, errors.QueueFull, True),
        (502, errors.NotReady, True),
        (503, errors.NotReady, True),
        (504, errors.NotReady, True),
        (500, errors.ServerError, False),
    ],
)
def test_a_proxys_answer_is_typed_by_its_status(status: int, kind: type, retryable: bool) -> None:
    error = api_error(status, {}, b"<html>bad gateway</html>")
    assert type(error) is kind
    assert error.retryable is retryable
    assert "bad gateway" in error.message


def test_retry_after_in_both_forms() -> None:
    assert retry_after_seconds("2.5") == 2.5
    assert retry_after_seconds("-1") == 0.0
    assert retry_after_seconds(None) is None
    assert retry_after_seconds("soon") is None
    soon = retry_after_seconds(email.utils.formatdate(time.time() + 60, usegmt=True))
    assert soon is not None
    assert 50 < soon <= 60
