"""Every refusal and failure as the OpenAI error envelope."""

from __future__ import annotations

import math

import msgspec
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.errors import RollgridError
from starlette.responses import Response

from . import metrics
from .rollout_schema import ErrorAnswer, ErrorBody

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_type(status: int) -> str:
    """The envelope's `type`, as OpenAI names it."""
    return _KINDS.get(status) or ("server_error" if status >= 500 else "invalid_request_error")


def error_answer(error: RollgridError, request_id: str | None = None) -> ErrorAnswer:
    """The envelope itself; counted."""
    metrics.REFUSED.labels(error.code.value).inc()
    body = ErrorBody(
        message=error.message,
        type=error_type(error.http_status),
        param=error.field,
        code=error.code.value,
        retryable=error.retryable,
        boundary=error.boundary.value,
        limit=error.limit,
        request_id=request_id,
    )
    return ErrorAnswer(error=body)


def error_response(error: RollgridError, request_id: str | None = None) -> Response:
    answer = error_answer(error, request_id)
    headers = {}
    if error.retry_after_s is not None and error.retryable:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code is ErrorCode.UNAUTHENTICATED:
        headers["www-authenticate"] = "Bearer"
    return Response(msgspec.json.encode(answer), error.http_status, headers, media_type="application/json")


def internal_error() -> RollgridError:
    """What the caller learns of a bug: the request id leads to the log."""
    return RollgridError(ErrorCode.INTERNAL, "internal error")
