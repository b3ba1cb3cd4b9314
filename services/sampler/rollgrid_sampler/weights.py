"""Keeps the engine on the version that `rg_policies` desires.

By level, not by message: the desired state is compared with what is loaded until they agree, so a
lost wake-up cannot wedge it.  A version that fails to apply never advances the label; the old one
answers on, or the process ends.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import tempfile
import time
from pathlib import Path

from rollgrid_contracts import codec
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    CheckpointKind,
    CheckpointManifest,
    FileInfo,
    PolicyState,
    version_root,
)
from rollgrid_contracts.fleet import LoadedVersion
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, StorageError
from rollgrid_runtime.kv import Table, Versioned, View
from rollgrid_runtime.logging import get_logger

from . import metrics
from .engines.base import Engine, EngineDead, WeightsRefused
from .settings import SamplerSettings

log = get_logger(__name__)
RETRY_S = 5.0
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf")


def met(constraint: WeightConstraint, loaded: int, state: PolicyState | None) -> bool:
    """Whether the loaded version may serve a job that asks for `constraint`."""
    match constraint.rule:
        case VersionRule.LATEST:
            return True
        case VersionRule.EXACT:
            return loaded == constraint.value
        case VersionRule.MIN:
            return loaded >= constraint.value
        case VersionRule.MAX_STALENESS:
            return staleness(loaded, state) <= constraint.value


def staleness(loaded: int, state: PolicyState | None) -> int:
    """Positions in the desired history between what is desired now and what is loaded."""
    if state is None or loaded == state.desired:
        return 0
    history = [*state.history, state.desired] if state.desired not in state.history else list(state.history)
    if loaded not in history:
        return len(history)
    return max(0, history.index(state.desired) - history.index(loaded))


class Weights:
    """The reconciler of one policy.  `problem` says what is wrong, None = as desired."""

    def __init__(self, bus: Bus, blobs: Blobs, engine: Engine, settings: SamplerSettings) -> None:
        self._blobs, self._engine, self._settings = blobs, engine, settings
        self._table: Table[PolicyState] = Table(bus, POLICIES, PolicyState)
        self._view: View[PolicyState] = View(bus, self._table)
        self._key = f"{settings.tenant}.{settings.policy}"
        self._folders: dict[int, Path | None] = {}
        self._observed = 0
        self.problem: str | None = "not loaded yet"

    @property
    def state(self) -> PolicyState | None:
        found = self._view.values.get(self._key)
        return found.value if found is not None else None

    def loaded(self) -> tuple[LoadedVersion, ...]:
        now = self._engine.loaded
        if now.version < 0:
            return ()
        return (
            LoadedVersion(
                policy=self._settings.policy,
                tenant=self._settings.tenant,
                version=now.version,
                fingerprint=now.fingerprint,
                policy_revision=self._observed,
            ),
        )

    def met(self, constraint: WeightConstraint) -> bool:
        return met(constraint, self._engine.loaded.version, self.state)

    async def first(self) -> tuple[int, Path | None]:
        """The version to start with and its folder: the desired one, loaded cold."""
        found = await self._wait_for_policy()
        if found is None or found.value.desired == 0:
            self._folders[0] = self._settings.model
            self._observed = found.revision if found is not None else 0
            return 0, self._settings.model
        folder = await self._folder(found.value)
        self._observed = found.revision
        return found.value.desired, folder

    async def follow(self) -> None:
        """Reconcile until cancelled.  Raises EngineDead."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._view.follow())
            group.create_task(self._reconcile())

    async def _reconcile(self) -> None:
        self.problem = None
        while True:
            self._view.changed.clear()
            found = self._view.values.get(self._key)
            wait: float | None = None
            if found is not None:
                agreed = found.value.desired == self._engine.loaded.version or await self._advance(found)
                if agreed:
                    self.problem, self._observed = None, found.revision
                else:
                    wait = RETRY_S
            try:
                async with asyncio.timeout(wait):
                    await self._view.changed.wait()
            except TimeoutError:
                continue

    async def _advance(self, found: Versioned[PolicyState]) -> bool:
        desired = found.value.desired
        before = self._engine.loaded
        try:
            folder = await self._folder(found.value)
            if folder is None:
                raise WeightsRefused(f"no folder for version {desired}", intact=True)
            begun = time.monotonic()
            loaded = await self._engine.load_version(desired, folder, self._settings.swap_mode)
            metrics.SWAP_SECONDS.observe(time.monotonic() - begun)
        except (StorageError, WeightsRefused, OSError) as error:
            self.problem = f"version {desired}: {error}"
            metrics.SWAPS.labels("failed").inc()
            log.error("version_not_applied", version=desired, loaded=before.version, error=str(error))
            if isinstance(error, WeightsRefused) and not error.intact:
                await self._restore(before.version)
            return False
        metrics.SWAPS.labels("applied").inc()
        log.info("version_applied", version=loaded.version, fingerprint=loaded.fingerprint)
        self._forget_old({before.version, desired, 0})
        return True

    async def _restore(self, version: int) -> None:
        """Put the old version's bytes back, whole; without them the process must start anew."""
        folder = self._folders.get(version)
        if folder is None:
            raise EngineDead(f"the engine's weights are in doubt and version {version} is not at hand")
        try:
            await self._engine.load_version(version, folder, self._settings.swap_mode)
        except WeightsRefused as error:
            raise EngineDead(f"the engine's weights are in doubt: {error.message}") from error
        log.warning("version_restored", version=version)

    async def _wait_for_policy(self) -> Versioned[PolicyState] | None:
        try:
            async with asyncio.timeout(self._settings.policy_wait_s):
                while True:
                    try:
                        found = await self._table.get(self._key)
                    except BusError as error:
                        log.warning("policy_unreadable", error=error.message)
                        found = None
                    if found is not None:
                        return found
                    await asyncio.sleep(0.2)
        except TimeoutError:
            log.warning("policy_unknown", policy=self._key, waited_s=self._settings.policy_wait_s)
            return None

    # -- folders ------------------------------------------------------------------------------

    async def _folder(self, state: PolicyState) -> Path | None:
        """The local folder of the desired version, downloaded when it is not there yet."""
        version = state.desired
        if version not in self._folders:
            if version == 0 and self._settings.model is not None:
                self._folders[0] = self._settings.model
            elif state.desired_prefix is not None:
                self._folders[version] = await self._download(state, state.desired_prefix)
        return self._folders.get(version)

    async def _download(self, state: PolicyState, prefix: str) -> Path:
        """Fetch the desired version: its files below `prefix`, over the base's configuration and tokenizer."""
        prefix = prefix.rstrip("/") + "/"
        key = version_root(state.tenant, state.policy, state.desired) + MANIFEST_NAME
        data = await self._blobs.get(key)
        if data is None:
            raise StorageError(f"{key} does not exist")
        manifest = codec.decode(data, CheckpointManifest, codec.JSON)
        if manifest.kind is not CheckpointKind.FULL:
            raise WeightsRefused(f"{manifest.kind.value} versions are not supported yet", intact=True)
        root = self._settings.cache.expanduser() / self._settings.tenant / self._settings.policy
        target = root / f"{manifest.version}-{hashlib.sha256(data).hexdigest()[:12]}"
        if target.exists():
            return target
        root.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".fetching-", dir=root))
        try:
            link_base(self._settings.model, unfinished)
            for file in manifest.files:
                await self._fetch(prefix, file, unfinished)
            settle(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return target

    async def _fetch(self, prefix: str, file: FileInfo, folder: Path) -> None:
        name = Path(file.name).name
        if name != file.name:
            raise WeightsRefused(f"file name {file.name!r} leaves its folder", intact=True)
        path = folder / name
        path.unlink(missing_ok=True)
        await self._blobs.download(prefix + file.name, path)
        digest = await asyncio.to_thread(sha256_of, path)
        if digest != file.sha256:
            raise StorageError(f"{prefix}{file.name} does not match its digest")

    def _forget_old(self, kept: set[int]) -> None:
        """Delete downloads that are neither loaded nor the one before."""
        for version in [v for v in self._folders if v not in kept]:
            folder = self._folders.pop(version)
            if folder is not None and folder != self._settings.model:
                shutil.rmtree(folder, ignore_errors=True)


def settle(unfinished: Path, target: Path) -> None:
    """The folder appears whole; a neighbour that was first is as good."""
    try:
        unfinished.rename(target)
    except OSError:
        if not target.exists():
            raise


def link_base(base: Path | None, target: Path) -> None:
    """Links to everything of the base folder that is not weights."""
    if base is None:
        return
    weights = {path for pattern in WEIGHT_FILES for path in base.glob(pattern)}
    for path in base.iterdir():
        if path.is_file() and path not in weights:
            (target / path.name).symlink_to(path.resolve())


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
