"""What should run: pure decisions over a policy's state.

Versions only ever advance on their own: a version becomes desired when it is verified and newer
than all before it.  Going back is a decision of somebody or of a failed rollout, never repented by
itself: it holds until something newer than everything seen so far is published.  How a version
reaches the workers is `rollout`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from rollgrid_contracts.checkpoints import AdoptedVersion, PolicyState, RolloutRequest
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_weights.rollback import roll_back

from . import rollout

_KEY = re.compile(r"checkpoints/([^/]+)/([^/]+)/([1-9][0-9]{0,17})/(manifest\.json|refused\.json)")


class BaseChanged(RollgridError):
    """The folder given under a policy's name holds other weights than the versions published for it build on."""

    def __init__(self, state: PolicyState, digest: str) -> None:
        super().__init__(
            ErrorCode.INVALID_REQUEST,
            f"policy {state.tenant}.{state.policy} has base {state.base_digest[:12]} and published versions; the folder"
            f" now holds {digest[:12]}: give it a new name, or the old folder",
            boundary=Boundary.WEIGHTS,
            field="models",
        )


class StaleVersion(RollgridError):
    """A version that is not newer than what was adopted before it can never become desired by itself."""

    def __init__(self, version: int, newest: int) -> None:
        super().__init__(
            ErrorCode.INVALID_REQUEST,
            f"version {version} came after version {newest} was adopted: versions are monotonic",
            boundary=Boundary.WEIGHTS,
            field="version",
            limit=f"> {newest}",
        )


class BaseGone(RollgridError):
    """What a version builds on has been collected between its publication and its turn."""

    def __init__(self, adopted: AdoptedVersion) -> None:
        super().__init__(
            ErrorCode.VERSION_GONE,
            f"version {adopted.version} builds on version {adopted.base_version}, whose files are gone",
            boundary=Boundary.WEIGHTS,
            field="base_version",
        )


class RollbackPending(RollgridError):
    """A rollout has failed and its reason is not recorded yet: that comes first."""

    def __init__(self, state: PolicyState) -> None:
        super().__init__(
            ErrorCode.NOT_READY,
            f"{state.tenant}.{state.policy} is going back to a version",
            boundary=Boundary.WEIGHTS,
            retry_after_s=1.0,
        )


class Stored(NamedTuple):
    """Versions of one policy found in S3: those with a manifest, and those with a refusal."""

    published: frozenset[int]
    refused: frozenset[int]


def stored(tenant: str, policy: str, keys: Iterable[str]) -> Stored:
    """Read a listing of S3; keys of other form or owner are ignored."""
    published: set[int] = set()
    refused: set[int] = set()
    for key in keys:
        match = _KEY.fullmatch(key)
        if match is not None and (match[1], match[2]) == (tenant, policy):
            (published if match[4] == "manifest.json" else refused).add(int(match[3]))
    return Stored(frozenset(published), frozenset(refused))


def open_versions(state: PolicyState, found: Stored) -> list[int]:
    """Published versions about which nothing has been decided, oldest first."""
    return sorted(found.published - found.refused - set(state.history))


def adopt(
    state: PolicyState,
    adopted: AdoptedVersion,
    asked: RolloutRequest,
    now: float,
    *,
    deadline_s: float,
    next_within_s: float | None = None,
) -> PolicyState:
    """The state once a version is verified; unchanged when it was adopted before.

    It replaces a version still on its way: the workers that were to have that one go on with this, and
    all others keep what was last everywhere.  Raises StaleVersion unless it is newer than all before,
    BaseGone, RollbackPending.
    """
    if adopted.version in state.history:
        return state
    if adopted.version <= state.newest:
        raise StaleVersion(adopted.version, state.newest)
    if adopted.base_version and listed(state, adopted.base_version) is None:
        raise BaseGone(adopted)
    if state.rollout is not None and state.rollout.failure is not None:
        raise RollbackPending(state)
    committed = adopted.committed_at or now
    previous = state.rollout.previous if state.rollout is not None else state.desired
    return msgspec.structs.replace(
        state,
        kind=adopted.kind,
        desired=adopted.version,
        desired_prefix=adopted.prefix,
        history=(*state.history, adopted.version),
        newest=adopted.version,
        versions=(*state.versions, msgspec.structs.replace(adopted, adopted_at=now, rewinds=rewound(state, adopted))),
        rollout=rollout.begun(adopted.version, previous, asked, deadline_s, now),
        newest_at=committed,
        refresh_due=committed + next_within_s if next_within_s else 0.0,
    )


def rewound(state: PolicyState, adopted: AdoptedVersion) -> int:
    """The version that is desired, where it is of a later step than the one adopted now; else 0."""
    before = listed(state, state.desired)
    if before is None or before.step is None or adopted.step is None or before.step <= adopted.step:
        return 0
    return before.version


def finished(state: PolicyState) -> PolicyState:
    """The state of a failed rollout once its reason is recorded: what was everywhere is desired again.

    Raises WeightsError when that is gone, which garbage collection sees to that it is not.
    """
    if state.rollout is None or state.rollout.failure is None:
        return state
    return roll_back(state, state.rollout.previous)


def listed(state: PolicyState, version: int) -> AdoptedVersion | None:
    """A version whose files are there."""
    return next((one for one in state.versions if one.version == version), None)


def merge(existing: PolicyState | None, fresh: PolicyState, *, versions_exist: bool) -> PolicyState:
    """The state of a policy whose folder was read (`fresh`, at version 0).

    With the same base the versions stay and the rest is renewed.  Another base starts over, but
    only while nothing was published on the old one: raises BaseChanged otherwise.
    """
    if existing is None:
        return fresh
    if existing.base_digest == fresh.base_digest:
        return msgspec.structs.replace(
            fresh,
            kind=existing.kind,
            desired=existing.desired,
            desired_prefix=existing.desired_prefix,
            history=existing.history,
            newest=existing.newest,
            versions=existing.versions,
            rollout=existing.rollout,
            newest_at=existing.newest_at,
            refresh_due=existing.refresh_due,
        )
    if versions_exist or existing.newest > 0:
        raise BaseChanged(existing, fresh.base_digest)
    return fresh
