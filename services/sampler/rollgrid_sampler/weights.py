"""Keeps the worker's weights on what `rg_policies` desires, and says what they are.

By level, not by message: the desired state is compared with what is loaded until they agree, so a
lost wake-up cannot wedge it.  A version that fails to apply never advances the label; the old one
answers on, or the process ends.  Weights that are not what they should be end it too (`Quarantined`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, PolicyState, staleness
from rollgrid_contracts.fleet import LoadedVersion
from rollgrid_contracts.jobs import SampleGroup, VersionRule, VersionSpan, WeightConstraint
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError, StorageError
from rollgrid_runtime.kv import Table, Versioned, View
from rollgrid_runtime.logging import get_logger

from .desired import Wanted, choose, wanted
from .engines.base import Engine, WeightsRefused
from .fingerprints import Fingerprints
from .folders import Folders
from .pinned import PinnedSessions, lost
from .pins import Pins
from .proofs import Proofs, Quarantined
from .reconciler import Reconciler
from .settings import SamplerSettings
from .spare_checks import SpareChecks

log = get_logger(__name__)
FIRST_RETRY_S = 0.5
LAST_RETRY_S = 15.0
LOOK_S = 10.0
"""What is pinned, and LoRA versions that were still in use, are looked at so often."""
SETTLE_S = 30.0
"""A sample waits so long for the first look at the version it ended on."""


class Weights:
    """`problem` says what keeps the worker from what is desired, None = nothing; `quarantined` why it is out.

    `changed` is set whenever the lease should say something else.
    """

    def __init__(self, bus: Bus, blobs: Blobs, engine: Engine, settings: SamplerSettings, worker: str) -> None:
        self._bus, self._engine, self._settings, self._worker = bus, engine, settings, worker
        self._table: Table[PolicyState] = Table(bus, POLICIES, PolicyState)
        self._view: View[PolicyState] = View(bus, self._table)
        self._key = f"{settings.tenant}.{settings.policy}"
        self._found: Versioned[PolicyState] | None = None
        self._pins = Pins(bus, settings.tenant, settings.policy)
        self._asked: frozenset[int] = frozenset()
        self._sessions = PinnedSessions(self._pins)
        self._folders = Folders(blobs, settings)
        self.changed = asyncio.Event()
        self._observed = 0
        self._started = False
        self._proofs = Proofs(bus, Fingerprints(bus, settings.tenant, settings.policy, worker), self.changed.set)
        self._spare = SpareChecks(engine, self._folders, self._proofs, settings)
        self._reconciler = Reconciler(
            engine,
            self._folders,
            self._proofs,
            settings,
            self.changed.set,
            self._spare.applied,
            self._sessions.released,
        )
        self.ready = asyncio.Event()
        self.quarantined: str | None = None
        self._problem: str | None = "not loaded yet"

    # -- what others ask ----------------------------------------------------------------------

    @property
    def state(self) -> PolicyState | None:
        found = self._view.values.get(self._key, self._found)
        return found.value if found is not None else None

    @property
    def problem(self) -> str | None:
        return self._problem

    @problem.setter
    def problem(self, value: str | None) -> None:
        if value != self._problem:
            self._problem = value
            self.changed.set()

    @property
    def swapping(self) -> bool:
        return self._reconciler.swapping

    @property
    def behind(self) -> int:
        """Positions between what is desired and what new requests get."""
        return 0 if self.state is None else staleness(self.state, self._reconciler.current)

    @property
    def current(self) -> int:
        return self._reconciler.current

    def loaded(self) -> tuple[LoadedVersion, ...]:
        """The full weights, and the LoRA versions on them."""
        now = self._engine.loaded
        if now.version < 0:
            return ()
        found = {now.version: now.fingerprint, **now.adapters}
        return tuple(
            LoadedVersion(
                policy=self._settings.policy,
                tenant=self._settings.tenant,
                version=version,
                fingerprint=fingerprint,
                policy_revision=self._observed,
                kind=CheckpointKind.FULL if version == now.version else CheckpointKind.LORA,
                base_version=0 if version == now.version else now.version,
                current=version == self._reconciler.current,
                confirmed=self._proofs.confirmed(version),
                loaded_at=self._reconciler.loaded_at.get(version, 0.0),
            )
            for version, fingerprint in found.items()
        )

    def choose(self, constraint: WeightConstraint) -> int | None:
        """The loaded version that serves a job now, None = none of them may."""
        now = self._engine.loaded
        if now.version < 0:
            return None
        usable = [now.version, *(one for one in now.adapters if one not in self._reconciler.retiring)]
        return choose(constraint, self._reconciler.current, usable, self.state)

    def met(self, job: SampleGroup) -> bool:
        """Whether the job may be begun now.  A group that needs one version does not begin on one that goes."""
        version = self.choose(job.weights)
        going = self._reconciler.holding_back and needs_one(job) and not self._sessions.known(job)
        return version is not None and not going

    def lost(self, job: SampleGroup) -> bool:
        """Whether the version of a pinned session is not here and, as far as the policy's state tells, never will be."""
        if job.session is None or job.weights.rule is not VersionRule.EXACT or self.has(job.weights.value):
            return False
        return lost(job.weights.value, self._want(), self.state)

    async def serves(self, job: SampleGroup) -> None:
        """Wait until the job may be begun."""
        while not self.met(job):
            await self._reconciler.moved()

    def is_adapter(self, version: int) -> bool:
        return version in self._engine.loaded.adapters

    def has(self, version: int) -> bool:
        return version >= 0 and (version == self._engine.loaded.version or self.is_adapter(version))

    async def moved(self, version: int, constraint: WeightConstraint) -> None:
        """Wait until a request that runs on `version` would get another one."""
        while self.choose(constraint) in (None, version):
            await self._reconciler.moved()

    @contextlib.contextmanager
    def use(self, version: int, job: SampleGroup | None = None) -> Iterator[None]:
        """Of a LoRA version: it stays loaded.  Of the full weights: a swap waits (both within their grace).

        For a pinned session's turn the swap waits for the session, too.
        """
        turn = contextlib.nullcontext() if job is None else self._sessions.playing(job, version)
        with turn, self._reconciler.uses.of(version):
            yield

    async def proven(self, spans: tuple[VersionSpan, ...]) -> bool:
        """Wait for the first look at versions just applied; whether none of them was found wrong."""
        try:
            return await self._proofs.settled([span.version for span in spans], SETTLE_S)
        except TimeoutError:
            return False

    def fingerprint(self, version: int) -> tuple[str | None, bool]:
        """Of a version that is or was loaded here, and whether a cold load gave the same; (None, False) of another."""
        found = self._proofs.finding(version)
        return (None, False) if found is None else (found.fingerprint, self._proofs.confirmed(version))

    def committed_at(self, version: int) -> float:
        """UNIX seconds at which the version was published, 0.0 = not known."""
        return self._reconciler.committed_at.get(version, 0.0)

    # -- life ---------------------------------------------------------------------------------

    async def load(self) -> None:
        """Start the engine on the full weights that are desired.  Raises EngineDead, Quarantined (see `heal`)."""
        self._note(await self._wait_for_policy())
        delay = FIRST_RETRY_S
        while True:
            try:
                await self._reconciler.start(self._want().full)
            except Quarantined as wrong:
                self.quarantined = wrong.message
                raise
            except (StorageError, WeightsRefused, OSError) as error:
                self.problem = f"not loaded: {error}"
                log.error("weights_not_loaded", error=str(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)
                self._note(await self._read() or self._found)
                continue
            self._started = True
            return

    async def follow(self) -> None:
        """Catch up, set `ready`, then reconcile until cancelled.  Raises EngineDead, Quarantined in a group."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._view.follow())
                group.create_task(self._listen_to_pins())
                await self._catch_up()
                group.create_task(self._reconcile())
                group.create_task(self._proofs.watch())
                group.create_task(self._spare.run())
        except BaseExceptionGroup as failed:
            wrong, _ = failed.split(Quarantined)
            if wrong is not None:
                self.quarantined = str(wrong.exceptions[0])
                self.changed.set()
            raise

    async def heal(self) -> None:
        """Quarantined and out of rotation: mend what is on disk, so that a new process loads it clean.

        Before one starts anew over weights that were wrong from the start and whose files are good, time
        passes: the fleet's record may be what is wrong, and be replaced yet.
        """
        damaged: tuple[str, ...] = ()
        try:
            damaged = await self._folders.repair()
        except (RollgridError, OSError) as error:
            log.error("staged_files_not_checked", error=str(error))
        if damaged:
            log.error("staged_files_replaced", files=damaged)
        elif not self._started:
            await asyncio.sleep(self._settings.heal_s)

    def release(self) -> None:
        self._folders.release()

    # -- reconciling --------------------------------------------------------------------------

    async def _catch_up(self) -> None:
        """Until everything desired is loaded; a worker that joins during a refresh is not ready before."""
        delay = FIRST_RETRY_S
        while True:
            self._note(await self._read() or self._found)
            seen = self._found
            try:
                await self._refresh_asked()
                await self._reconciler.converge(self._want(), cold=True)
            except WeightsRefused as error:  # by the engine, for good: others serve the old version too
                self.problem = f"not caught up: {error.message}"
                break
            except (StorageError, OSError) as error:
                self.problem = f"not caught up: {error}"
                log.error("weights_not_caught_up", error=str(error))
                await asyncio.sleep(delay)
                delay = min(2 * delay, LAST_RETRY_S)
                continue
            self._agreed(seen)
            fresh = await self._read()
            if fresh is None or seen is None or fresh.revision == seen.revision:
                break
        self.ready.set()

    async def _reconcile(self) -> None:
        delay = FIRST_RETRY_S
        while True:
            self._view.changed.clear()
            self._note(self._view.values.get(self._key, self._found))
            seen = self._found
            wait = LOOK_S if self._engine.facts.max_loras else None
            try:
                await self._refresh_asked()
                await self._reconciler.converge(self._want())
            except (StorageError, WeightsRefused, OSError) as error:
                desired = seen.value.desired if seen is not None else 0
                refused = isinstance(error, WeightsRefused)  # `version N:` sends a rollout back, an outage must not
                self.problem = f"version {desired}: {error}" if refused else f"fetching version {desired}: {error}"
                log.error("version_not_applied", version=desired, loaded=self.current, error=str(error))
                wait, delay = delay, min(2 * delay, LAST_RETRY_S)
            else:
                self._agreed(seen)
                delay = FIRST_RETRY_S
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._view.changed.wait()

    def _agreed(self, seen: Versioned[PolicyState] | None) -> None:
        self.problem = None
        revision = seen.revision if seen is not None else 0
        if revision != self._observed:
            self._observed = revision
            self.changed.set()

    def _want(self) -> Wanted:
        if self._found is None:  # nobody says what is desired: the folder this worker was given
            return Wanted(0, AdoptedVersion(version=0))
        places = self._engine.facts.max_loras if self._started else self._settings.lora_places
        return wanted(self._found.value, self._worker, places, self._asked)

    def _note(self, found: Versioned[PolicyState] | None) -> None:
        self._found = found
        self._proofs.recording = found is not None

    async def _read(self) -> Versioned[PolicyState] | None:
        try:
            return await self._table.get(self._key)
        except BusError as error:
            log.warning("policy_unreadable", error=error.message)
            return None

    async def _wait_for_policy(self) -> Versioned[PolicyState] | None:
        try:
            async with asyncio.timeout(self._settings.policy_wait_s):
                while True:
                    found = await self._read()
                    if found is not None:
                        return found
                    await asyncio.sleep(0.2)
        except TimeoutError:
            log.warning("policy_unknown", policy=self._key, waited_s=self._settings.policy_wait_s)
            return None

    # -- pins ---------------------------------------------------------------------------------

    async def _refresh_asked(self) -> None:
        """Which LoRA versions somebody holds a pin on; the last answer while nobody answers."""
        state = self._found.value if self._found is not None else None
        if state is None or not self._engine.facts.max_loras:
            return
        loras = {version.version for version in state.versions if version.kind is CheckpointKind.LORA}
        try:
            self._asked = await self._pins.asked(loras) if loras else frozenset()
        except BusError as error:
            log.warning("pins_unreadable", error=error.message)

    async def _listen_to_pins(self) -> None:
        if not self._engine.facts.max_loras:
            return

        async def heard(_: object) -> None:
            self._view.changed.set()

        subscription = await self._bus.subscribe_raw(self._pins.subject(), heard)
        try:
            await asyncio.Event().wait()
        finally:
            await self._bus.unsubscribe(subscription)


def needs_one(job: SampleGroup) -> bool:
    """Whether one version must make all of the job."""
    return job.pinned or job.weights.rule is VersionRule.EXACT
