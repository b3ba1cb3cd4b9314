"""Multi-turn sessions as events on RG_SAMPLES; the episode tree is their fold."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from .arrays import TokenIds


class ForkReason(StrEnum):
    EDITED_HISTORY = "edited_history"
    BRIDGE_UNAVAILABLE = "bridge_unavailable"
    REQUESTED = "requested"


class SessionOutcome(StrEnum):
    CLOSED = "closed"
    FAILED = "failed"
    EXPIRED = "expired"


class SessionForked(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="session_forked"):
    """Event: the session continues from `parent` on a new branch whose prompt differs."""

    tenant: str
    run: str
    group_id: str
    index: int
    session: str
    parent: str | None
    node: str
    reason: ForkReason
    observation: TokenIds = TokenIds()
    job_seq: int = 0


class SessionEnded(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag="session_ended"):
    """Event: no further turn of this session will come."""

    tenant: str
    run: str
    group_id: str
    index: int
    session: str
    outcome: SessionOutcome
    job_seq: int = 0
