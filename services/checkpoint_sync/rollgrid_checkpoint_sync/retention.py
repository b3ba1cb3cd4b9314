"""What of a policy's objects may go: pure choices, made again each round.

Collectors, pins and roll-backs race, so a version leaves in steps, each a compare-and-set or later:

1. `marked`: it is on the list as `going`.  Who pins it now takes it for gone.
2. `trimmed`, on a state that is read *before* the pins: it leaves the list for good.  A pin whose
   writer found it staying was written before that state was, and is seen.
3. Its manifest is deleted, then its files.

So whoever reads a listed version finds its files, and a crash in between leaves what the next round
finds: an adopted version that is not listed.  What nobody has decided about is never touched, what was
uploaded and never became a version goes by age.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Mapping

import msgspec
from rollgrid_contracts.checkpoints import MANIFEST_NAME, REFUSED_NAME, AdoptedVersion, PolicyState, policy_root
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


def marked(state: PolicyState, needed: Collection[int], keep_newest: int) -> PolicyState:
    """With the versions that are to leave marked so, and no others."""
    stay = kept(state, needed, keep_newest)
    versions = tuple(msgspec.structs.replace(one, going=one.version not in stay) for one in state.versions)
    return msgspec.structs.replace(state, versions=versions)


def trimmed(state: PolicyState, needed: Collection[int], keep_newest: int) -> PolicyState:
    """Without the versions that are marked and that nothing needs; `needed` was read after `state`."""
    stay = kept(state, needed, keep_newest)
    versions = tuple(one for one in state.versions if one.version in stay or not one.going)
    return marked(msgspec.structs.replace(state, versions=versions), needed, keep_newest)


def relisted(state: PolicyState, versions: Iterable[AdoptedVersion]) -> PolicyState:
    """A state written before versions were listed, with those that were adopted and are there."""
    back = sorted((one for one in versions if one.version in state.history), key=lambda one: one.version)
    if not predates(state) or not back:
        return state
    return msgspec.structs.replace(state, versions=tuple(back), newest_at=back[-1].committed_at or time.time())


def unlisted(state: PolicyState, objects: Iterable[StoredObject]) -> list[int]:
    """The adopted versions in S3 of a state written before versions were listed."""
    if not predates(state):
        return []
    found = plan.stored(state.tenant, state.policy, (one.key for one in objects)).published
    return sorted(found & set(state.history))


def predates(state: PolicyState) -> bool:
    """Written before versions were listed."""
    return state.newest > 0 and not state.versions and state.newest_at == 0


def deletions(
    state: PolicyState,
    objects: Collection[StoredObject],
    open_uploads: Collection[str],
    old: float,
) -> list[StoredObject]:
    """The objects to delete, in order: the manifests of collected versions, then files.

    `objects` is a listing of the policy's prefix from before `state` was read; `open_uploads` those that
    may still be committed, however old; what was last written before `old` (UNIX seconds) is past its time.
    """
    if predates(state):
        return []
    root = policy_root(state.tenant, state.policy)
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
        elif _VERSION.fullmatch(head) and _may_go(state, found, int(head), one, name, old):
            (manifests if name == MANIFEST_NAME else files).append(one)
    return manifests + files


def _may_go(state: PolicyState, found: plan.Stored, version: int, one: StoredObject, name: str, old: float) -> bool:
    listed = plan.listed(state, version)
    past = one.modified < old
    if name == REFUSED_NAME:
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
