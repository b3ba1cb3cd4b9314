"""Every Redis key and its lifetime.  Redis holds nothing that the streams cannot rebuild."""

from __future__ import annotations

AFFINITY_TTL_S = 600


def affinity(tenant: str, session: str) -> str:
    """The worker a session is bound to; one hash tag per session."""
    return f"rg:affinity:{{{tenant}:{session}}}"


def probe(service: str) -> str:
    """Written and read back by readiness checks."""
    return f"rg:probe:{service}"
