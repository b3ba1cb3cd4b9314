"""Failures as data: stable codes, and the struct in which a failure travels.

The exception tree over these codes, with HTTP statuses, is `rollgrid_runtime.errors`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ErrorCode(StrEnum):
    """Stable, documented codes.  A code never changes its meaning."""

    # the caller's request
    INVALID_REQUEST = "invalid_request"
    UNKNOWN_FIELD = "unknown_field"
    LIMIT_EXCEEDED = "limit_exceeded"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    TOKEN_OUT_OF_RANGE = "token_out_of_range"
    EMPTY_PROMPT = "empty_prompt"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    PAYLOAD_TOO_LARGE = "payload_too_large"
    UNSUPPORTED = "unsupported"
    IDEMPOTENCY_CONFLICT = "idempotency_conflict"
    GROUP_OPEN = "group_open"
    UNAUTHENTICATED = "unauthenticated"
    FORBIDDEN = "forbidden"
    SESSION_BUSY = "session_busy"
    SESSION_ENDED = "session_ended"
    SESSION_LIMIT = "session_limit"
    VERSION_UNAVAILABLE = "version_unavailable"
    UPLOAD_INCOMPLETE = "upload_incomplete"
    # the fleet's state
    QUEUE_FULL = "queue_full"
    PACED = "paced"
    NOT_READY = "not_ready"
    EPISODE_REBUILDING = "episode_rebuilding"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    POISON = "poison"
    ENGINE_ERROR = "engine_error"
    ENGINE_UNAVAILABLE = "engine_unavailable"
    EMPTY_COMPLETION = "empty_completion"
    VERSION_GONE = "version_gone"
    STORAGE_ERROR = "storage_error"
    BUS_ERROR = "bus_error"
    INTERNAL = "internal"


class Boundary(StrEnum):
    """The boundary at which a failure was seen."""

    CLIENT = "client"
    INGEST = "ingest"
    BUS = "bus"
    ENGINE = "engine"
    SCORER = "scorer"
    LEDGER = "ledger"
    STORAGE = "storage"
    WEIGHTS = "weights"


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One failure.  `field` names the offending input, `limit` the bound it broke."""

    code: ErrorCode
    message: str
    boundary: Boundary = Boundary.INGEST
    retryable: bool = False
    field: str | None = None
    limit: str | None = None
