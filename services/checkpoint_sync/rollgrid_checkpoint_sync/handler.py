"""One policy in, its state as it should be out: verified versions become desired, others are refused.

Level-triggered: whatever woke us, S3 says which versions exist and `rg_policies` what was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from rollgrid_contracts import codec
from rollgrid_contracts.checkpoints import MANIFEST_NAME, REFUSED_NAME, PolicyState, version_root
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import Conflict, RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest

from . import metrics, plan
from .register import LocalModel
from .verify import Refused, verify

log = get_logger(__name__)


class Handler:
    """Reconciles policies whose base this process has read (`models` by key)."""

    def __init__(
        self, table: Table[PolicyState], blobs: Blobs, models: dict[str, LocalModel], scratch: Path | None
    ) -> None:
        self._table, self._blobs, self._models, self._scratch = table, blobs, models, scratch

    async def reconcile(self, key: str) -> None:
        """Decide every open version of one policy, oldest first.  Raises BusError, StorageError."""
        model = self._models.get(key)
        found = await self._table.get(key)
        if model is None or found is None:
            log.warning("unknown_policy", policy=key)
            return
        state = found.value
        metrics.state(key, state)
        keys = await self._blobs.keys(f"checkpoints/{state.tenant}/{state.policy}/")
        for version in plan.open_versions(state, plan.stored(state.tenant, state.policy, keys)):
            with bound(tenant=state.tenant, policy=state.policy, version=str(version)):
                await self._decide(key, state, model, version)

    async def roll_back(self, key: str, version: int) -> PolicyState:
        """Make an adopted version (0 = the base) desired again.

        Raises RollgridError `version_unavailable`, `version_gone`, `not_found`; BusError, StorageError.
        """
        found = await self._table.get(key)
        prefix = await self._prefix_of(found.value, version) if found is not None and version else None
        changed = await self._change(key, lambda now: plan.roll_back(now, version, prefix))
        log.warning("rolled_back", policy=key, version=version, newest=changed.newest)
        return changed

    async def _prefix_of(self, state: PolicyState, version: int) -> str:
        key = version_root(state.tenant, state.policy, version)
        data = await self._blobs.get(key + MANIFEST_NAME)
        try:
            if data is None:
                raise RollgridError(ErrorCode.VERSION_GONE, f"{key}{MANIFEST_NAME} does not exist", field="version")
            return decode_manifest(data).prefix or key
        except WeightsError as error:
            raise RollgridError(error.code, error.message, field=error.field) from error

    async def _decide(self, key: str, state: PolicyState, model: LocalModel, version: int) -> None:
        begun = time.monotonic()
        try:
            if version <= state.newest:
                raise plan.StaleVersion(version, state.newest)
            if state.base_digest != model.state.base_digest:
                raise plan.BaseChanged(state, model.state.base_digest)
            prefix = await verify(self._blobs, state, model, version, self._scratch)
            metrics.VERIFY_SECONDS.observe(time.monotonic() - begun)
            adopted = await self._change(key, lambda now: plan.adopt(now, version, prefix))
        except (Refused, plan.StaleVersion) as error:
            metrics.VERSIONS.labels(key, "refused").inc()
            await self._refuse(state, version, error)
        else:
            metrics.VERSIONS.labels(key, "adopted").inc()
            metrics.state(key, adopted)
            await self._observe_lag(state, version)
            log.info("version_desired", policy=key, version=version, history=len(adopted.history))

    async def _observe_lag(self, state: PolicyState, version: int) -> None:
        """How long the version took from its commit to being desired, as far as S3 still says when that was."""
        try:
            data = await self._blobs.get(version_root(state.tenant, state.policy, version) + MANIFEST_NAME)
            committed = decode_manifest(data).created_at if data is not None else 0.0
        except (RollgridError, WeightsError):
            return
        if committed:
            metrics.PUBLISH_LAG.observe(max(0.0, time.time() - committed))

    async def _change(self, key: str, change: Callable[[PolicyState], PolicyState]) -> PolicyState:
        """Compare-and-set until it holds.  Raises what `change` raises, and BusError."""
        while True:
            found = await self._table.get(key)
            if found is None:
                raise RollgridError(ErrorCode.NOT_FOUND, f"there is no policy {key}", field="policy")
            wanted = change(found.value)
            if wanted == found.value:
                return wanted
            try:
                await self._table.update(key, wanted, found.revision)
            except Conflict:
                continue
            return wanted

    async def _refuse(self, state: PolicyState, version: int, error: RollgridError) -> None:
        """Record why, once, where `GET /v1/policies/{policy}/versions/{version}` finds it."""
        where = version_root(state.tenant, state.policy, version) + REFUSED_NAME
        await self._blobs.create(where, codec.encode(error.info(), codec.JSON))
        log.warning(
            "version_refused",
            policy=f"{state.tenant}.{state.policy}",
            version=version,
            code=error.code,
            error=error.message,
        )
