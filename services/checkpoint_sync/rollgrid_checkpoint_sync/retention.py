"""What of a policy's objects may go: pure choices, made again each round.

A version stops being listed first (`trimmed`, by compare-and-set), then its manifest goes, then its
files.  So whoever reads a listed version finds its files, and a crash in between leaves what the next
round finds: an adopted version that is not listed.  What nobody has decided about is never touched,
what was uploaded and never became a version goes by age.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping

import msgspec
from rollgrid_contracts.checkpoints import MANIFEST_NAME, REFUSED_NAME, AdoptedVersion, PolicyState
from rollgrid_runtime.blobs import StoredObject

from . import plan

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
UPLOADS = "uploads"


def kept(state: PolicyState, needed: Collection[int], keep_newest: int) -> frozenset[int]:
    """The listed versions that stay: what runs or is to run, what somebody needs, the newest, and what those sit on."""
    listed = {one.version: one for one in state.versions}
    wanted = {state.desired, *needed, *sorted(listed)[-keep_newest:]}
    if state.rollout is not None:
        wanted |= {state.rollout.version, state.rollout.previous}
    todo = [version for version in wanted if version in listed]
    while todo:
        base = listed[todo.pop()].base_version
        if base in listed and base not in wanted:
            wanted.add(base)
            todo.append(base)
    return frozenset(wanted & listed.keys())


def trimmed(state: PolicyState, needed: Collection[int], keep_newest: int) -> PolicyState:
    stay = kept(state, needed, keep_newest)
    return msgspec.structs.replace(state, versions=tuple(one for one in state.versions if one.version in stay))


def restored(state: PolicyState, versions: Iterable[AdoptedVersion]) -> PolicyState:
    """With versions listed (again) that were adopted and whose files turned out to be there and needed."""
    listed = {one.version for one in state.versions}
    back = [one for one in versions if one.version in state.history and one.version not in listed]
    if not back:
        return state
    merged = sorted((*state.versions, *back), key=lambda one: one.version)
    return msgspec.structs.replace(state, versions=tuple(merged), newest_at=state.newest_at or merged[-1].committed_at)


def unlisted(state: PolicyState, objects: Iterable[StoredObject], needed: Collection[int]) -> list[int]:
    """Adopted versions that exist in S3 and ought to be listed but are not.

    Those that are needed (a pin came while the version was going), and in a state that was written
    before versions were listed, all.
    """
    found = plan.stored(state.tenant, state.policy, (one.key for one in objects)).published
    listed = {one.version for one in state.versions}
    wanted = found & set(state.history) if predates(state) else found & set(state.history) & set(needed)
    return sorted(wanted - listed)


def predates(state: PolicyState) -> bool:
    """Written before versions were listed."""
    return state.newest > 0 and not state.versions and state.newest_at == 0


def deletions(
    state: PolicyState,
    objects: Collection[StoredObject],
    needed: Collection[int],
    open_uploads: Collection[str],
    old: float,
) -> list[StoredObject]:
    """The objects to delete, in order: the manifests of collected versions, then files.

    `objects` is a listing of the policy's prefix from before `state` was read; `open_uploads` those that
    may still be committed, however old; what was last written before `old` (UNIX seconds) is past its time.
    """
    if predates(state):
        return []
    root = f"checkpoints/{state.tenant}/{state.policy}/"
    found = plan.stored(state.tenant, state.policy, (one.key for one in objects))
    last_write = _last_writes(root, objects)
    manifests: list[StoredObject] = []
    files: list[StoredObject] = []
    for one in objects:
        head, _, name = one.key.removeprefix(root).partition("/")
        if not one.key.startswith(root) or not name:
            continue
        if head == UPLOADS:
            upload = name.partition("/")[0]
            if upload not in open_uploads and last_write[upload] < old:
                files.append(one)
        elif _VERSION.fullmatch(head) and _may_go(state, found, int(head), one, name, needed, old):
            (manifests if name == MANIFEST_NAME else files).append(one)
    return manifests + files


def _may_go(
    state: PolicyState,
    found: plan.Stored,
    version: int,
    one: StoredObject,
    name: str,
    needed: Collection[int],
    old: float,
) -> bool:
    listed = plan.listed(state, version)
    past = one.modified < old
    if name == REFUSED_NAME or version in needed:
        return False
    if listed is not None:  # beside its own files there may be those of a publisher that lost the number
        return past and name != MANIFEST_NAME and not one.key.startswith(listed.prefix)
    if version in state.history:
        return True
    if version in found.refused:
        return past and name != MANIFEST_NAME  # it stays to be asked about, and its number taken
    return past and version not in found.published


def _last_writes(root: str, objects: Iterable[StoredObject]) -> Mapping[str, float]:
    """By upload: while one of its files is still coming, none of them is old."""
    latest: dict[str, float] = {}
    for one in objects:
        head, _, name = one.key.removeprefix(root).partition("/")
        if head == UPLOADS:
            upload = name.partition("/")[0]
            latest[upload] = max(latest.get(upload, 0.0), one.modified)
    return latest
