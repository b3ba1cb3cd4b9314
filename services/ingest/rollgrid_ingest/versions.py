"""Published versions of a policy: where each stands, and the way back to one of them."""

from __future__ import annotations

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    REFUSED_NAME,
    AdoptedVersion,
    CheckpointKind,
    PolicyState,
    version_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict, RollgridError
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.rollback import roll_back

from .uploads import MAX_VERSION
from .version_schema import VersionAnswer, VersionList
from .wire import invalid

log = get_logger(__name__)
TRIES = 20
"""Compare-and-set attempts of one rollback; checkpoint-sync writes the same key."""


class Versions:
    def __init__(self, bus: Bus, blobs: Blobs) -> None:
        self._blobs = blobs
        self._table: Table[PolicyState] = Table(bus, POLICIES, PolicyState)

    async def current(self, policy: PolicyState) -> PolicyState:
        """The policy's state as it is now: the catalog's copy lags a little.  Raises BusError, not_found."""
        return (await self._read(policy)).value

    async def _read(self, policy: PolicyState) -> Versioned[PolicyState]:
        found = await self._table.get(ids.policy_key(policy.tenant, policy.policy))
        if found is None:
            raise RollgridError(
                ErrorCode.MODEL_NOT_FOUND, f"no policy {policy.policy!r}", boundary=Boundary.CLIENT, field="policy"
            )
        return found

    async def status(self, policy: PolicyState, version: int) -> VersionAnswer:
        """Where a published version stands.  Raises not_found, invalid_request, StorageError."""
        if not 0 <= version <= MAX_VERSION:
            limit = f"0<=version<={MAX_VERSION}"
            raise invalid(f"version is {version}, not in {limit}", "version", limit=limit)
        if version == policy.desired:
            return _answer(policy, version, "desired")
        reason = await self._blobs.get(_root(policy, version) + REFUSED_NAME)
        error = msgspec.json.decode(reason, type=ErrorInfo) if reason is not None else None
        if version in policy.history:
            return _answer(policy, version, standing(policy, version) if error is None else "rolled_back", error)
        if error is not None:
            return _answer(policy, version, "refused", error)
        if await self._blobs.get(_root(policy, version) + MANIFEST_NAME) is None:
            raise RollgridError(
                ErrorCode.NOT_FOUND,
                f"{policy.policy} has no version {version}",
                boundary=Boundary.WEIGHTS,
                field="version",
                limit=f"newest={policy.newest}",
            )
        return _answer(policy, version, "verifying")

    def listed(self, policy: PolicyState) -> VersionList:
        numbers = [0, *(adopted.version for adopted in policy.versions)]
        return VersionList(
            object="list",
            policy=policy.policy,
            desired=policy.desired,
            newest=policy.newest,
            rollout=policy.rollout,
            data=[_answer(policy, number, standing(policy, number)) for number in numbers],
        )

    async def roll_back(self, policy: PolicyState, version: int) -> Versioned[PolicyState]:
        """Make an adopted version (0 = the base) desired again, by compare-and-set.

        Raises version_unavailable, version_gone, not_ready (retryable) while a failed rollout is being
        undone, BusError.
        """
        key = ids.policy_key(policy.tenant, policy.policy)
        for _ in range(TRIES):
            found = await self._read(policy)
            if found.value.rollout is not None and found.value.rollout.failure is not None:
                raise _not_ready(f"{policy.policy} is going back already")
            try:
                wanted = roll_back(found.value, version)
            except WeightsError as error:
                raise RollgridError(
                    error.code, error.message, boundary=Boundary.WEIGHTS, field=error.field, retryable=False
                ) from error
            if wanted is found.value:
                return found
            try:
                revision = await self._table.update(key, wanted, found.revision)
            except Conflict:
                continue
            log.warning("rolled_back", policy=key, version=version, before=found.value.desired, newest=wanted.newest)
            return Versioned(wanted, revision)
        raise _not_ready(f"{policy.policy} keeps changing")


def standing(policy: PolicyState, version: int) -> str:
    """Of a version that was adopted: what has become of it."""
    if version == policy.desired:
        return "desired"
    return "rolled_back" if policy.desired < version else "superseded"


def _answer(policy: PolicyState, version: int, status: str, error: ErrorInfo | None = None) -> VersionAnswer:
    known = next((adopted for adopted in policy.versions if adopted.version == version), None)
    if known is None:
        kind = CheckpointKind.FULL.value if version == 0 else None
        return VersionAnswer(policy=policy.policy, version=version, status=status, error=error, kind=kind)
    return _described(policy, known, status, error)


def _described(policy: PolicyState, adopted: AdoptedVersion, status: str, error: ErrorInfo | None) -> VersionAnswer:
    return VersionAnswer(
        policy=policy.policy,
        version=adopted.version,
        status=status,
        error=error,
        kind=adopted.kind.value,
        base_version=adopted.base_version,
        step=adopted.step,
        bytes=adopted.bytes,
        weights_digest=adopted.weights_digest or None,
        committed_at=adopted.committed_at,
        adopted_at=adopted.adopted_at,
        rewinds=adopted.rewinds or None,
    )


def _root(policy: PolicyState, version: int) -> str:
    return version_root(policy.tenant, policy.policy, version)


def _not_ready(message: str) -> RollgridError:
    return RollgridError(ErrorCode.NOT_READY, message, boundary=Boundary.WEIGHTS, retry_after_s=1.0)
