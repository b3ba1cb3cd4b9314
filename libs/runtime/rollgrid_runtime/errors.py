"""The one error tree: every failure has a stable code, a retry verdict and an HTTP status.

An error is raised where a boundary is crossed and travels as `ErrorInfo`; nothing else
classifies failures.  To add one: add the code in `rollgrid_contracts.failures`, then its row here.
"""

from __future__ import annotations

from typing import NamedTuple

from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo


class Verdict(NamedTuple):
    http_status: int
    retryable: bool


VERDICTS: dict[ErrorCode, Verdict] = {
    ErrorCode.INVALID_REQUEST: Verdict(400, False),
    ErrorCode.UNKNOWN_FIELD: Verdict(400, False),
    ErrorCode.LIMIT_EXCEEDED: Verdict(400, False),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: Verdict(400, False),
    ErrorCode.TOKEN_OUT_OF_RANGE: Verdict(400, False),
    ErrorCode.EMPTY_PROMPT: Verdict(400, False),
    ErrorCode.UNSUPPORTED: Verdict(400, False),
    ErrorCode.UNAUTHENTICATED: Verdict(401, False),
    ErrorCode.FORBIDDEN: Verdict(403, False),
    ErrorCode.MODEL_NOT_FOUND: Verdict(404, False),
    ErrorCode.NOT_FOUND: Verdict(404, False),
    ErrorCode.IDEMPOTENCY_CONFLICT: Verdict(409, False),
    ErrorCode.GROUP_OPEN: Verdict(409, True),
    ErrorCode.SESSION_BUSY: Verdict(409, True),
    ErrorCode.VERSION_UNAVAILABLE: Verdict(409, True),
    ErrorCode.UPLOAD_INCOMPLETE: Verdict(409, True),
    ErrorCode.VERSION_GONE: Verdict(410, False),
    ErrorCode.SESSION_ENDED: Verdict(410, False),
    ErrorCode.PAYLOAD_TOO_LARGE: Verdict(413, False),
    ErrorCode.QUEUE_FULL: Verdict(429, True),
    ErrorCode.PACED: Verdict(429, True),
    ErrorCode.SESSION_LIMIT: Verdict(429, True),
    ErrorCode.CANCELLED: Verdict(499, False),
    ErrorCode.POISON: Verdict(500, False),
    ErrorCode.ENGINE_ERROR: Verdict(502, True),
    ErrorCode.EMPTY_COMPLETION: Verdict(502, True),
    ErrorCode.INTERNAL: Verdict(500, False),
    ErrorCode.NOT_READY: Verdict(503, True),
    ErrorCode.EPISODE_REBUILDING: Verdict(503, True),
    ErrorCode.ENGINE_UNAVAILABLE: Verdict(503, True),
    ErrorCode.STORAGE_ERROR: Verdict(503, True),
    ErrorCode.BUS_ERROR: Verdict(503, True),
    ErrorCode.EXPIRED: Verdict(504, True),
}


class RollgridError(Exception):
    """A classified failure.

    `field` names the offending input, `limit` the bound it broke, `retry_after_s` when to try again.
    `retryable` where this failure differs from the others of its code.
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        boundary: Boundary = Boundary.INGEST,
        field: str | None = None,
        limit: str | None = None,
        retry_after_s: float | None = None,
        retryable: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.boundary = boundary
        self.field = field
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.retryable = VERDICTS[code].retryable if retryable is None else retryable

    @property
    def http_status(self) -> int:
        return VERDICTS[self.code].http_status

    def info(self) -> ErrorInfo:
        return ErrorInfo(
            code=self.code,
            message=self.message,
            boundary=self.boundary,
            retryable=self.retryable,
            field=self.field,
            limit=self.limit,
        )


class BusError(RollgridError):
    """NATS did not answer, refused or lost the connection."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.BUS_ERROR, message, boundary=Boundary.BUS, retry_after_s=1.0)


class QueueFull(RollgridError):
    """A stream has reached its bound; nothing was stored."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(ErrorCode.QUEUE_FULL, message, boundary=Boundary.BUS, retry_after_s=retry_after_s)


class Conflict(RollgridError):
    """A compare-and-set lost: another writer was first."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.BUS_ERROR, message, boundary=Boundary.BUS)


class ConsumerGone(RollgridError):
    """The durable consumer was deleted or does not exist."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.BUS_ERROR, message, boundary=Boundary.BUS)


class StorageError(RollgridError):
    """S3 did not answer or refused."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.STORAGE_ERROR, message, boundary=Boundary.STORAGE, retry_after_s=2.0)


class PayloadGone(StorageError):
    """The object behind a claim check is absent or altered: trying again will not bring it back."""
