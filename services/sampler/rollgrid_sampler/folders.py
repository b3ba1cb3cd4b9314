"""The versions this worker has on disk: fetched from S3 through the node's staging, held while they are needed."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    AdoptedVersion,
    CheckpointKind,
    CheckpointManifest,
    FileInfo,
    version_root,
)
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest, weights_digest
from rollgrid_weights.rebuilding import Known, Rebuilding
from rollgrid_weights.staging import Held, Staging

from . import metrics
from .engines.base import WeightsRefused
from .settings import SamplerSettings

log = get_logger(__name__)


class Staged(NamedTuple):
    """A version at hand.  `digest` is that of its weights ("" = not known)."""

    version: int
    kind: CheckpointKind
    folder: Path | None
    digest: str
    committed_at: float = 0.0


class Folders:
    """All methods that fetch raise StorageError (try again) and WeightsRefused (intact: nothing was touched)."""

    def __init__(self, blobs: Blobs, settings: SamplerSettings) -> None:
        self._blobs, self._settings = blobs, settings
        self._staging = Staging(settings.cache.expanduser())
        self._rebuilding = Rebuilding(self._staging, self._find, self._bring, settings.model)
        self._held: dict[int, tuple[Staged, Known, Held]] = {}
        self._kept: set[int] = set()

    async def stage(self, wanted: AdoptedVersion) -> Staged:
        """Bring the version here unless it is, and hold it."""
        if wanted.version == 0:
            return Staged(0, CheckpointKind.FULL, self._settings.model, wanted.weights_digest)
        found = self._held.get(wanted.version)
        if found is not None:
            return found[0]
        try:
            known = await self._find(wanted.version, wanted.prefix)
            manifest = known.manifest
            self._check(manifest, wanted)
            held = await self._hold(known)
        except WeightsError as error:
            raise _classified(error) from error
        digest = wanted.weights_digest or manifest.weights_digest
        if not digest and manifest.tensors:
            digest = weights_digest(manifest.tensors)
        staged = Staged(wanted.version, manifest.kind, held.folder, digest, wanted.committed_at or manifest.created_at)
        self._held[wanted.version] = staged, known, held
        return staged

    async def _find(self, version: int, prefix: str = "") -> Known:
        key = version_root(self._settings.tenant, self._settings.policy, version)
        data = await self._blobs.get(key + MANIFEST_NAME)
        if data is None:
            raise StorageError(f"{key}{MANIFEST_NAME} does not exist")
        manifest = decode_manifest(data)
        place = (prefix or manifest.prefix or key).rstrip("/") + "/"
        return Known(manifest, hashlib.sha256(data).hexdigest(), place)

    async def _hold(self, known: Known) -> Held:
        begun = time.monotonic()
        at_hand = {version: held.folder for version, (staged, _, held) in self._held.items() if staged.kind.whole}
        held = await self._rebuilding.hold(known, at_hand)
        if held.fetched:
            metrics.STAGED_BYTES.inc(held.fetched)
            metrics.STAGE_SECONDS.observe(time.monotonic() - begun)
            kind = known.manifest.kind.value
            log.info("version_staged", version=known.manifest.version, kind=kind, bytes=held.fetched)
        return held

    async def _bring(self, prefix: str, file: FileInfo, path: Path) -> None:
        await self._blobs.download(prefix + file.name, path)

    def at_hand(self, version: int) -> Path | None:
        """The folder of a version that is held."""
        if version == 0:
            return self._settings.model
        found = self._held.get(version)
        return found[0].folder if found is not None else None

    @contextlib.contextmanager
    def kept(self, versions: set[int]) -> Iterator[None]:
        """Meanwhile these stay, whatever is forgotten.  For one caller at a time."""
        self._kept = versions
        try:
            yield
        finally:
            self._kept = set()

    async def repair(self) -> tuple[str, ...]:
        """Fetch again what of the held versions is not what its manifest says; the names of those files."""
        damaged: list[str] = []
        for _, known, held in list(self._held.values()):
            try:
                if known.manifest.kind is CheckpointKind.DELTA:
                    damaged += await self._rebuilding.repair(known, held)
                else:
                    damaged += await self._staging.repair(known.manifest, held, partial(self._bring, known.prefix))
            except WeightsError as error:
                raise _classified(error) from error
        return tuple(damaged)

    async def forget(self, needed: Collection[int]) -> None:
        """Hold only these on, and remove from the disk what nobody on this node holds."""
        needed = frozenset(needed) | self._kept
        for version in [one for one in self._held if one not in needed]:
            self._held.pop(version)[2].release()
        tenant, policy = self._settings.tenant, self._settings.policy
        removed = await asyncio.to_thread(self._staging.sweep, tenant, policy, needed)
        if removed:
            log.info("versions_removed", folders=removed)

    def release(self) -> None:
        """At the end; what is on disk serves the next start."""
        for _, _, held in self._held.values():
            held.release()
        self._held.clear()

    def _check(self, manifest: CheckpointManifest, wanted: AdoptedVersion) -> None:
        claimed = (manifest.tenant, manifest.policy, manifest.version)
        if claimed != (self._settings.tenant, self._settings.policy, wanted.version):
            raise WeightsRefused(f"the manifest of version {wanted.version} is of {claimed}", intact=True)
        if manifest.kind is not wanted.kind:
            known = f"version {wanted.version} is {manifest.kind.value}, {wanted.kind.value} was expected"
            raise WeightsRefused(known, intact=True)


def _classified(error: WeightsError) -> RollgridError:
    """Bytes that do not match are fetched again; a delta that leads elsewhere is refused."""
    if error.field == "base_version":
        return WeightsRefused(error.message, intact=True)
    return StorageError(error.message)
