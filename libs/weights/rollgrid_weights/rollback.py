"""Going back to a version that was adopted before: the rule, for whoever may write `rg_policies`."""

from __future__ import annotations

import msgspec
from rollgrid_contracts.checkpoints import CheckpointKind, PolicyState
from rollgrid_contracts.failures import ErrorCode

from .errors import WeightsError


def roll_back(state: PolicyState, version: int) -> PolicyState:
    """The state that goes back to `version` (0 = the base), everywhere at once; a rollout under way ends.

    `newest` stays, so nothing comes back by itself; what is published next becomes desired as ever.

    Raises WeightsError: version_unavailable for one that was never adopted, version_gone for one whose
    files were deleted.
    """
    name = f"version {version} of {state.tenant}.{state.policy}"
    if version not in state.history:
        raise WeightsError(ErrorCode.VERSION_UNAVAILABLE, f"{name} was never adopted", field="version")
    kept = next((adopted for adopted in state.versions if adopted.version == version), None)
    if version and kept is None:
        raise WeightsError(ErrorCode.VERSION_GONE, f"the files of {name} were deleted", field="version")
    if version == state.desired and state.rollout is None:
        return state
    return msgspec.structs.replace(
        state,
        kind=kept.kind if kept else CheckpointKind.FULL,
        desired=version,
        desired_prefix=kept.prefix if kept else None,
        history=state.history if version == state.desired else (*state.history, version),
        rollout=None,
    )
