"""Rollouts on their way: what `rollout` decides is written, and how they end is told.

Level-triggered and stateless: `rg_policies` and the leases say all, so several may drive the same
rollout, and one that starts anew goes on where another was killed.  Who wins the compare-and-set
tells it; a failure is recorded beside the version before the state forgets it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rollgrid_contracts import codec
from rollgrid_contracts.checkpoints import REFUSED_NAME, PolicyState, version_root
from rollgrid_contracts.failures import ErrorInfo
from rollgrid_contracts.fleet import WorkerState
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.errors import WeightsError

from . import metrics, plan, rollout
from .policies import Changed, change

log = get_logger(__name__)
Workers = Callable[[], Sequence[WorkerState] | None]
"""The live leases; None while nobody knows them, which is not the same as none."""


class Progress:
    def __init__(self, table: Table[PolicyState], blobs: Blobs, workers: Workers) -> None:
        self._table, self._blobs, self._workers = table, blobs, workers

    def advanced(self, state: PolicyState) -> PolicyState:
        """The state moved on as far as the leases allow."""
        workers = self._workers()
        return state if workers is None else rollout.advance(state, workers, time.time())

    async def advance(self, key: str) -> PolicyState:
        """Move the policy's rollout on, if it has one.  Raises BusError, StorageError, `not_found`."""
        changed = await change(self._table, key, self.advanced)
        self.tell(key, changed)
        state = changed.after
        if state.rollout is not None and state.rollout.failure is not None:
            await record(self._blobs, state, state.rollout.version, state.rollout.failure)
            state = await self._finish(key)
        return state

    def tell(self, key: str, changed: Changed) -> None:
        """Log and count what a change did to the rollout."""
        before, after = changed.before.rollout, changed.after.rollout
        if after is not None and (before is None or before.version != after.version):
            log.info("rollout_begun", policy=key, version=after.version, previous=after.previous, canary=after.canary)
        if after is not None and after.workers and (before is None or before.workers != after.workers):
            log.info("rollout_widened", policy=key, version=after.version, workers=len(after.workers))
        if before is not None and after is None and changed.after.desired == before.version:
            self._tell_end(key, changed)
        if after is not None and after.failure is not None and (before is None or before.failure is None):
            metrics.ROLLOUTS.labels(key, "failed").inc()
            log.error("rollout_failed", policy=key, version=after.version, error=after.failure.message)

    def _tell_end(self, key: str, changed: Changed) -> None:
        ended = changed.before.rollout
        without = rollout.missing(changed.after, self._workers() or ())
        if ended is None:
            return
        if without and time.time() >= ended.deadline:
            metrics.ROLLOUTS.labels(key, "late").inc()
            log.error("rollout_late", policy=key, version=ended.version, without=without[:20], workers=len(without))
        else:
            metrics.ROLLOUTS.labels(key, "done").inc()
            log.info("rollout_done", policy=key, version=ended.version)

    async def _finish(self, key: str) -> PolicyState:
        try:
            changed = await change(self._table, key, plan.finished)
        except WeightsError as error:
            raise RollgridError(error.code, error.message, field=error.field) from error
        if changed.before is not changed.after:
            metrics.state(key, changed.after)
            log.warning("rolled_back", policy=key, version=changed.after.desired, newest=changed.after.newest)
        return changed.after


async def record(blobs: Blobs, state: PolicyState, version: int, why: ErrorInfo) -> None:
    """Write why a version does not run, once, where `GET /v1/policies/{policy}/versions/{version}` finds it."""
    where = version_root(state.tenant, state.policy, version) + REFUSED_NAME
    await blobs.create(where, codec.encode(why, codec.JSON))
