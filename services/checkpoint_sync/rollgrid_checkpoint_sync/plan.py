"""What should run: pure decisions over a policy's state.

Versions only ever advance on their own: a version becomes desired when it is verified and newer
than all before it.  Going back is a decision of somebody, never of this module's own accord, and
holds until something newer than everything seen so far is published.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError

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


def adopt(state: PolicyState, version: int, prefix: str) -> PolicyState:
    """The state once `version` is verified.  Raises StaleVersion unless it is newer than all before."""
    if version <= state.newest:
        raise StaleVersion(version, state.newest)
    return msgspec.structs.replace(
        state, desired=version, desired_prefix=prefix, newest=version, history=(*state.history, version)
    )


def roll_back(state: PolicyState, version: int, prefix: str | None) -> PolicyState:
    """The state that goes back to an adopted version (0 = the base); `newest` stays, so nothing comes back by itself.

    Raises RollgridError `version_unavailable` for one that never was adopted.
    """
    if version not in state.history:
        raise RollgridError(
            ErrorCode.VERSION_UNAVAILABLE,
            f"version {version} of {state.tenant}.{state.policy} was never adopted",
            boundary=Boundary.WEIGHTS,
            field="version",
        )
    if version == state.desired:
        return state
    return msgspec.structs.replace(
        state, desired=version, desired_prefix=prefix if version else None, history=(*state.history, version)
    )


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
        )
    if versions_exist or existing.newest > 0:
        raise BaseChanged(existing, fresh.base_digest)
    return fresh
