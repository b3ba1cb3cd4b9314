"""The newest state of each policy that takes deltas, rebuilt here to be verified; the next delta goes on from it."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Collection
from pathlib import Path

from rollgrid_contracts.checkpoints import MANIFEST_NAME, CheckpointKind, FileInfo, PolicyState, version_root
from rollgrid_contracts.failures import ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import StorageError
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest
from rollgrid_weights.rebuilding import Known, Rebuilding
from rollgrid_weights.staging import Held, Staging


class States:
    """Below `scratch` (None = a folder of the system's for temporary files).  One version of a policy stays on disk."""

    def __init__(self, blobs: Blobs, scratch: Path | None) -> None:
        self._blobs = blobs
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        self._temporary = tempfile.TemporaryDirectory(prefix="rollgrid-states-", dir=scratch)
        self._staging = Staging(Path(self._temporary.name))
        self._held: dict[str, tuple[int, Held]] = {}
        self._links: dict[str, dict[int, Known]] = {}

    async def check_chain(self, state: PolicyState, known: Known, present: Collection[str]) -> None:
        """All that a node with an empty disk rebuilds a delta from is among the keys `present`, whatever is at hand here.

        Raises WeightsError `version_gone`, StorageError (try again).
        """
        key = f"{state.tenant}.{state.policy}"
        before, chain = self._links.get(key, {}), dict[int, Known]()
        link = known
        while link.manifest.kind is CheckpointKind.DELTA:
            base = link.manifest.base_version or 0
            if not 0 < base < link.manifest.version:  # the base, or what rebuilding refuses
                break
            root = version_root(state.tenant, state.policy, base)
            if root + MANIFEST_NAME not in present:
                raise _pruned(known, base, MANIFEST_NAME)
            link = chain[base] = before.get(base) or await self.find(state, base)  # manifests never change
            lost = [file.name for file in link.manifest.files if link.prefix + file.name not in present]
            if lost:
                raise _pruned(known, base, lost[0])
        self._links[key] = chain

    async def rebuilt(self, state: PolicyState, known: Known, base: Path) -> Path:
        """The folder with the state of a delta version.  Raises WeightsError, StorageError (try again)."""
        key = f"{state.tenant}.{state.policy}"
        rebuilding = Rebuilding(self._staging, lambda version: self.find(state, version), self._bring, base)
        kept = self._held.get(key)
        held = await rebuilding.hold(known, {} if kept is None else {kept[0]: kept[1].folder})
        self._held[key] = known.manifest.version, held
        if kept is not None:
            kept[1].release()
        await asyncio.to_thread(self._staging.sweep, state.tenant, state.policy, {known.manifest.version})
        return held.folder

    async def find(self, state: PolicyState, version: int) -> Known:
        """Raises StorageError, WeightsError."""
        root = version_root(state.tenant, state.policy, version)
        data = await self._blobs.get(root + MANIFEST_NAME)
        if data is None:
            raise StorageError(f"{root}{MANIFEST_NAME} is gone")
        manifest = decode_manifest(data)
        return Known(manifest, hashlib.sha256(data).hexdigest(), (manifest.prefix or root).rstrip("/") + "/")

    def close(self) -> None:
        for _, held in self._held.values():
            held.release()
        self._held.clear()
        self._temporary.cleanup()

    async def _bring(self, prefix: str, file: FileInfo, path: Path) -> None:
        await self._blobs.download(prefix + file.name, path)


def _pruned(known: Known, version: int, name: str) -> WeightsError:
    return WeightsError(
        ErrorCode.VERSION_GONE,
        f"version {known.manifest.version} is a delta that is rebuilt from version {version}, whose {name} is gone:"
        " publish a full version",
        field="base_version",
    )
