"""What one worker should have loaded, and which of it may serve a job.  Pure.

A policy's state names the version the fleet wants; while it is rolled out only the workers named there
apply it.  A full version is loaded alone; a LoRA version lies on its base version, beside others on the
same base.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, PolicyState, staleness
from rollgrid_contracts.jobs import VersionRule, WeightConstraint


class Wanted(NamedTuple):
    """`current` is what new requests without a constraint get: `full`, or the first of `adapters`."""

    current: int
    full: AdoptedVersion
    adapters: tuple[AdoptedVersion, ...] = ()

    @property
    def versions(self) -> tuple[AdoptedVersion, ...]:
        return (self.full, *self.adapters)


def wanted(state: PolicyState, worker: str, max_loras: int, asked: Collection[int] = ()) -> Wanted:
    """What `worker` should have loaded; `asked` are versions that somebody holds a pin on.

    Adapters in the order of their worth: the current one, those asked for, then the newest.
    """
    current = adopted(state, due(state, worker))
    if current.kind.whole:
        full = current
    else:
        full = adopted(state, current.base_version)
    beside = [version for version in state.versions if _lies_on(version, full) and version.version != current.version]
    barred = state.rollout.version if state.rollout is not None else None
    pinned = [version for version in beside if version.version in asked and version.version != barred]
    older = [version for version in beside if version.version < current.version and not version.going]
    older = [version for version in older if version not in pinned]
    ranked = sorted(pinned, key=_newest_first)
    if current is not full:  # else no request gets one unless it names it
        ranked = [current, *ranked, *sorted(older, key=_newest_first)]
    return Wanted(current.version, full, tuple(ranked[:max_loras]))


def due(state: PolicyState, worker: str) -> int:
    """The version that this worker should answer with."""
    rollout = state.rollout
    if rollout is None or rollout.version != state.desired:
        return state.desired
    return state.desired if worker in rollout.workers and rollout.failure is None else rollout.previous


def adopted(state: PolicyState, version: int) -> AdoptedVersion:
    """What is known of a version; of one the state does not list, only where the desired one is."""
    if version == 0:
        return AdoptedVersion(version=0, weights_digest=state.base_digest)
    found = next((one for one in state.versions if one.version == version), None)
    if found is not None:
        return found
    prefix = state.desired_prefix if version == state.desired else None
    return AdoptedVersion(version=version, prefix=prefix or "")


def _lies_on(version: AdoptedVersion, full: AdoptedVersion) -> bool:
    return version.kind is CheckpointKind.LORA and version.base_version == full.version


def _newest_first(version: AdoptedVersion) -> int:
    return -version.version


def choose(
    constraint: WeightConstraint, current: int, loaded: Collection[int], state: PolicyState | None
) -> int | None:
    """The version of those loaded that serves a job: the current one if it may, else the newest that may."""
    if current in loaded and met(constraint, current, state):
        return current
    fit = [
        version for version in loaded if constraint.rule is not VersionRule.LATEST and met(constraint, version, state)
    ]
    return max(fit, default=None)


def met(constraint: WeightConstraint, loaded: int, state: PolicyState | None) -> bool:
    """Whether a loaded version may serve a job that asks for `constraint`."""
    match constraint.rule:
        case VersionRule.LATEST:
            return True
        case VersionRule.EXACT:
            return loaded == constraint.value
        case VersionRule.MIN:
            return loaded >= constraint.value
        case VersionRule.MAX_STALENESS:
            return state is None or staleness(state, loaded) <= constraint.value
