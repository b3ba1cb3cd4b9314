"""Wiring: the ledger (active or standing by) and the archiver in one process, either can be left out."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

from rollgrid_contracts.topology import TRAJECTORIES
from rollgrid_contracts.trajectories import Superseded
from rollgrid_runtime.archive import ArchiveManifests
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, Conflict, ConsumerGone, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import provision
from rollgrid_runtime.queue_lag import QueueLag
from rollgrid_runtime.service import instance_name
from rollgrid_runtime.settings import NatsSettings, S3Settings

from . import metrics
from .archiver import Archiver
from .authority import Authority, LeaseLost
from .retention import Retention
from .session import LedgerSession, Reconnected, Work
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
ENDS_A_SESSION = (LeaseLost, Reconnected, Conflict, BusError, StorageError, ConsumerGone)
RESTART_S = 0.5


class LedgerRole:
    """Stands by until it may take over, is the ledger until it loses that, and stands by again.

    `companions` work while it is the ledger: of two loggers only one archives.
    """

    def __init__(self, bus: Bus, blobs: Blobs, settings: TrajectoryLoggerSettings, name: str) -> None:
        self.companions: list[Work] = []
        self._bus, self._blobs, self._settings = bus, blobs, settings
        self.authority = Authority(bus, name)
        self.session: LedgerSession | None = None
        self._manifests = ArchiveManifests(blobs)
        self.problem: str | None = None

    async def run(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                lease = await self.authority.wait_turn()
                await self.authority.claim(lease)
                self.problem = None
                self.session = LedgerSession(self._bus, self._blobs, self._manifests, self.authority, self._settings)
                # A task of its own: a failed task group leaves a count of cancels on the task it ran in.
                await asyncio.create_task(self.session.run(self.companions))
            except* ENDS_A_SESSION as errors:
                self.problem = "; ".join(sorted({repr(error) for error in _leaves(errors)}))
                log.warning("ledger_session_ended", epoch=self.authority.epoch, why=self.problem)
                if task.cancelling():  # the session was cancelled and failed at once: errors go before a cancel
                    raise asyncio.CancelledError from None
            finally:
                self.session = None
                metrics.EPOCH.set(0)
            await asyncio.sleep(RESTART_S)

    def take_superseded(self) -> list[Superseded]:
        if self.session is None:
            return []
        taken = list(self.session.ledger.superseded_recent)
        self.session.ledger.superseded_recent.clear()
        return taken


class TrajectoryLogger:
    name = "trajectory_logger"

    def __init__(self, settings: TrajectoryLoggerSettings) -> None:
        self._settings = settings
        self._instance = instance_name(settings, "trajectory-logger")
        self._stack = contextlib.AsyncExitStack()
        self._ledger: LedgerRole | None = None
        self._archiver: Archiver | None = None
        self._roles: list[Work] = []

    async def start(self) -> None:
        """Connect.  Raises BusError.  S3 may be away: groups are closed without it, and archived when it is back."""
        # Hundreds of thousands of small long-lived structs without cycles: let the collector look less often.
        gc.set_threshold(50_000, 20, 50)
        self._blobs = Blobs(S3Settings())
        self._stack.callback(self._blobs.close)
        self._bus = await Bus.connect(NatsSettings(), self._instance, self._blobs)
        self._stack.push_async_callback(self._bus.close)
        await provision(self._bus)
        if self._settings.ledger:
            self._ledger = LedgerRole(self._bus, self._blobs, self._settings, self._instance)
            self._ledger.companions.append(QueueLag(self._bus).run)
        self._roles = [self._ledger.run] if self._ledger else []
        if self._settings.archiver:
            superseded = self._ledger.take_superseded if self._ledger else list
            self._archiver = Archiver(self._bus, self._blobs, self._settings, self._instance, superseded)
            retention = Retention(self._bus, self._settings, self._archived_to)
            works: list[Work] = [self._archiver.run, self._archiver.keep_superseded, retention.run]
            (self._ledger.companions if self._ledger else self._roles).extend(works)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for role in self._roles:
                tasks.create_task(role())

    async def drain(self) -> None:
        """Hand the lease on: whatever is unfinished is read again by the next ledger, nothing is held here alone."""
        if self._ledger is not None and self._ledger.session is not None:
            await self._ledger.authority.release()

    async def stop(self) -> None:
        await self._stack.aclose()

    async def problems(self) -> dict[str, str]:
        """Ready means: JetStream answers now, the ledger is live or standing by, the archive keeps up with S3."""
        found: dict[str, str] = {}
        try:
            await self._bus.stream_info(TRAJECTORIES.name)
        except BusError as error:
            found["nats"] = error.message
        if self._ledger is not None:
            if self._ledger.session is not None:
                found |= self._ledger.session.problems
            elif self._ledger.problem is not None and not self._ledger.authority.standing_by:
                found["ledger"] = self._ledger.problem
        archives = self._archiver is not None and (self._ledger is None or self._ledger.session is not None)
        if archives and self._archiver is not None and self._archiver.problem is not None:
            found["archive"] = self._archiver.problem
        return found

    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"instance": self._instance}
        if self._ledger is not None:
            session = self._ledger.session
            facts["ledger"] = "active" if session else "standby"
            facts |= session.facts if session else {"epoch": 0}
        if self._archiver is not None:
            facts |= self._archiver.facts
        return facts

    def _archived_to(self) -> int | None:
        return self._archiver.archived_to if self._archiver is not None and self._archiver.known else None


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
