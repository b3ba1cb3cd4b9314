"""Why something cannot be done with a session, and whether what was asked for twice is the same thing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.state import StateError

from .session_episode import Episode


def rebuilding(why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.EPISODE_REBUILDING,
        f"the state of this session is not at hand: {why}",
        boundary=Boundary.STORAGE,
        retry_after_s=1.0,
    )


@contextlib.contextmanager
def state_at_hand() -> Iterator[None]:
    """Redis away is the same to the caller as Redis emptied: the session is there, its state is not."""
    try:
        yield
    except StateError as error:
        raise rebuilding(error.message) from error


def no_session(session: str, branch: str | None = None) -> RollgridError:
    what = f"session {session[:80]}" if branch is None else f"branch {branch[:80]} of session {session[:80]}"
    return RollgridError(ErrorCode.NOT_FOUND, f"there is no {what}", boundary=Boundary.CLIENT, field="session")


def has_ended(session: str) -> RollgridError:
    return RollgridError(
        ErrorCode.SESSION_ENDED, f"session {session} has ended", boundary=Boundary.CLIENT, field="session"
    )


def busy(session: str, what: str) -> RollgridError:
    return RollgridError(ErrorCode.SESSION_BUSY, f"session {session}: {what}", field="session", retry_after_s=1.0)


def branch_busy(session: str, branch: str) -> RollgridError:
    return busy(session, f"another turn of branch {branch} is under way or was first")


def over(limit: str, cap: int, what: str) -> RollgridError:
    return RollgridError(ErrorCode.LIMIT_EXCEEDED, f"{what}, {cap} may be", field="session", limit=limit)


def same_opened(first: SessionOpened, asked: SessionOpened) -> SessionOpened:
    if _terms(first) != _terms(asked):
        raise RollgridError(
            ErrorCode.IDEMPOTENCY_CONFLICT, f"session {first.session} was opened with other terms", field="session"
        )
    return first


def same_group(n: int, asked: SessionOpened) -> None:
    """`n` is the group's, as its first session said."""
    if n != asked.n:
        raise RollgridError(
            ErrorCode.IDEMPOTENCY_CONFLICT,
            f"group {asked.group_id} was opened with n={n}",
            field="n",
            limit=f"n={n}",
        )


def _terms(opened: SessionOpened) -> SessionOpened:
    """What two openings of one session have in common: a deadline is as long after its opening."""
    span = round(opened.terms.deadline - opened.opened_at, 1) if opened.terms.deadline else 0.0
    terms = msgspec.structs.replace(opened.terms, deadline=span)
    return msgspec.structs.replace(opened, terms=terms, opened_at=0.0, job_seq=0, traceparent=None)


def same_fork(episode: Episode, asked: SessionForked) -> str:
    found = episode.tree.forks.get(asked.branch)
    if found is None and episode.ended is not None:
        raise has_ended(asked.session)
    if found is None or (found.parent, found.reason) != (asked.parent, asked.reason):
        raise RollgridError(ErrorCode.IDEMPOTENCY_CONFLICT, f"branch {asked.branch} is another fork's", field="name")
    return asked.branch


def same_end(first: SessionEnded | None, asked: SessionEnded) -> SessionEnded:
    if first is None:
        raise rebuilding("its end is stored and not read yet")
    if (first.outcome, first.reward, first.turn_rewards) != (asked.outcome, asked.reward, asked.turn_rewards):
        raise has_ended(asked.session)
    return first
