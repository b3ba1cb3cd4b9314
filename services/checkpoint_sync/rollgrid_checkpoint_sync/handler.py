"""One policy in, its state as it should be out: verified versions become desired, others are refused.

Level-triggered: whatever woke us, S3 says which versions exist and `rg_policies` what was decided.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from rollgrid_contracts.checkpoints import PolicyState, RolloutRequest, policy_root
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_weights.adapter import MAX_RANK
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.rollback import roll_back

from . import metrics, plan
from .adopted import adopted_version
from .policies import Changed, change
from .progress import Progress, Workers, record
from .register import LocalModel
from .states import States
from .verify import Refused, Verified, verify

log = get_logger(__name__)


class Terms(NamedTuple):
    """How versions of a policy reach the workers and when the next is due, where their manifests do not say."""

    rollout: RolloutRequest = RolloutRequest()
    deadline_s: float = 600.0
    cadence_s: float | None = None


class Handler:
    """Reconciles policies whose base this process has read (`models` by key)."""

    def __init__(
        self,
        table: Table[PolicyState],
        blobs: Blobs,
        models: dict[str, LocalModel],
        scratch: Path | None,
        *,
        terms: Callable[[str], Terms] = lambda key: Terms(),
        workers: Workers = lambda: None,
        max_lora_rank: int = MAX_RANK,
    ) -> None:
        self._table, self._blobs, self._models, self._scratch, self._terms = table, blobs, models, scratch, terms
        self._max_lora_rank = max_lora_rank
        self.states = States(blobs, scratch)
        self.progress = Progress(table, blobs, workers)

    async def reconcile(self, key: str) -> None:
        """Decide every open version of one policy, oldest first.  Raises BusError, StorageError."""
        model = self._models.get(key)
        found = await self._table.get(key)
        if model is None or found is None:
            log.warning("unknown_policy", policy=key)
            return
        state = await self.progress.advance(key)
        metrics.state(key, state)
        keys = await self._blobs.keys(policy_root(state.tenant, state.policy))
        for version in plan.open_versions(state, plan.stored(state.tenant, state.policy, keys)):
            with bound(tenant=state.tenant, policy=state.policy, version=str(version)):
                state = await self._decide(key, state, model, version)

    async def roll_back(self, key: str, version: int) -> PolicyState:
        """Make an adopted version (0 = the base) desired again.

        Raises RollgridError `version_unavailable`, `version_gone`, `not_found`; BusError, StorageError.
        """
        await self.progress.advance(key)
        try:
            changed = await change(self._table, key, lambda now: roll_back(now, version))
        except WeightsError as error:
            raise RollgridError(error.code, error.message, field=error.field) from error
        log.warning("rolled_back", policy=key, version=version, newest=changed.after.newest)
        return changed.after

    async def _decide(self, key: str, state: PolicyState, model: LocalModel, version: int) -> PolicyState:
        if version in state.history:  # by another checkpoint-sync, since the listing
            return state
        begun = time.monotonic()
        try:
            if version <= state.newest:
                raise plan.StaleVersion(version, state.newest)
            if state.base_digest != model.state.base_digest:
                raise plan.BaseChanged(state, model.state.base_digest)
            verified = await verify(
                self._blobs, state, model, version, self._scratch, self.states, max_lora_rank=self._max_lora_rank
            )
            metrics.VERIFY_SECONDS.observe(time.monotonic() - begun)
            changed = await self._adopt(key, verified)
        except (Refused, plan.StaleVersion, plan.BaseGone) as error:
            metrics.VERSIONS.labels(key, "refused").inc()
            await self._refuse(state, version, error)
            return state
        if changed.before is not changed.after:
            metrics.VERSIONS.labels(key, "adopted").inc()
            metrics.adopted(key, changed.after)
            log.info("version_desired", policy=key, version=version, history=len(changed.after.history))
            adopted = plan.listed(changed.after, version)
            if adopted is not None and adopted.rewinds:
                log.warning("trainer_went_back", policy=key, version=version, step=adopted.step, over=adopted.rewinds)
        return changed.after

    async def _adopt(self, key: str, verified: Verified) -> Changed:
        """Desired, and the first workers named, in one write: nobody is without a version to run in between."""
        terms, manifest = self._terms(key), verified.manifest
        adopted = adopted_version(manifest, verified.prefix, verified.weights_digest)

        def decide(now: PolicyState) -> PolicyState:
            wanted = plan.adopt(
                now,
                adopted,
                manifest.rollout or terms.rollout,
                time.time(),
                deadline_s=terms.deadline_s,
                next_within_s=manifest.next_within_s or terms.cadence_s,
            )
            return self.progress.advanced(wanted)

        while True:
            try:
                changed = await change(self._table, key, decide)
            except plan.RollbackPending:
                await self.progress.advance(key)
                continue
            self.progress.tell(key, changed)
            return changed

    async def _refuse(self, state: PolicyState, version: int, error: RollgridError) -> None:
        await record(self._blobs, state, version, error.info())
        log.warning(
            "version_refused",
            policy=f"{state.tenant}.{state.policy}",
            version=version,
            code=error.code,
            error=error.message,
        )
