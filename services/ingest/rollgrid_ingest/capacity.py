"""How far sampling may run ahead of training: AReaL's capacity rule.  Pure.

A run that trains `batch` groups for each version and bears a staleness of η may have admitted
(η + 1 + v) · batch groups once v versions have come since its first one.  The i-th group admitted is
trained on in step i // batch, when i // batch versions have come; so it was admitted when at most η
were missing, and a worker that runs what was in force then keeps the bound.  Workers lag behind what is
desired, so the job itself says which version it needs at least (`floor`).

What was not admitted is not saved up: `admitted` never counts for less than the steps that are over, or a
trainer that resumes at a later version would be answered with a burst that breaks the bound (AReaL's own fix).
"""

from __future__ import annotations

import msgspec
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.fleet import PacedBatch, RunPace
from rollgrid_contracts.jobs import VersionRule, WeightConstraint

REMEMBERED_BATCHES = 32
"""Batches by which a submission that comes again is known; more would make each write larger."""


def in_force(state: PolicyState, now: float) -> int:
    """The version that every worker has or is to have by itself: one still on its way counts once it has come.

    A roll-out that is not everywhere at its deadline counts as come, or one stuck worker would stop every run.
    """
    rollout = state.rollout
    if rollout is not None and not 0 < rollout.deadline <= now:
        return rollout.previous
    return state.desired


def begun(policy: str, batch: int, max_staleness: int, version: int, cursor: int) -> RunPace:
    """The pace of a run at its first submission; its first version is the one in force."""
    return RunPace(
        policy=policy,
        batch=batch,
        max_staleness=max_staleness,
        first_version=version,
        version=version,
        cursor=cursor,
    )


def seen(pace: RunPace, state: PolicyState, now: float) -> RunPace:
    """`pace` with the versions that have come meanwhile.  A roll-back takes none of them away."""
    newest = in_force(state, now)
    if newest > pace.version:
        fresh = sum(pace.version < version <= newest for version in _known(state))
        pace = msgspec.structs.replace(pace, versions=pace.versions + fresh, version=newest)
    return msgspec.structs.replace(pace, admitted=max(pace.admitted, pace.versions * pace.batch))


def room(pace: RunPace) -> int:
    """How many groups more may be admitted now."""
    return max(0, (pace.max_staleness + 1 + pace.versions) * pace.batch - pace.admitted)


def largest(pace: RunPace) -> int:
    """What fits at most, however long one waits."""
    return (pace.max_staleness + 1) * pace.batch


def owed(pace: RunPace, batch_id: str, groups: int, missing: int) -> int:
    """How many groups of a submission are still to be counted; `missing` of its `groups` are no jobs yet."""
    for item in pace.recent:
        if item.batch_id == batch_id:
            return max(0, groups - item.groups)
    return missing


def admit(pace: RunPace, batch_id: str, groups: int, now: float) -> RunPace:
    """`groups` more are admitted.  They must fit."""
    counted = groups + sum(item.groups for item in pace.recent if item.batch_id == batch_id)
    others = [item for item in pace.recent if item.batch_id != batch_id]
    recent = (*others, PacedBatch(batch_id=batch_id, groups=counted, at=now))[-REMEMBERED_BATCHES:]
    return msgspec.structs.replace(pace, admitted=pace.admitted + groups, recent=recent, updated_at=now)


def settle(pace: RunPace, batch_id: str, groups: int | None) -> RunPace:
    """The batch has `groups` jobs (None: as many as were counted): what was counted beyond is given back."""
    admitted, recent = pace.admitted, []
    for item in pace.recent:
        if item.batch_id == batch_id:
            there = item.groups if groups is None else min(groups, item.groups)
            admitted -= item.groups - there
            item = msgspec.structs.replace(item, groups=there, settled=True)
        recent.append(item)
    return msgspec.structs.replace(pace, admitted=max(0, admitted), recent=tuple(recent))


def give_back(pace: RunPace, lost: int, cursor: int) -> RunPace:
    """`lost` groups, up to `cursor`, closed without a single success: the trainer will ask for others."""
    return msgspec.structs.replace(pace, admitted=max(0, pace.admitted - lost), cursor=max(cursor, pace.cursor))


def floor(pace: RunPace, state: PolicyState, now: float) -> int | None:
    """The version that the group admitted last needs at least, None when any will do."""
    step = (pace.admitted - 1) // pace.batch
    oldest = step - pace.max_staleness  # in versions since the first, below 0 before it
    line = sorted(version for version in _known(state) if version <= pace.version)
    back = max(0, pace.versions - oldest)
    if back >= len(line):
        return None  # so old that nobody keeps it
    return min(line[-1 - back], in_force(state, now))


def constrained(asked: WeightConstraint, least: int | None) -> WeightConstraint:
    """`asked`, and at least `least` where that can be said in one constraint.

    An exact version was chosen by the caller; a bound of its own on staleness stands beside the pace.
    """
    if not least or asked.rule in (VersionRule.EXACT, VersionRule.MAX_STALENESS):
        return asked
    return WeightConstraint(rule=VersionRule.MIN, value=max(least, asked.value))


def _known(state: PolicyState) -> set[int]:
    """Versions that were verified: desired once, or passed over for a newer one."""
    return {state.desired, *state.history, *(version.version for version in state.versions)}
