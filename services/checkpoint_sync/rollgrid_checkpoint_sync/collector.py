"""Garbage collection of one policy's objects: `retention` chooses, this reads, trims and deletes.

Several may collect at once, and each round repairs what another left.
"""

from __future__ import annotations

import time

from rollgrid_contracts import codec, topology
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    UPLOAD_NAME,
    AdoptedVersion,
    PolicyState,
    Upload,
    policy_root,
    upload_root,
    version_root,
)
from rollgrid_contracts.fleet import WorkerState
from rollgrid_runtime.blobs import Blobs, StoredObject
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest

from . import metrics, retention
from .adopted import adopted_version
from .pins import Pins
from .policies import change

log = get_logger(__name__)
TRIES = 5
"""Writers that may be first before a round is left to the next one."""


class Collector:
    def __init__(
        self, bus: Bus, table: Table[PolicyState], blobs: Blobs, *, keep_versions: int, upload_ttl_s: float
    ) -> None:
        self._table, self._blobs = table, blobs
        self._keep, self._ttl_s = keep_versions, upload_ttl_s
        self._workers: Table[WorkerState] = Table(bus, topology.WORKERS, WorkerState)
        self._pins = Pins(bus)

    async def collect(self, key: str) -> None:
        """One round of a policy.  Raises BusError, StorageError; `not_found` when there is no such policy."""
        await self._pins.drop_ended(key)
        objects = await self._blobs.objects(policy_root(*key.split(".", 1)))
        await self._relist(key, objects)
        needed = await self._needed(key)
        await change(self._table, key, lambda now: retention.marked(now, needed, self._keep))
        await self._trim(key)
        await self._delete(key, objects)

    async def _trim(self, key: str) -> None:
        """Pins are read after the state that the decision is made on, so a lost race starts over."""
        for _ in range(TRIES):
            found = await self._table.get(key)
            if found is None:
                return
            needed = await self._needed(key)
            wanted = retention.trimmed(found.value, needed, self._keep)
            if wanted == found.value:
                return
            try:
                await self._table.update(key, wanted, found.revision)
            except Conflict:
                continue
            gone = {one.version for one in found.value.versions} - {one.version for one in wanted.versions}
            metrics.VERSIONS.labels(key, "collected").inc(len(gone))
            log.info("versions_trimmed", policy=key, versions=sorted(gone))
            return

    async def _needed(self, key: str) -> set[int]:
        """Versions that are pinned, or that a worker runs or has one sitting on."""
        needed = await self._pins.pinned(key)
        for found in (await self._workers.items()).values():
            for loaded in found.value.loaded:
                if f"{loaded.tenant}.{loaded.policy}" == key:
                    needed |= {loaded.version, loaded.base_version}
        return needed

    async def _relist(self, key: str, objects: list[StoredObject]) -> None:
        state = (await change(self._table, key, lambda now: now)).after
        back: list[AdoptedVersion] = []
        for version in retention.unlisted(state, objects):
            root = version_root(state.tenant, state.policy, version)
            try:
                stored = await self._blobs.get(root + MANIFEST_NAME)
                if stored is not None:
                    back.append(adopted_version(decode_manifest(stored), root))
            except WeightsError as error:
                log.error("version_not_listed", policy=key, version=version, error=error.message)
        if back:
            await change(self._table, key, lambda now: retention.relisted(now, back))
            log.info("versions_listed", policy=key, versions=[one.version for one in back])

    async def _delete(self, key: str, objects: list[StoredObject]) -> None:
        state = (await change(self._table, key, lambda now: now)).after
        now = time.time()
        still_open = await self._open_uploads(state, objects, now)
        going = retention.deletions(state, objects, still_open, now - self._ttl_s)
        for one in going:
            await self._blobs.delete(one.key)
            metrics.DELETED.labels(key).inc(one.size)
        if going:
            log.info("objects_deleted", policy=key, objects=len(going), bytes=sum(one.size for one in going))
        metrics.KEPT.labels(key).set(len(state.versions))

    async def _open_uploads(self, state: PolicyState, objects: list[StoredObject], now: float) -> set[str]:
        """Old uploads that were given more time than `upload_ttl_s`."""
        found: set[str] = set()
        for one in objects:
            if not one.key.endswith("/" + UPLOAD_NAME) or one.modified >= now - self._ttl_s:
                continue
            name = one.key.split("/")[-2]
            if one.key != upload_root(state.tenant, state.policy, name) + UPLOAD_NAME:
                continue
            stored = await self._blobs.get(one.key)
            try:
                upload = codec.decode(stored or b"", Upload, codec.JSON)
            except ValueError:
                continue
            if upload.expires_at > now:
                found.add(name)
        return found
