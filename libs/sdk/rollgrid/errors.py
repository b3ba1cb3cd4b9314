"""What can go wrong, as exceptions a trainer can catch.

`RollgridError` is the root.  An answer of the server that says no is a `RollgridAPIError`, and
its subclass follows from the envelope's `code`; `Unreachable` means that no answer came at all,
`DeadlineExceeded` that the caller's own time ran out.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import time
from collections.abc import Mapping
from typing import Any

from rollgrid_contracts.failures import ErrorInfo


class RollgridError(Exception):
    """Root of everything this package raises on purpose."""


class ConfigurationError(RollgridError):
    """No server is named and none is running here, or a local file cannot be used."""


class Unsendable(ConfigurationError, ValueError):
    """A task or an option holds what a request cannot say (NaN, half a character); nothing was sent."""


class Unreachable(RollgridError):
    """No answer came: connection refused, reset, or silent for the whole outage budget."""


class DeadlineExceeded(RollgridError, TimeoutError):
    """The time the caller gave ran out.  What was submitted goes on; nothing is lost."""


class VersionEnded(RollgridError):
    """A published version does not run and will not come to by itself.  `code`, `field` and `limit` as in `RollgridAPIError`."""

    verb = "ended"

    def __init__(
        self, policy: str, version: int, code: str, message: str, field: str | None, limit: str | None
    ) -> None:
        super().__init__(f"{policy}@{version} {self.verb}: {message}")
        self.policy, self.version = policy, version
        self.code, self.field, self.limit = code, field, limit


class VersionRefused(VersionEnded):
    """It was examined and refused; it will never run."""

    verb = "was refused"


class VersionRolledBack(VersionEnded):
    """It was desired, and the fleet has gone back to an earlier version: its rollout failed, or somebody said so."""

    verb = "was rolled back"


class VersionSuperseded(VersionEnded):
    """It was published before under the same `upload` name, of the same bytes, and the fleet has gone on to later versions."""

    verb = "was superseded"


class CursorMismatch(ConfigurationError):
    """The cursor file belongs to another batch or run, or is damaged."""


class GroupOpen(RollgridError):
    """The group has not closed yet; `done` are the indexes generated so far."""

    def __init__(self, group_id: str, n: int, done: tuple[int, ...]) -> None:
        super().__init__(f"group {group_id} is open: {len(done)} of {n} samples generated")
        self.group_id = group_id
        self.n = n
        self.done = done


class RollgridAPIError(RollgridError):
    """The server refused.

    `code` is stable (`rollgrid_contracts.failures.ErrorCode`), `field` names the offending input,
    `limit` the bound it broke, `retry_after_s` when to try again; `status` is the HTTP status.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        status: int,
        field: str | None = None,
        limit: str | None = None,
        retryable: bool = False,
        retry_after_s: float | None = None,
        boundary: str | None = None,
        request_id: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.field = field
        self.limit = limit
        self.retryable = retryable
        self.retry_after_s = retry_after_s
        self.boundary = boundary
        self.request_id = request_id

    def __str__(self) -> str:
        details = [f"{name}={value}" for name, value in (("field", self.field), ("limit", self.limit)) if value]
        return f"{self.code}: {self.message}" + (f" ({', '.join(details)})" if details else "")


class InvalidRequest(RollgridAPIError):
    """The request itself is wrong; sending it again cannot help."""


class UnknownField(InvalidRequest):
    """A field that the server does not know and will not ignore."""


class LimitExceeded(InvalidRequest):
    """A value is beyond the bound in `limit`."""


class ContextLengthExceeded(LimitExceeded):
    """Prompt and `max_tokens` do not fit the model's context."""


class TokenOutOfRange(InvalidRequest):
    """A token id is negative or not in the vocabulary."""


class EmptyPrompt(InvalidRequest):
    """A task without a single prompt token."""


class Unsupported(InvalidRequest):
    """Understood, and not offered."""


class PayloadTooLarge(InvalidRequest):
    """The body is over the server's bound; send fewer tasks in one call."""


class IdempotencyConflict(InvalidRequest):
    """The idempotency key was used before, with another body."""


class GroupNotClosed(RollgridAPIError):
    """The group has not closed yet, so nothing can be posted onto its samples."""


class SessionBusy(RollgridAPIError):
    """Another turn of this branch is under way; a fork may go on beside it."""


class SessionEnded(RollgridAPIError):
    """The session was closed, failed or expired: no turn can follow."""


class SessionLimit(RollgridAPIError):
    """As many sessions are open as the tenant may have; those that end make room."""


class Unauthenticated(RollgridAPIError):
    """No API key, or an unknown one."""


class Forbidden(RollgridAPIError):
    """The key is known and may not do this."""


class NotFound(RollgridAPIError):
    """No such batch, group, run or policy for this tenant."""


class ModelNotFound(NotFound):
    """No policy of that name is served."""


class VersionUnavailable(RollgridAPIError):
    """The wanted checkpoint version is not published, or another publisher took its number."""


class UploadIncomplete(RollgridAPIError):
    """Ranks of a sharded upload have not finished; `limit` names them.  Nothing was published; commit again later."""


class VersionGone(RollgridAPIError):
    """The wanted checkpoint version no longer runs anywhere."""


class QueueFull(RollgridAPIError):
    """A queue is at its bound; nothing of the request was taken."""


class Paced(RollgridAPIError):
    """The run has sampled as far ahead of its training as its `pace` allows; a new version makes room."""


class NotReady(RollgridAPIError):
    """The service, or something it stands on, is not there at the moment."""


class EngineFailed(RollgridAPIError):
    """The engine failed on this request."""


class ServerError(RollgridAPIError):
    """The server failed in a way it has no name for."""


_BY_CODE: dict[str, type[RollgridAPIError]] = {
    "invalid_request": InvalidRequest,
    "unknown_field": UnknownField,
    "limit_exceeded": LimitExceeded,
    "context_length_exceeded": ContextLengthExceeded,
    "token_out_of_range": TokenOutOfRange,
    "empty_prompt": EmptyPrompt,
    "unsupported": Unsupported,
    "payload_too_large": PayloadTooLarge,
    "idempotency_conflict": IdempotencyConflict,
    "unauthenticated": Unauthenticated,
    "forbidden": Forbidden,
    "not_found": NotFound,
    "model_not_found": ModelNotFound,
    "group_open": GroupNotClosed,
    "session_busy": SessionBusy,
    "session_ended": SessionEnded,
    "session_limit": SessionLimit,
    "version_unavailable": VersionUnavailable,
    "upload_incomplete": UploadIncomplete,
    "version_gone": VersionGone,
    "queue_full": QueueFull,
    "paced": Paced,
    "not_ready": NotReady,
    "episode_rebuilding": NotReady,
    "engine_unavailable": NotReady,
    "storage_error": NotReady,
    "bus_error": NotReady,
    "engine_error": EngineFailed,
    "empty_completion": EngineFailed,
    "poison": EngineFailed,
    "internal": ServerError,
}

_BY_STATUS: dict[int, tuple[str, bool]] = {
    401: ("unauthenticated", False),
    403: ("forbidden", False),
    404: ("not_found", False),
    409: ("idempotency_conflict", False),
    410: ("version_gone", False),
    413: ("payload_too_large", False),
    429: ("queue_full", True),
    502: ("not_ready", True),
    503: ("not_ready", True),
    504: ("not_ready", True),
}
"""Code and retry verdict of an answer without our envelope: a proxy's, or a foreign server's."""


def retry_after_seconds(value: str | None) -> float | None:
    """The `Retry-After` header in seconds from now: delta seconds or an HTTP date; None if absent or odd."""
    if not value:
        return None
    with contextlib.suppress(ValueError):
        return max(0.0, float(value))
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None


def _envelope(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except ValueError:
        return {}
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else {}
    return error if isinstance(error, dict) else {"message": str(error)}


def refusal(error: ErrorInfo) -> RollgridAPIError:
    """The exception that the error of a refused submission's record stands for."""
    kind = _BY_CODE.get(error.code, InvalidRequest)
    return kind(
        error.message,
        code=str(error.code),
        status=200,
        field=error.field,
        limit=error.limit,
        retryable=error.retryable,
        boundary=str(error.boundary),
    )


def api_error(status: int, headers: Mapping[str, str], body: bytes) -> RollgridAPIError:
    """The exception an HTTP answer of 400 or more stands for."""
    envelope = _envelope(body)
    fallback_code, fallback_retryable = _BY_STATUS.get(
        status, ("internal" if status >= 500 else "invalid_request", False)
    )
    code = str(envelope.get("code") or fallback_code)
    kind = _BY_CODE.get(code) or (ServerError if status >= 500 else InvalidRequest)
    limit = envelope.get("limit")
    return kind(
        str(envelope.get("message") or body[:200].decode("utf-8", "replace") or f"HTTP {status}"),
        code=code,
        status=status,
        field=envelope.get("field") or envelope.get("param"),
        limit=None if limit is None else str(limit),
        retryable=bool(envelope.get("retryable", fallback_retryable)),
        retry_after_s=retry_after_seconds(headers.get("retry-after")),
        boundary=envelope.get("boundary"),
        request_id=headers.get("x-request-id"),
    )
