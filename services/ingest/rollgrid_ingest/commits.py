"""From an upload to a version: its number is the first whose manifest it creates.

The manifest is the version's existence, so it comes last.  A version's files lie below its own number
in a folder named after the upload: by it a commit that is repeated, or that another server finished,
finds its version again instead of making a second one.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Mapping, Sequence

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    AdapterInfo,
    CheckpointKind,
    CheckpointManifest,
    CheckpointPublished,
    FileInfo,
    OnDeadline,
    PolicyState,
    RolloutRequest,
    Upload,
    UploadShard,
    policy_root,
    version_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.adapter import parse_config
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import check_manifest, decode_manifest, encode_manifest, weights_digest
from rollgrid_weights.names import ADAPTER_CONFIG

from .uploads import MAX_VERSION, Uploads, file_key, missing_ranks, taken
from .version_schema import CommitAnswer, CommitRequest, RolloutTerms
from .wire import invalid, over_limit

log = get_logger(__name__)
COPIES_AT_ONCE = 4
RACES = 32
"""How many numbers in a row may be taken by others while a commit tries for the next."""
MAX_ROLLOUT_S = 7 * 24 * 3600.0
_VERSION = re.compile(r"(?P<version>[1-9][0-9]{0,9})/(?P<rest>.+)")


class Commits:
    def __init__(self, bus: Bus, blobs: Blobs, uploads: Uploads) -> None:
        self._bus, self._blobs, self._uploads = bus, blobs, uploads

    async def commit(self, policy: PolicyState, name: str, request: CommitRequest) -> CommitAnswer:
        """Make the upload a version, once: committed again it is the same one.

        Raises upload_incomplete (retryable) naming the ranks that have not finished, version_unavailable
        when the number asked for is taken, version_gone when the upload has expired, invalid_request,
        unsupported, StorageError.
        """
        rollout = _rollout(request.rollout)
        upload = await self._uploads.find(policy, name, alive=False)
        published, own = await self._listed(upload)
        manifest = await self._committed(upload, own)
        created = False
        if manifest is None:
            await self._uploads.find(policy, name)
            draft = await self._draft(upload, rollout)
            manifest, created = await self._publish(policy, upload, draft, published)
        await self._announce(manifest)
        try:
            await self._uploads.forget_files(upload)
        except StorageError as error:
            log.warning("parts_not_deleted", upload=upload.upload, error=error.message)
        log.info("version_committed", policy=policy.policy, version=manifest.version, upload=name, created=created)
        return CommitAnswer(
            policy=policy.policy,
            version=manifest.version,
            kind=manifest.kind.value,
            manifest_key=_manifest_key(upload, manifest.version),
            created=created,
        )

    async def _listed(self, upload: Upload) -> tuple[set[int], set[int]]:
        """Versions that exist, and those below which this upload has put files."""
        root = policy_root(upload.tenant, upload.policy)
        published: set[int] = set()
        own: set[int] = set()
        for key in await self._blobs.keys(root):
            match = _VERSION.fullmatch(key.removeprefix(root))
            if match is not None and match["rest"] == MANIFEST_NAME:
                published.add(int(match["version"]))
            elif match is not None and match["rest"].startswith(f"{upload.upload}/"):
                own.add(int(match["version"]))
        return published, own & published

    async def _committed(self, upload: Upload, candidates: set[int]) -> CheckpointManifest | None:
        """The version this upload has become, if it has."""
        for version in sorted(candidates):
            stored = await self._blobs.get(_manifest_key(upload, version))
            manifest = decode_manifest(stored) if stored is not None else None
            if manifest is not None and manifest.prefix == _prefix(upload, version):
                return manifest
        return None

    async def _draft(self, upload: Upload, rollout: RolloutRequest | None) -> CheckpointManifest:
        """The manifest but for its number.  Raises upload_incomplete, invalid_request, unsupported."""
        missing = missing_ranks(upload, await self._uploads.finished(upload))
        if missing:
            raise _incomplete(upload, missing)
        shards = await self._uploads.shards(upload)
        files = _files(shards)
        tensors = tuple(tensor for _, shard in sorted(shards.items()) for tensor in shard.tensors)
        described = bool(tensors) and all(shard.tensors or not shard.files for shard in shards.values())
        draft = CheckpointManifest(
            tenant=upload.tenant,
            policy=upload.policy,
            version=0,
            kind=upload.kind,
            base_version=None if upload.kind is CheckpointKind.FULL else upload.base_version,
            step=upload.step,
            dtype=upload.dtype,
            files=tuple(files),
            tensors=tensors if described else (),
            weights_digest=weights_digest(tensors) if described else "",
            next_within_s=upload.next_within_s,
            rollout=rollout,
        )
        try:
            check_manifest(draft)
            adapter = await self._adapter(upload, files) if upload.kind is CheckpointKind.LORA else None
        except WeightsError as error:
            raise RollgridError(
                error.code, error.message, boundary=Boundary.WEIGHTS, field=error.field, limit=error.limit
            ) from error
        return msgspec.structs.replace(draft, adapter=adapter)

    async def _adapter(self, upload: Upload, files: Sequence[FileInfo]) -> AdapterInfo:
        file = next(file for file in files if file.name == ADAPTER_CONFIG)
        stored = await self._blobs.get(file_key(upload, file))
        if stored is None:
            raise StorageError(f"{ADAPTER_CONFIG} of upload {upload.upload} is gone")
        return parse_config(stored)

    async def _publish(
        self, policy: PolicyState, upload: Upload, draft: CheckpointManifest, published: set[int]
    ) -> tuple[CheckpointManifest, bool]:
        """Create the manifest under the number asked for, or the first free one."""
        version = upload.version or max(policy.newest, *published, 0) + 1
        if version <= policy.newest:
            raise taken(policy.policy, version, f"the newest is {policy.newest}")
        for number in range(version, version + (1 if upload.version else RACES)):
            if number > MAX_VERSION:
                raise over_limit("version", number, f"version<={MAX_VERSION}")
            manifest = msgspec.structs.replace(
                draft, version=number, prefix=_prefix(upload, number), created_at=time.time()
            )
            if number not in published:
                await self._copy(upload, manifest)
                if await self._blobs.create(_manifest_key(upload, number), encode_manifest(manifest)):
                    return manifest, True
                winner = await self._committed(upload, {number})
                if winner is not None:  # this very upload, through another call
                    return winner, False
                await self._drop(manifest)
        raise taken(policy.policy, version, "another publisher has taken it")

    async def _copy(self, upload: Upload, manifest: CheckpointManifest) -> None:
        places = asyncio.Semaphore(COPIES_AT_ONCE)

        async def copy(file: FileInfo) -> None:
            async with places:
                await self._blobs.copy(file_key(upload, file), manifest.prefix + file.name)

        try:
            async with asyncio.TaskGroup() as group:
                for file in manifest.files:
                    group.create_task(copy(file))
        except* StorageError as failed:
            raise StorageError(str(failed.exceptions[0])) from failed

    async def _drop(self, manifest: CheckpointManifest) -> None:
        """Files under a number that another publisher has: its garbage collection would find them, later."""
        try:
            await asyncio.gather(*(self._blobs.delete(manifest.prefix + file.name) for file in manifest.files))
        except StorageError as error:
            log.warning("copies_not_deleted", version=manifest.version, error=error.message)

    async def _announce(self, manifest: CheckpointManifest) -> None:
        event = CheckpointPublished(
            tenant=manifest.tenant,
            policy=manifest.policy,
            version=manifest.version,
            manifest_key=version_root(manifest.tenant, manifest.policy, manifest.version) + MANIFEST_NAME,
        )
        await self._bus.publish(subjects.checkpoints(manifest.tenant, manifest.policy), event)


def _files(shards: Mapping[int, UploadShard]) -> list[FileInfo]:
    """The files of all ranks by name; side files may come from several ranks, if they are equal."""
    found: dict[str, tuple[int, FileInfo]] = {}
    for rank, shard in sorted(shards.items()):
        for file in shard.files:
            first, known = found.setdefault(file.name, (rank, file))
            if known != file:
                raise invalid(f"ranks {first} and {rank} have uploaded different files {file.name[:130]}", "files")
    return [file for _, (_, file) in sorted(found.items())]


def _rollout(terms: RolloutTerms | None) -> RolloutRequest | None:
    if terms is None:
        return None
    for name in ("canary", "at_once"):
        if not 0 <= getattr(terms, name) <= MAX_VERSION:
            raise over_limit(f"rollout.{name}", getattr(terms, name), f"{name}>=0")
    for name in ("canary_s", "deadline_s"):
        value = getattr(terms, name)
        if not (math.isfinite(value) and 0 <= value <= MAX_ROLLOUT_S):
            raise over_limit(f"rollout.{name}", value, f"0<={name}<={MAX_ROLLOUT_S:g}")
    if terms.on_deadline not in tuple(OnDeadline):
        offered = " and ".join(OnDeadline)
        raise invalid(f"rollout.on_deadline is {terms.on_deadline[:40]!r}, offered: {offered}", "rollout.on_deadline")
    return RolloutRequest(
        canary=terms.canary,
        canary_s=terms.canary_s,
        at_once=terms.at_once,
        deadline_s=terms.deadline_s,
        on_deadline=OnDeadline(terms.on_deadline),
    )


def _incomplete(upload: Upload, missing: Sequence[int]) -> RollgridError:
    ranks = ", ".join(map(str, missing[:16])) + (f" and {len(missing) - 16} more" if len(missing) > 16 else "")
    return RollgridError(
        ErrorCode.UPLOAD_INCOMPLETE,
        f"upload {upload.upload} of {upload.policy}: of {upload.world} ranks these have not finished: {ranks}",
        boundary=Boundary.WEIGHTS,
        field="ranks",
        limit=f"missing={ranks}",
        retry_after_s=1.0,
    )


def _manifest_key(upload: Upload, version: int) -> str:
    return version_root(upload.tenant, upload.policy, version) + MANIFEST_NAME


def _prefix(upload: Upload, version: int) -> str:
    return f"{version_root(upload.tenant, upload.policy, version)}{upload.upload}/"
