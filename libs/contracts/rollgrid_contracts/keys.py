"""Every Redis key and its lifetime.  Redis holds nothing that the streams cannot rebuild."""

from __future__ import annotations

AFFINITY_TTL_S = 600
"""A session's binding to a worker, since its last turn."""
SESSION_TTL_S = 24 * 3600
"""A session's fold, since its last change; what outlives it is rebuilt."""


def affinity(pool: str, tenant: str, session: str) -> str:
    """The worker a session is bound to (string)."""
    return f"rg:affinity:{{{pool}}}:{tenant}:{session}"


def bound(pool: str, worker: str) -> str:
    """Sessions bound to a worker (sorted set: `<tenant>:<session>` by UNIX second at which the binding ends)."""
    return f"rg:bound:{{{pool}}}:{worker}"


def session(tenant: str, session: str) -> str:
    """The fold of a session (hash): its terms, its open turns, and one field per node.  Gone = rebuild it."""
    return f"rg:session:{{{tenant}:{session}}}"


def session_lock(tenant: str, session: str) -> str:
    """Held by whoever rebuilds the fold; others answer `episode_rebuilding` meanwhile."""
    return f"rg:session:{{{tenant}:{session}}}:rebuild"


def session_expiry() -> str:
    """When sessions end by themselves (sorted set: `<tenant>:<session>` by UNIX second), swept by every ingest."""
    return "rg:session-expiry"


def open_sessions(tenant: str) -> str:
    """Sessions of a tenant that are open (sorted set: session by UNIX second at which it may be forgotten)."""
    return f"rg:sessions:{{{tenant}}}"


def partial(tenant: str, call: str) -> str:
    """What a worker has of a long turn (hash: fence, attempt, the prompt's digest, packed `Resume`); lost = sampled again."""
    return f"rg:partial:{{{tenant}:{call}}}"


def probe(service: str) -> str:
    """Written and read back by readiness checks."""
    return f"rg:probe:{service}"
