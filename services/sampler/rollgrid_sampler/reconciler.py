"""Brings the engine to what is wanted, one step after the other; between steps it answers truthfully.

Full weights: stage while generation goes on, wait for groups that need the old version, apply, look at
the fingerprint.  LoRA versions: stage, make room, load beside the others, then move `current`.  A step
that fails leaves what was loaded before.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

from rollgrid_contracts.checkpoints import AdoptedVersion
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger

from . import metrics
from .desired import Wanted
from .engines.base import Engine, EngineDead, Loaded, WeightsRefused
from .fingerprints import Finding
from .folders import Folders, Staged
from .proofs import Proofs
from .settings import SamplerSettings
from .uses import Uses

log = get_logger(__name__)
ADAPTER = "lora"
"""Label of swaps that add a LoRA version."""


class Reconciler:
    """`notify` is called at every change that others should hear of at once, `on_warm` with each version
    that was applied to a running engine; `released` returns when no pinned session needs that version any more.

    `current` is the version that new requests without a constraint get, `retiring` are LoRA versions
    that new requests do not get any more; `holding_back` while a swap waits for groups.
    """

    def __init__(
        self,
        engine: Engine,
        folders: Folders,
        proofs: Proofs,
        settings: SamplerSettings,
        notify: Callable[[], None],
        on_warm: Callable[[Staged], None],
        released: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engine, self._folders, self._proofs = engine, folders, proofs
        self._settings, self._notify, self._on_warm, self._released = settings, notify, on_warm, released
        self.uses = Uses()
        self.current = -1
        self.retiring: set[int] = set()
        self._moved = asyncio.Event()
        self.swapping = False
        self.holding_back = False
        self.loaded_at: dict[int, float] = {}
        self.committed_at: dict[int, float] = {}
        self._before: AdoptedVersion | None = None
        self._full: AdoptedVersion | None = None

    # -- the start ----------------------------------------------------------------------------

    async def start(self, full: AdoptedVersion) -> None:
        """Load the full weights into a new engine.  Raises StorageError, WeightsRefused, EngineDead, Quarantined."""
        staged = await self._folders.stage(full)
        await self._engine.start(staged.version, staged.folder)
        facts = self._engine.facts
        self._proofs.engine_class = facts.fingerprint_class or facts.name
        self._full = full
        self._is_loaded(staged, cold=True)
        self._set_current(staged.version)
        await self._look(staged, self._engine.loaded.fingerprint, cold=True)

    async def converge(self, want: Wanted, *, cold: bool = False) -> None:
        """One step after the other until everything wanted is loaded.

        `cold`: nothing but the start has gone before, so that what is loaded now is loaded cold.

        Raises StorageError, WeightsRefused (what could be done was done), EngineDead, Quarantined.
        """
        if want.current != want.full.version and not want.adapters:
            raise WeightsRefused(
                f"version {want.current} is a LoRA version, and this worker takes {self._engine.facts.max_loras}",
                intact=True,
            )
        if want.full.version != self._engine.loaded.version:
            await self._swap(want.full, want.adapters[:1])
        failed: RollgridError | None = None
        for adapter in want.adapters:
            if adapter.version not in self._engine.loaded.adapters:
                try:
                    await self._add(adapter, want, cold=cold)
                except EngineDead:
                    raise
                except RollgridError as error:
                    failed = failed or error
            if adapter.version in self._engine.loaded.adapters:
                self.retiring.discard(adapter.version)
                self._move(want, adapter.version)
        self._move(want, want.full.version)
        await self._drop(want)
        if failed is not None:
            raise failed

    def _move(self, want: Wanted, version: int) -> None:
        if version == want.current != self.current:
            self._set_current(version)

    def _set_current(self, version: int) -> None:
        self.current = version
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()
        self._notify()

    async def moved(self) -> None:
        """Returns when `current` is another."""
        await self._moved.wait()

    # -- full weights -------------------------------------------------------------------------

    async def _swap(self, full: AdoptedVersion, soon: tuple[AdoptedVersion, ...]) -> None:
        staged = await self._folders.stage(full)
        for adapter in soon:  # so that it follows at once
            await self._folders.stage(adapter)
        if staged.folder is None:
            raise WeightsRefused(f"no folder for version {full.version}", intact=True)
        await self._prepare(full.version, staged.folder)
        old = self._engine.loaded.version
        before = self._proofs.finding(old)
        self.holding_back = True
        try:
            if not await self._let_go(old):
                log.warning("groups_lose_their_version", version=old, grace_s=self._settings.pin_grace_s)
            # no group that needs one version may begin on the old one while the new one is being applied
            loaded = await self._apply(staged, self._settings.swap_mode)
        finally:
            self.holding_back = False
        self._before, self._full = self._full, full
        self._is_loaded(staged)
        self._set_current(loaded.version)
        await self._look(staged, loaded.fingerprint, before=before)
        log.info("version_applied", version=loaded.version, fingerprint=loaded.fingerprint)

    async def _prepare(self, version: int, folder: Path) -> None:
        try:
            await self._engine.prepare(version, folder)
        except WeightsRefused:
            metrics.SWAPS.labels(self._settings.swap_mode.value, "failed").inc()
            raise

    async def _let_go(self, version: int) -> bool:
        """Whether sessions and groups that need this one version were through with it within the grace."""
        ends = time.monotonic() + self._settings.pin_grace_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.pin_grace_s):
                await self._released(version)
        return await self.uses.freed(version, max(0.0, ends - time.monotonic()))

    async def _apply(self, staged: Staged, mode: OnRefresh) -> Loaded:
        assert staged.folder is not None
        self._proofs.expect(staged.version)
        try:
            with self._pause(staged.version, mode):
                return await self._engine.load_version(staged.version, staged.folder, mode)
        except WeightsRefused as error:
            metrics.SWAPS.labels(mode.value, "failed").inc()
            self._proofs.give_up(staged.version)
            if not error.intact:
                await self._restore(error)
            raise

    async def _restore(self, cause: WeightsRefused) -> None:
        """Put the old version's bytes back, whole; without them the process must start anew."""
        full = self._full
        if full is None:
            raise EngineDead(f"the engine's weights are in doubt: {cause.message}") from cause
        try:
            staged = await self._folders.stage(full)
            if staged.folder is None:
                raise WeightsRefused("it has no folder", intact=False)
            loaded = await self._engine.load_version(full.version, staged.folder, self._settings.swap_mode)
        except EngineDead:
            raise
        except RollgridError as error:
            raise EngineDead(f"the engine's weights are in doubt, version {full.version}: {error.message}") from error
        log.warning("version_restored", version=full.version)
        await self._look(staged, loaded.fingerprint)

    @contextlib.contextmanager
    def _pause(self, version: int, mode: OnRefresh) -> Iterator[None]:
        """The time in which new requests wait, told and measured; an alarm when it does not end."""
        begun, deadline_s = time.monotonic(), self._settings.swap_deadline_s

        def overdue() -> None:
            metrics.SWAP_OVERDUE.set(1)
            log.error("swap_overdue", version=version, deadline_s=deadline_s)

        alarm = asyncio.get_running_loop().call_later(deadline_s, overdue)
        self.swapping = True
        self._notify()
        try:
            yield
            metrics.SWAPS.labels(mode.value, "applied").inc()
            metrics.SWAP_SECONDS.labels(mode.value).observe(time.monotonic() - begun)
        finally:
            alarm.cancel()
            metrics.SWAP_OVERDUE.set(0)
            self.swapping = False
            self._notify()

    # -- LoRA versions ------------------------------------------------------------------------

    async def _add(self, adapter: AdoptedVersion, want: Wanted, *, cold: bool) -> None:
        staged = await self._folders.stage(adapter)
        if staged.folder is None:
            raise WeightsRefused(f"no folder for version {adapter.version}", intact=True)
        await self._make_room(want)
        newest = max(self._engine.loaded.adapters, default=None)
        before = self._proofs.finding(newest) if newest is not None else None
        base = self._proofs.finding(self._engine.loaded.version)
        if before is not None and base is not None and before.fingerprint == base.fingerprint:
            before = None  # adapters that change nothing yet (B = 0, as training begins) look alike
        self._proofs.expect(adapter.version)
        try:
            loaded = await self._engine.add_adapter(adapter.version, staged.folder)
        except WeightsRefused:
            metrics.SWAPS.labels(ADAPTER, "failed").inc()
            self._proofs.give_up(adapter.version)
            raise
        metrics.SWAPS.labels(ADAPTER, "applied").inc()
        self._is_loaded(staged, cold=cold)
        self._notify()
        await self._look(staged, loaded.adapters.get(adapter.version), before=before, cold=cold)
        log.info("adapter_loaded", version=adapter.version, loaded=sorted(loaded.adapters))

    async def _make_room(self, want: Wanted) -> None:
        """Unload what is worth least, until one more fits."""
        wanted = {version.version for version in want.adapters}
        while len(loaded := self._engine.loaded.adapters) >= max(1, self._engine.facts.max_loras):
            spare = [version for version in loaded if version not in wanted]
            if not spare:
                raise WeightsRefused(f"{len(loaded)} LoRA versions are loaded and wanted", intact=True)
            await self._remove(min(spare, key=lambda version: (version in self.uses, version)))

    async def _drop(self, want: Wanted) -> None:
        """Unload what nobody wants or uses, and let go of folders that nothing needs."""
        wanted = {version.version for version in want.adapters}
        for version in [one for one in self._engine.loaded.adapters if one not in wanted]:
            if version not in self.uses:
                await self._remove(version)
        loaded = {self._engine.loaded.version, *self._engine.loaded.adapters}
        self._proofs.forget(loaded)
        for version in [one for one in self.loaded_at if one not in loaded]:
            del self.loaded_at[version]
        before = self._before.version if self._before is not None else 0
        await self._folders.forget({*loaded, *(version.version for version in want.versions), before})

    async def _remove(self, version: int) -> None:
        self.retiring.add(version)
        try:
            free = await self.uses.freed(version, self._settings.pin_grace_s)
            await self._engine.remove_adapter(version, OnRefresh.WAIT if free else OnRefresh.ABORT)
        finally:
            self.retiring.discard(version)
            self._notify()
        log.info("adapter_unloaded", version=version, waited=free)

    # -- what is loaded -----------------------------------------------------------------------

    def _is_loaded(self, staged: Staged, *, cold: bool = False) -> None:
        now = time.time()
        self.loaded_at[staged.version] = now
        metrics.ADAPTERS.set(len(self._engine.loaded.adapters))
        if staged.committed_at and not cold:  # else the lag would be the worker's age
            self.committed_at = {**dict(list(self.committed_at.items())[-64:]), staged.version: staged.committed_at}
            metrics.APPLY_LAG.observe(max(0.0, now - staged.committed_at))

    async def _look(
        self, staged: Staged, fingerprint: str | None, *, before: Finding | None = None, cold: bool = False
    ) -> None:
        if fingerprint is None:  # an engine that cannot be probed
            self._proofs.give_up(staged.version)
            return
        await self._proofs.look(Finding(staged.version, fingerprint, cold, staged.digest), before)
        if not cold:
            self._on_warm(staged)
