"""Wiring and life of ingest."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import entry_points
from typing import Any

from rollgrid_contracts.topology import JOBS
from rollgrid_rendering.offload import RenderThreads
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.health import http_server
from rollgrid_runtime.leases import Leases
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.service import connections, instance_name
from rollgrid_runtime.settings import RedisSettings, WebhookSettings
from rollgrid_runtime.state import State
from rollgrid_runtime.webhooks import AllowList

from .admission import Gate, JobsShare
from .affinity import Affinity
from .app import create_app
from .auth import Keys, tenant_served
from .availability import Availability
from .catalog import Catalog
from .commits import Commits
from .door import Parts
from .fleet import Fleet
from .freshness import Freshness
from .handler import Handler
from .ledger_client import LedgerClient
from .pacing import Pacing
from .posted_rewards import PostReader
from .queue_door import QueueDoor
from .replies import Replies
from .results import Results
from .rewards import Rewards
from .scorers import Scorers
from .session_expiry import Expiry
from .session_openings import Openings
from .session_store import SessionStore
from .settings import IngestSettings
from .translate import Translator
from .turn_prompts import TurnPrompts
from .turns import Turns
from .uploads import Uploads
from .versions import Versions

log = get_logger(__name__)
KEYS_RELOAD_S = 5.0
PROBE_AGE_S = 2.0
KEEP_ALIVE_S = 75
VERIFIERS = "rollgrid.verifiers"
"""Entry points under which installed distributions offer scorers."""


class IngestService:
    """See `rollgrid_runtime.service.Service`."""

    name = "ingest"

    def __init__(self, settings: IngestSettings) -> None:
        self.settings = settings
        self.instance = instance_name(settings, self.name)
        self._stack = contextlib.AsyncExitStack()
        self._bus: Bus | None = None
        self._probed_at = float("-inf")
        self._probe_problems: dict[str, str] = {}
        self._door: QueueDoor | None = None
        self._pacing: Pacing | None = None
        self._beside: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
        self.parts: Parts | None = None

    async def start(self) -> None:
        settings = self.settings
        keys = Keys.from_settings(settings)
        bus, blobs = await self._stack.enter_async_context(connections(self.instance))

        def share() -> float:
            return keys.share(settings.tenant_share)

        threads = RenderThreads(settings.render_threads, tenant_served)
        self._stack.callback(threads.close)
        catalog = Catalog(bus, blobs, threads, settings.cache_dir)
        self._stack.push_async_callback(catalog.close)
        ledger = LedgerClient(bus)
        fleet, versions = Fleet(bus), Versions(bus, blobs)
        self._pacing = Pacing(bus, ledger, catalog)
        state = State(RedisSettings())
        self._stack.push_async_callback(state.close)
        leases = Leases(bus)
        affinity = Affinity(
            lambda: leases.alive, state, factor=settings.affinity_factor, saturation=settings.affinity_saturation
        )
        handler = Handler(
            bus,
            ledger,
            settings,
            JobsShare(bus, share),
            Availability(catalog, versions, fleet),
            self._pacing,
            affinity,
            publish_timeout_s=settings.publish_timeout_s,
        )
        self._stack.push_async_callback(handler.close)
        results = Results(bus, blobs, ledger, handler)
        posts = PostReader(bus, blobs, results.stopping)
        scorers = known_scorers(settings)
        translator = Translator(catalog, threads, settings, scorers, default_run=settings.header_run)
        replies = Replies(bus, ledger, results, poll_s=settings.reply_poll_s, grace_s=settings.reply_grace_s)
        store = SessionStore(state, bus, ledger, settings)
        self._beside = (leases.follow, affinity.count, Expiry(state, store, every_s=settings.session_sweep_s).run)
        uploads = Uploads(blobs, max_bytes=settings.max_upload_bytes, ttl_s=settings.upload_ttl_s)
        self._bus = bus
        self.parts = Parts(
            settings=settings,
            keys=keys,
            catalog=catalog,
            threads=threads,
            translator=translator,
            handler=handler,
            replies=replies,
            results=results,
            freshness=Freshness(catalog),
            ledger=ledger,
            fleet=fleet,
            uploads=uploads,
            commits=Commits(bus, blobs, uploads),
            versions=versions,
            readers=Gate("max_readers", settings.max_readers, share),
            rewards=Rewards(bus, ledger, results, posts, settings),
            posts=posts,
            openings=Openings(catalog, scorers, settings, default_run=settings.header_run),
            turns=Turns(bus, store, affinity, handler, replies),
            turn_prompts=TurnPrompts(translator.prompts, threads, settings),
            started_at=int(time.time()),
            problems=self.problems,
            facts=self.facts,
        )
        if settings.queue_door:
            self._door = QueueDoor(
                bus, self.parts.translator, handler, ledger, settings, lambda: tenants_of(keys, settings), self.problems
            )

    async def run(self) -> None:
        parts = self._wired()
        app = create_app(parts)
        options = {"timeout_keep_alive": KEEP_ALIVE_S, "backlog": 2048, "server_header": False}
        server = http_server(app, self.settings.host, self.settings.port, **options)
        async with asyncio.TaskGroup() as group:
            group.create_task(parts.catalog.follow())
            group.create_task(self._reload_keys())
            if self._door is not None:
                group.create_task(self._door.run())
            group.create_task(parts.rewards.run())
            for beside in self._beside:
                group.create_task(beside())
            async with server:
                log.info("serving", host=self.settings.host, port=self.settings.port, keys=not parts.keys.open_door)
                await asyncio.Event().wait()

    async def drain(self) -> None:
        """Refuse new work, end readers, wait for the interactive calls in hand."""
        parts = self._wired()
        parts.draining = True
        parts.results.stopping.set()
        if self._pacing is not None:
            self._pacing.stopping.set()
        if self._door is not None:
            await self._door.stop()
        if parts.waiting:
            await parts.idle.wait()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def problems(self) -> dict[str, str]:
        """What keeps ingest from accepting: shutdown, the bus, the ledger's consumer, policies, tokenizers."""
        parts, bus = self._wired(), self._bus
        if parts.draining:
            return {"draining": "shutting down"}
        if bus is None or not bus.connected:
            return {"nats": "not connected"}
        if time.monotonic() - self._probed_at > PROBE_AGE_S:
            self._probe_problems = await self._probe()
            self._probed_at = time.monotonic()
        return {**self._probe_problems, **parts.catalog.problems()}

    def facts(self) -> dict[str, Any]:
        parts = self._wired()
        return {
            "service": self.name,
            "instance": self.instance,
            "port": self.settings.port,
            "waiting": parts.waiting,
            "readers": parts.readers.held,
            "keys": not parts.keys.open_door,
        }

    async def _probe(self) -> dict[str, str]:
        """Write and read back, and find the consumer without which RG_JOBS would drop what it acknowledges."""
        parts, bus = self._wired(), self._bus
        assert bus is not None
        try:
            await parts.handler.probe(self.instance)
            names = await bus.consumer_names(JOBS.name)
        except RollgridError as error:
            return {"nats": error.message}
        if not any(name.startswith("ledger-") for name in names):
            return {"ledger": "RG_JOBS has no ledger consumer"}
        return {}

    async def _reload_keys(self) -> None:
        parts = self._wired()
        while True:
            await asyncio.sleep(KEYS_RELOAD_S)
            await asyncio.to_thread(parts.keys.reload)

    def _wired(self) -> Parts:
        if self.parts is None:
            raise RuntimeError("ingest was not started")
        return self.parts


def tenants_of(keys: Keys, settings: IngestSettings) -> frozenset[str]:
    """Who may submit by the queue."""
    return keys.submitters | frozenset(settings.queue_tenants)


def known_scorers(settings: IngestSettings) -> Scorers:
    """What a job may ask for: the settings' scorers, those of installed distributions, allowed webhooks."""
    names = {*settings.scorers, *(point.name for point in entry_points(group=VERIFIERS))}
    return Scorers(names, AllowList(WebhookSettings().allow), settings)
