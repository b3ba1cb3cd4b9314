"""Wiring of checkpoint-sync: read the models once, then keep their policies as they should be."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rollgrid_contracts import topology
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.service import connections, instance_name

from . import metrics
from .collector import Collector
from .fleet import Fleet
from .freshness import Freshness
from .handler import Handler, Terms
from .plan import BaseChanged
from .register import BadModel, LocalModel, read_model, register
from .settings import CheckpointSyncSettings
from .watch import Watch

log = get_logger(__name__)
RETRY_S = 2.0
LEASES_S = 10.0
"""How long the first round waits to know the workers."""
TICK_S = 1.0
"""Deadlines of rollouts and of promised versions are looked at this often."""
PROBE_PERIOD_S = 5.0
STALE_S = 20.0


class CheckpointSyncService:
    """Control plane only: it holds no weights in memory and tells nobody to load what it has not verified."""

    name = "checkpoint_sync"

    def __init__(self, settings: CheckpointSyncSettings) -> None:
        self.settings = settings
        self.models: dict[str, LocalModel] = {}
        self._stack = contextlib.AsyncExitStack()
        self._unregistered: dict[str, str] = {model.key: "being read" for model in settings.models}
        self._unreconciled: dict[str, str] = {}
        self._proofs: dict[str, float] = {}
        self._causes: dict[str, str] = {"nats": "not tried yet", "s3": "not tried yet"}
        self._working = asyncio.Lock()
        metrics.UNSETTLED.set_function(lambda: len(self._unregistered) + len(self._unreconciled))

    async def start(self) -> None:
        """Raises RollgridError when a server is out of reach."""
        name = instance_name(self.settings, self.name)
        self._bus, self._blobs = await self._stack.enter_async_context(connections(name))
        await ensure_consumer(self._bus, topology.CHECKPOINT_WATCH)
        self.table: Table[PolicyState] = Table(self._bus, topology.POLICIES, PolicyState)
        self.fleet = Fleet(self._bus)
        self.handler = Handler(
            self.table,
            self._blobs,
            self.models,
            self.settings.scratch,
            terms=self._terms,
            workers=self.fleet.workers,
            max_lora_rank=self.settings.max_lora_rank,
        )
        self._stack.callback(self.handler.states.close)
        self._freshness = Freshness()
        self._collector = Collector(
            self._bus,
            self.table,
            self._blobs,
            keep_versions=self.settings.keep_versions,
            upload_ttl_s=self.settings.upload_ttl_s,
        )
        self._watch = Watch(self._bus, self.settings.list_every_s)
        await self._probe()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch.follow())
            group.create_task(self.fleet.follow())
            group.create_task(self._move_rollouts())
            group.create_task(self._probe_always())
            group.create_task(self._work())
            group.create_task(self._collect_always())

    async def drain(self) -> None:
        """Wait for the verification under way; the next one finds what is left."""
        await self._working.acquire()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def problems(self) -> dict[str, str]:
        now = time.monotonic()
        found = {
            part: cause for part, cause in self._causes.items() if now - self._proofs.get(part, -STALE_S) >= STALE_S
        }
        if not self._bus.connected:
            found["nats"] = "not connected"
        return found | {f"policy {key}": why for key, why in (self._unregistered | self._unreconciled).items()}

    def facts(self) -> dict[str, Any]:
        return {"policies": sorted(self.models)}

    # -- work ---------------------------------------------------------------------------------

    def _terms(self, key: str) -> Terms:
        model = next(model for model in self.settings.models if model.key == key)
        rollout = model.rollout or self.settings.rollout
        return Terms(rollout.request(), rollout.deadline_s, model.cadence_s)

    async def _work(self) -> None:
        keys = [setting.key for setting in self.settings.models]
        await self.fleet.known(LEASES_S)
        await self._round(keys)
        while True:
            await self._round(await self._watch.next(keys))

    async def _round(self, keys: list[str]) -> None:
        async with self._working:
            await self._register(keys)
            for key in keys:
                await self._reconcile(key)
        if self._unregistered or self._unreconciled:
            await asyncio.sleep(RETRY_S)
            self._watch.note([*self._unregistered, *self._unreconciled])

    async def _register(self, keys: list[str]) -> None:
        """Read models not read yet, and see to it that their policies are in `rg_policies`."""
        for setting in self.settings.models:
            if setting.key not in keys:
                continue
            try:
                model = self.models.get(setting.key)
                if model is None:
                    model = await asyncio.to_thread(read_model, setting, self.settings.device, self.settings.region)
                await register(self.table, self._blobs, model)
            except RollgridError as error:
                level = log.error if isinstance(error, BadModel | BaseChanged) else log.warning
                level("policy_not_registered", policy=setting.key, code=error.code, error=error.message)
                metrics.FAILURES.labels("register").inc()
                self._unregistered[setting.key] = error.message
            else:
                self.models[setting.key] = model
                self._unregistered.pop(setting.key, None)

    async def _reconcile(self, key: str) -> None:
        if key in self._unregistered:
            return
        try:
            await self.handler.reconcile(key)
        except RollgridError as error:
            log.warning("policy_not_reconciled", policy=key, code=error.code, error=error.message)
            metrics.FAILURES.labels("reconcile").inc()
            self._unreconciled[key] = error.message
        except Exception as error:  # what somebody stored for one policy must not stop the others
            log.exception("policy_not_reconciled", policy=key)
            metrics.FAILURES.labels("reconcile").inc()
            self._unreconciled[key] = repr(error)
        else:
            self._unreconciled.pop(key, None)

    async def _move_rollouts(self) -> None:
        """Beside the verification, which may take minutes: whenever the fleet moves, and every second."""
        while True:
            self.fleet.changed.clear()
            for key in list(self.models):
                await self._move(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self.fleet.changed.wait()

    async def _move(self, key: str) -> None:
        state, workers = self.fleet.policy(key), self.fleet.workers()
        if state is None or workers is None:
            return
        self._freshness.observe(key, state, workers, self.fleet.fingerprints(), time.time())
        if state.rollout is None:
            return
        try:
            await self.handler.progress.advance(key)
        except RollgridError as error:
            log.warning("rollout_not_moved", policy=key, code=error.code, error=error.message)
            metrics.FAILURES.labels("rollout").inc()
            await asyncio.sleep(TICK_S)

    async def _collect_always(self) -> None:
        while True:
            await asyncio.sleep(self.settings.collect_every_s)
            for key in list(self.models):
                try:
                    await self._collector.collect(key)
                except RollgridError as error:
                    log.warning("not_collected", policy=key, code=error.code, error=error.message)
                    metrics.FAILURES.labels("collect").inc()

    # -- readiness ----------------------------------------------------------------------------

    async def _probe_always(self) -> None:
        while True:
            await asyncio.sleep(PROBE_PERIOD_S)
            await self._probe()

    async def _probe(self) -> None:
        for part, attempt in (("nats", self._try_nats), ("s3", self._try_s3)):
            try:
                await attempt()
            except RollgridError as error:
                self._causes[part] = error.message
            else:
                self._proofs[part] = time.monotonic()

    async def _try_nats(self) -> None:
        watch = topology.CHECKPOINT_WATCH
        if await self._bus.consumer_info(watch.stream, watch.durable) is None:
            raise BusError(f"{watch.stream}/{watch.durable} does not exist")

    async def _try_s3(self) -> None:
        await self._blobs.probe(self.name)
