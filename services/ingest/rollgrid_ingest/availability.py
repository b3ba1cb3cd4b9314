"""Whether the versions a request asks for can ever serve it.  What never can is refused; what may come is waited for."""

from __future__ import annotations

from rollgrid_contracts.checkpoints import CheckpointKind, PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_runtime.errors import RollgridError

from .catalog import Catalog
from .fleet import Fleet
from .submission import Submission
from .versions import Versions

SPARE_ADAPTERS = 2
"""Beside the versions a policy's staleness allows: the one that comes, and one still in use by what runs."""


class Availability:
    def __init__(self, catalog: Catalog, versions: Versions, fleet: Fleet) -> None:
        self._catalog, self._versions, self._fleet = catalog, versions, fleet

    async def check(self, submission: Submission) -> None:
        """Raises version_unavailable (not retryable), version_gone, limit_exceeded; BusError, StorageError."""
        policy, asked = submission.policy, submission.weights
        match asked.rule:
            case VersionRule.EXACT:
                await self._check_exact(policy, asked, submission.weights_field)
            case VersionRule.MIN:
                await self._check_min(policy, asked, submission.weights_field)
            case VersionRule.MAX_STALENESS:
                await self._check_adapters(policy, asked.value, "weights.max_staleness")
            case VersionRule.LATEST:
                pass
        if submission.pace is not None:
            await self._check_adapters(policy, submission.pace.max_staleness, "pace.max_staleness")

    async def _check_exact(self, policy: PolicyState, asked: WeightConstraint, field: str) -> None:
        version = asked.value
        if version in kept(policy):
            return
        if is_collected(policy, version):
            raise gone(policy, version, field)
        if version in policy.history:
            return  # written before the kept versions were listed
        await self._check_published(policy, version, field)

    async def _check_min(self, policy: PolicyState, asked: WeightConstraint, field: str) -> None:
        if asked.value > policy.newest and asked.value > max(kept(policy)):
            await self._check_published(policy, asked.value, field)

    async def _check_published(self, policy: PolicyState, version: int, field: str) -> None:
        """A version that was never adopted is waited for while it is being verified."""
        try:
            found = await self._versions.status(policy, version)
        except RollgridError as error:
            if error.code not in (ErrorCode.NOT_FOUND, ErrorCode.INVALID_REQUEST):
                raise
            why = f"has no version {version}, the newest published is {policy.newest}"
            raise never(policy, why, field) from error
        if found.status == "refused":
            told = f": {found.error.message}" if found.error is not None else ""
            raise never(policy, f"refused version {version}{told}", field)

    async def _check_adapters(self, policy: PolicyState, max_staleness: int, field: str) -> None:
        """Every worker must be able to hold as many adapters as the staleness lets stay in use."""
        if not is_lora(policy):
            return
        places = [w.max_loras for w in await self._fleet.workers() if w.pool == policy.pool and w.max_loras]
        sharing = max(1, sum(is_lora(state) for state in self._catalog.of_pool(policy.pool)))
        if places and min(places) < sharing * (max_staleness + SPARE_ADAPTERS):
            raise RollgridError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{field} {max_staleness} needs {max_staleness + SPARE_ADAPTERS} adapters of each of {sharing} policies at once, "
                f"workers hold {min(places)}",
                boundary=Boundary.CLIENT,
                field=field,
                limit=f"max_loras={min(places)}",
            )


def kept(policy: PolicyState) -> set[int]:
    """Versions whose files are there and stay for whoever pins them now; the base always does."""
    rollout = {policy.rollout.version, policy.rollout.previous} if policy.rollout is not None else set()
    return {0, policy.desired, *(found.version for found in policy.versions if not found.going), *rollout}


def is_collected(policy: PolicyState, version: int) -> bool:
    """Whether the version once ran and its files are gone, or going.  A state of before versions were listed says no."""
    return bool(policy.versions) and version in policy.history and version not in kept(policy)


def is_lora(policy: PolicyState) -> bool:
    """Whether what the policy runs now is an adapter."""
    return any(found.version == policy.desired and found.kind is CheckpointKind.LORA for found in policy.versions)


def never(policy: PolicyState, why: str, field: str) -> RollgridError:
    return RollgridError(
        ErrorCode.VERSION_UNAVAILABLE,
        f"weights: {policy.policy} {why}",
        boundary=Boundary.CLIENT,
        field=field,
        limit=f"newest={policy.newest}",
        retryable=False,
    )


def gone(policy: PolicyState, version: int, field: str) -> RollgridError:
    oldest = min((found.version for found in policy.versions if not found.going), default=policy.desired)
    return RollgridError(
        ErrorCode.VERSION_GONE,
        f"weights: version {version} of {policy.policy} was deleted, the oldest kept is {oldest}",
        boundary=Boundary.CLIENT,
        field=field,
        limit=f"oldest={oldest}",
    )
