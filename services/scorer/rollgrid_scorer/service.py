"""Wiring of the scorer: one reader and handler for each kind of scorer that this service runs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from rollgrid_contracts import topology
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.scoring import ScorerKind, ScoreStatus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.group_commit import GroupCommit
from rollgrid_runtime.service import connections, instance_name
from rollgrid_runtime.settings import WebhookSettings
from rollgrid_runtime.webhooks import AllowList

from . import metrics
from .calls import Item, Shared
from .handler import Handler
from .isolation import Pool
from .judges import Judge
from .reader import Reader
from .registry import Registry
from .settings import ScorerSettings
from .turns import Turns
from .verifiers import Verifiers
from .webhook_client import WebhookClient
from .webhooks import Webhooks
from .workers import hide_this_process

PROBE_PERIOD_S = 5.0
PROBE_TIMEOUT_S = 10.0
STALE_S = 20.0
"""A part whose last proof is older than this is a problem."""
LARGE_AT_ONCE = 16


class ScorerService:
    """Reads `scorer-verifier` and `scorer-webhook`; see `Handler` for what happens to one event."""

    name = "scorer"

    def __init__(self, settings: ScorerSettings) -> None:
        self.settings = settings
        self._stack = contextlib.AsyncExitStack()
        self._readers: list[Reader] = []
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
        metrics.HELD.set_function(lambda: sum(reader.held for reader in self._readers))
        metrics.REPLACED.set_function(lambda: self.pool.replaced)
        self._commit = GroupCommit(self._bus)
        verifiers = Verifiers(self.pool, self.registry, self.settings.max_timeout_s)
        await self._read(verifiers, instance, self.settings.max_events, LARGE_AT_ONCE)
        # each webhook has its share of these, the large ones included: a bound of their own would let one stop all
        await self._read(self._webhooks(), instance, self.settings.webhook_events, self.settings.webhook_events)
        await self._probe()

    def _webhooks(self) -> Webhooks:
        """Made even when nothing is allowed: jobs that wait for a webhook then get their refusal as a status."""
        settings, allowed = self.settings, AllowList(WebhookSettings().allow)
        client = WebhookClient(
            attempts=settings.webhook_attempts, max_bytes=settings.webhook_max_bytes, ca_file=settings.webhook_ca_file
        )
        self._stack.push_async_callback(client.close)
        turns = Turns(settings.webhook_events * 3 // 4, settings.webhook_share, settings.webhook_running)
        try:
            keys = settings.webhook_keys(allowed)
        except ValueError as error:
            raise RollgridError(ErrorCode.INVALID_REQUEST, str(error), boundary=Boundary.SCORER) from error
        return Webhooks(
            client, allowed, turns, keys, running=settings.webhook_running, max_timeout_s=settings.max_timeout_s
        )

    async def _read(self, judge: Judge, instance: str, limit: int, large: int) -> None:
        handler = Handler(self._bus, self._commit, judge, instance, large)
        reader = Reader(self._bus, topology.scorer_consumer(judge.kind), handler, limit)
        await reader.ensure_consumer()
        self._readers.append(reader)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._commit.run())
            group.create_task(self._probe_always())
            for reader in self._readers:
                group.create_task(reader.run())

    async def drain(self) -> None:
        """Take nothing more; end what is held.  What does not end in time is redelivered."""
        await asyncio.gather(*(reader.drain() for reader in self._readers))

    async def stop(self) -> None:
        for reader in self._readers:
            await reader.cancel()
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
            "held": sum(reader.held for reader in self._readers),
        }

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
        for consumer in map(topology.scorer_consumer, (ScorerKind.VERIFIER, ScorerKind.WEBHOOK)):
            if await self._bus.consumer_info(consumer.stream, consumer.durable) is None:
                raise BusError(f"{consumer.stream}/{consumer.durable} does not exist")

    async def _try_s3(self) -> None:
        await self._blobs.probe(self.name)
