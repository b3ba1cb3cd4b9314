"""Wiring of the scorer: one durable, bounded work, heartbeats for all that is held, a drain that ends it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rollgrid_contracts import topology
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_runtime.errors import BusError, ConsumerGone, RollgridError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery
from rollgrid_runtime.service import connections, instance_name

from . import metrics
from .calls import Item, Shared
from .handler import KIND, Handler
from .isolation import Pool
from .registry import Registry
from .settings import ScorerSettings
from .workers import hide_this_process

log = get_logger(__name__)
PROBE_PERIOD_S = 5.0
PROBE_TIMEOUT_S = 10.0
STALE_S = 20.0
"""A part whose last proof is older than this is a problem."""
IDLE_S = 0.25


class ScorerService:
    """Reads `scorer-verifier`; see `Handler` for what happens to one event."""

    name = "scorer"

    def __init__(self, settings: ScorerSettings) -> None:
        self.settings = settings
        self.consumer = topology.scorer_consumer(KIND)
        self._stack = contextlib.AsyncExitStack()
        self._held: dict[asyncio.Task[None], Delivery] = {}
        self._stopping = False
        self._fetched_last = asyncio.Event()
        self._proofs: dict[str, float] = {}
        self._causes: dict[str, str] = {"verifier": "not tried yet", "nats": "not tried yet", "s3": "not tried yet"}

    async def start(self) -> None:
        """Raises RollgridError when a server or the worker processes are out of reach."""
        hide_this_process()
        instance = instance_name(self.settings, self.name)
        try:
            self.registry = Registry(self.settings.verifiers)
        except ValueError as error:
            raise RollgridError(ErrorCode.INVALID_REQUEST, str(error), boundary=Boundary.SCORER) from error
        self._bus, self._blobs = await self._stack.enter_async_context(connections(instance))
        self.pool = Pool(self.settings.workers, self.settings.worker_memory_mb, self.settings.verifiers)
        self._stack.push_async_callback(self.pool.close)
        await self.pool.start()
        await ensure_consumer(self._bus, self.consumer)
        metrics.HELD.set_function(lambda: len(self._held))
        metrics.REPLACED.set_function(lambda: self.pool.replaced)
        self._commit = GroupCommit(self._bus)
        self._handler = Handler(self._commit, self.pool, self.registry, instance, self.settings.max_timeout_s)
        await self._probe()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._commit.run())
            group.create_task(self._heartbeat())
            group.create_task(self._probe_always())
            group.create_task(self._work())

    async def drain(self) -> None:
        """Take nothing more; end what is held.  What does not end in time is redelivered."""
        self._stopping = True
        await self._fetched_last.wait()
        while self._held:
            await asyncio.wait(self._held)

    async def stop(self) -> None:
        for task in list(self._held):
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)
        await self._stack.aclose()

    async def problems(self) -> dict[str, str]:
        now = time.monotonic()
        found = {
            part: cause for part, cause in self._causes.items() if now - self._proofs.get(part, -STALE_S) >= STALE_S
        }
        if not self._bus.connected:
            found["nats"] = "not connected"
        return found

    def facts(self) -> dict[str, Any]:
        return {
            "verifiers": self.registry.names,
            "workers": self.settings.workers,
            "workers_replaced": self.pool.replaced,
            "held": len(self._held),
        }

    # -- work ---------------------------------------------------------------------------------

    async def _work(self) -> None:
        puller = self._bus.puller(self.consumer)
        while not self._stopping:
            free = self.settings.max_events - len(self._held)
            if free <= 0:
                await asyncio.wait(self._held, return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                deliveries = await puller.fetch(free, IDLE_S)
            except ConsumerGone:
                log.warning("consumer_gone", durable=self.consumer.durable)
                await self._restore_consumer()
                continue
            except BusError as error:
                log.warning("fetch_failed", error=error.message)
                await asyncio.sleep(IDLE_S)
                continue
            for delivery in deliveries:
                task = asyncio.create_task(self._handle(delivery))
                self._held[task] = delivery
                task.add_done_callback(self._held.pop)
        with contextlib.suppress(BusError):
            await puller.close()
        self._fetched_last.set()

    async def _handle(self, delivery: Delivery) -> None:
        try:
            await self._handler.handle(delivery)
        except asyncio.CancelledError:
            with contextlib.suppress(BusError):
                await delivery.nak()
            raise
        except BusError as error:  # the ack did not go out: the event comes again, its msg-id stays
            log.warning("ack_failed", sequence=delivery.sequence, error=error.message)

    async def _restore_consumer(self) -> None:
        try:
            await ensure_consumer(self._bus, self.consumer)
        except BusError as error:
            log.warning("consumer_not_restored", error=error.message)
            await asyncio.sleep(1)

    async def _heartbeat(self) -> None:
        """Tell the server every third of the ack-wait that what is held is being worked on."""
        while True:
            await asyncio.sleep(self._bus.settings.ack_wait_s / 3)
            for delivery in list(self._held.values()):
                try:
                    await delivery.in_progress()
                except BusError as error:
                    log.warning("heartbeat_failed", error=error.message)
                    break

    # -- readiness ----------------------------------------------------------------------------

    async def _probe_always(self) -> None:
        while True:
            await asyncio.sleep(PROBE_PERIOD_S)
            await self._probe()

    async def _probe(self) -> None:
        """Try each part for real: a verifier in a worker process, the durable, a write and read of S3."""
        for part, attempt in (("verifier", self._try_verifier), ("nats", self._try_nats), ("s3", self._try_s3)):
            try:
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    await attempt()
            except RollgridError as error:
                self._causes[part] = error.message
            except TimeoutError:
                self._causes[part] = f"no answer within {PROBE_TIMEOUT_S:g} s"
            else:
                self._proofs[part] = time.monotonic()

    async def _try_verifier(self) -> None:
        items = [Item(0, "ready", None, None, 1, 0)]
        outcomes = await self.pool.judge("exact_match", {"answer": "ready"}, Shared(None, None, {}, {}), items, 5.0)
        if outcomes[0].status is not ScoreStatus.SCORED or outcomes[0].value != 1.0:
            raise RollgridError(ErrorCode.NOT_READY, str(outcomes[0].detail), boundary=Boundary.SCORER)

    async def _try_nats(self) -> None:
        if await self._bus.consumer_info(self.consumer.stream, self.consumer.durable) is None:
            raise BusError(f"{self.consumer.stream}/{self.consumer.durable} does not exist")

    async def _try_s3(self) -> None:
        await self._blobs.probe(self.name)
