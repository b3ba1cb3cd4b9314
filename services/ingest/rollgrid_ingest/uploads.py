"""What publishers upload before it is a version: terms, files and the shards of several ranks, under a prefix of their own.

Nothing here is visible to the fleet.  A file lies under its digest and a shard is written once, so
neither racing publishers nor a rank that starts anew can mix two states of the weights.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import IO

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import (
    UPLOAD_NAME,
    CheckpointKind,
    FileInfo,
    PolicyState,
    TensorInfo,
    Upload,
    UploadShard,
    upload_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import MAX_STEP
from rollgrid_weights.names import check_file_name

from .version_schema import BeginRequest, FileAnswer, ShardAnswer, ShardRequest, UploadAnswer
from .wire import invalid, over_limit, unsupported

MAX_VERSION = 2**31 - 1
MAX_JUMP = 1_000_000
"""A number that its publisher chooses is at most so far beyond the newest: the last one would leave none."""
MAX_WORLD = 4096
MAX_FILES = 4096
"""Files of one shard."""
MAX_NEXT_WITHIN_S = 30 * 24 * 3600.0
WRITE_CHUNK = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Uploads:
    def __init__(self, blobs: Blobs, *, max_bytes: int, ttl_s: float) -> None:
        self._blobs, self._max_bytes, self._ttl_s = blobs, max_bytes, ttl_s

    async def begin(self, policy: PolicyState, asked: BeginRequest) -> UploadAnswer:
        """Agree on the terms.  The same name with the same terms is the same upload.

        Raises invalid_request, unsupported, version_unavailable, idempotency_conflict, version_gone, StorageError.
        """
        wanted = _terms(policy, asked, self._ttl_s)
        key = upload_root(policy.tenant, policy.policy, wanted.upload) + UPLOAD_NAME
        stored = await self._blobs.get(key) if asked.upload is not None else None
        if stored is None:
            _check_versions(policy, wanted)
            if await self._blobs.create(key, msgspec.json.encode(wanted)):
                return answer_of(wanted)
            stored = await self._blobs.get(key) or b""
        found = msgspec.json.decode(stored, type=Upload)
        _check_same(found, wanted, asked)
        _check_alive(found)
        return answer_of(found)

    async def find(self, policy: PolicyState, upload: str, *, alive: bool = True) -> Upload:
        """Raises not_found, and with `alive` version_gone for one that has expired."""
        if not ids.is_label(upload):
            raise _unknown(policy, upload)
        stored = await self._blobs.get(upload_root(policy.tenant, policy.policy, upload) + UPLOAD_NAME)
        if stored is None:
            raise _unknown(policy, upload)
        found = msgspec.json.decode(stored, type=Upload)
        if alive:
            _check_alive(found)
        return found

    async def put(self, upload: Upload, name: str, chunks: AsyncIterator[bytes], declared: int | None) -> FileAnswer:
        """Take one file, through a temporary file, under its digest.

        Raises invalid_request, unsupported, payload_too_large, StorageError.
        """
        try:
            check_file_name(name)
        except WeightsError as error:
            raise RollgridError(error.code, error.message, boundary=Boundary.CLIENT, field="name") from error
        if declared is not None and declared > self._max_bytes:
            raise _too_large(declared, self._max_bytes)
        with tempfile.NamedTemporaryFile(prefix="rollgrid-upload-") as file:
            size, digest = await self._receive(chunks, file)
            if declared is not None and size != declared:
                raise invalid(f"{name}: {size} bytes came of {declared}", "body")
            if size == 0:
                raise invalid(f"{name} is empty", "body")
            await self._blobs.upload(Path(file.name), file_key(upload, FileInfo(name=name, size=size, sha256=digest)))
        return FileAnswer(name=name, size=size, sha256=digest)

    async def _receive(self, chunks: AsyncIterator[bytes], file: IO[bytes]) -> tuple[int, str]:
        """Write what comes, off the event loop in pieces of a MiB; its size and sha256."""
        digest, size, held = hashlib.sha256(), 0, bytearray()

        def write(data: bytes) -> None:
            file.write(data)
            digest.update(data)

        async for chunk in chunks:
            size += len(chunk)
            if size > self._max_bytes:
                raise _too_large(size, self._max_bytes)
            held += chunk
            if len(held) >= WRITE_CHUNK:
                await asyncio.to_thread(write, bytes(held))
                held.clear()
        await asyncio.to_thread(_all_of(write, bytes(held), file))
        return size, digest.hexdigest()

    async def finish(self, upload: Upload, request: ShardRequest) -> ShardAnswer:
        """One rank is done.  The same shard again changes nothing, another one is refused.

        Raises invalid_request when its bytes are not there, idempotency_conflict, StorageError.
        """
        shard = _shard(upload, request)
        key = _shard_key(upload, shard.rank)
        stored = await self._blobs.get(key)
        if stored is None:
            present = set(await self._blobs.keys(_files_prefix(upload)))
            for i, file in enumerate(shard.files):
                if file_key(upload, file) not in present:
                    raise invalid(f"files[{i}]: {file.name[:130]} was not uploaded with these bytes", f"files[{i}]")
            if not await self._blobs.create(key, msgspec.json.encode(shard)):
                stored = await self._blobs.get(key)
        if stored is not None and msgspec.json.decode(stored, type=UploadShard) != shard:
            raise _conflict(upload, "rank", f"rank {shard.rank} has finished with other files")
        return ShardAnswer(
            upload=upload.upload, rank=shard.rank, missing=missing_ranks(upload, await self.finished(upload))
        )

    async def finished(self, upload: Upload) -> set[int]:
        """The ranks that have finished."""
        prefix = _shards_prefix(upload)
        names = [key.removeprefix(prefix).removesuffix(".json") for key in await self._blobs.keys(prefix)]
        return {int(name) for name in names if name.isdigit()}

    async def shards(self, upload: Upload) -> dict[int, UploadShard]:
        """What each of the ranks has uploaded.  Raises StorageError when one is not there."""
        stored = await asyncio.gather(*(self._blobs.get(_shard_key(upload, rank)) for rank in range(upload.world)))
        if None in stored:
            raise StorageError(f"a shard of upload {upload.upload} is gone")
        found = [msgspec.json.decode(shard, type=UploadShard) for shard in stored if shard is not None]
        return {shard.rank: shard for shard in found}

    async def forget_files(self, upload: Upload) -> None:
        """Delete the parts of a committed upload; its terms and shards stay until they expire.  Raises StorageError."""
        keys = await self._blobs.keys(_files_prefix(upload))
        await asyncio.gather(*(self._blobs.delete(key) for key in keys))


def missing_ranks(upload: Upload, finished: Collection[int]) -> list[int]:
    return [rank for rank in range(upload.world) if rank not in finished]


def answer_of(upload: Upload) -> UploadAnswer:
    return UploadAnswer(
        policy=upload.policy,
        upload=upload.upload,
        kind=upload.kind.value,
        world=upload.world,
        base_version=upload.base_version,
        version=upload.version,
        step=upload.step,
        expires_at=upload.expires_at,
    )


def file_key(upload: Upload, file: FileInfo) -> str:
    return f"{_files_prefix(upload)}{file.sha256}-{file.size}/{file.name}"


def _files_prefix(upload: Upload) -> str:
    return upload_root(upload.tenant, upload.policy, upload.upload) + "files/"


def _shard_key(upload: Upload, rank: int) -> str:
    return f"{_shards_prefix(upload)}{rank}.json"


def _shards_prefix(upload: Upload) -> str:
    return upload_root(upload.tenant, upload.policy, upload.upload) + "shards/"


def _terms(policy: PolicyState, asked: BeginRequest, ttl_s: float) -> Upload:
    """What is asked for, checked as far as it can be without S3."""
    if asked.kind not in tuple(CheckpointKind):
        raise unsupported("kind", "full, lora and delta are offered")
    if asked.upload is not None and not ids.is_label(asked.upload):
        raise invalid(f"upload: {asked.upload[:80]!r} does not match {ids.LABEL_PATTERN}", "upload")
    if not 1 <= asked.world <= MAX_WORLD:
        raise over_limit("world", asked.world, f"1<=world<={MAX_WORLD}")
    highest = min(MAX_VERSION, policy.newest + MAX_JUMP)
    if asked.version is not None and not 1 <= asked.version <= highest:
        raise over_limit("version", asked.version, f"1<=version<={highest}")
    if asked.step is not None and not 0 <= asked.step <= MAX_STEP:
        raise over_limit("step", asked.step, f"0<=step<={MAX_STEP}")
    if asked.kind == CheckpointKind.FULL and asked.base_version is not None:
        raise unsupported("base_version", "a full version sits on none")
    within = asked.next_within_s
    if within is not None and not (math.isfinite(within) and 0 < within <= MAX_NEXT_WITHIN_S):
        raise over_limit("next_within_s", within, f"0<next_within_s<={MAX_NEXT_WITHIN_S:g}")
    base = 0
    if asked.kind == CheckpointKind.LORA:
        base = _newest_whole(policy) if asked.base_version is None else asked.base_version
    elif asked.kind == CheckpointKind.DELTA:
        if asked.base_version is None:
            raise invalid("a delta needs the base_version it goes on from", "base_version")
        base = asked.base_version
    now = time.time()
    return Upload(
        tenant=policy.tenant,
        policy=policy.policy,
        upload=asked.upload or secrets.token_hex(16),
        kind=CheckpointKind(asked.kind),
        world=asked.world,
        base_version=base,
        version=asked.version,
        step=asked.step,
        dtype=policy.dtype,
        next_within_s=within,
        created_at=now,
        expires_at=now + ttl_s,
    )


def _newest_whole(policy: PolicyState) -> int:
    return max((v.version for v in policy.versions if v.kind.whole), default=0)


def _check_versions(policy: PolicyState, wanted: Upload) -> None:
    """The number asked for may still be free, and the base of an adapter or a delta is there."""
    if wanted.version is not None and wanted.version <= policy.newest:
        raise taken(policy.policy, wanted.version, f"the newest is {policy.newest}")
    kept = {0, *(version.version for version in policy.versions if version.kind.whole and not version.going)}
    if wanted.base_version not in kept:
        raise RollgridError(
            ErrorCode.VERSION_UNAVAILABLE,
            f"{policy.policy} keeps no full or delta version {wanted.base_version} to build on",
            boundary=Boundary.WEIGHTS,
            field="base_version",
            limit=f"full and delta versions: {sorted(kept)[-16:]}",
            retryable=False,
        )


def _check_same(found: Upload, wanted: Upload, asked: BeginRequest) -> None:
    for name in ("kind", "world", "version", "step", "next_within_s", "base_version"):
        if name == "base_version" and asked.base_version is None:
            continue  # the newest full version may have moved since the first rank began
        if getattr(found, name) != getattr(wanted, name):
            raise _conflict(found, name, f"it began with {name}={getattr(found, name)}, not {getattr(wanted, name)}")


def _check_alive(upload: Upload) -> None:
    if time.time() >= upload.expires_at:
        raise RollgridError(
            ErrorCode.VERSION_GONE,
            f"upload {upload.upload} of {upload.policy} has expired: begin another",
            boundary=Boundary.WEIGHTS,
            field="upload",
            limit=f"expires_at={upload.expires_at:.0f}",
        )


def _shard(upload: Upload, request: ShardRequest) -> UploadShard:
    if not 0 <= request.rank < upload.world:
        raise over_limit("rank", request.rank, f"0<=rank<{upload.world}")
    if len(request.files) > MAX_FILES:
        raise over_limit("files", len(request.files), f"{MAX_FILES} files of one rank")
    names = [file.name for file in request.files]
    if len(set(names)) != len(names):
        raise invalid("files: a name comes twice", "files")
    for i, file in enumerate(request.files):
        if not _SHA256.fullmatch(file.sha256):
            raise invalid(f"files[{i}].sha256 is not 64 small hexadecimal digits", f"files[{i}].sha256")
    return UploadShard(
        rank=request.rank,
        files=tuple(FileInfo(name=file.name, size=file.size, sha256=file.sha256) for file in request.files),
        tensors=tuple(
            TensorInfo(name=t.name, dtype=t.dtype, shape=tuple(t.shape), sha256=t.sha256) for t in request.tensors or ()
        ),
    )


def taken(policy: str, version: int, why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.VERSION_UNAVAILABLE,
        f"version {version} of {policy} cannot be published: {why}",
        boundary=Boundary.WEIGHTS,
        field="version",
        retryable=False,
    )


def _conflict(upload: Upload, field: str, why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.IDEMPOTENCY_CONFLICT,
        f"upload {upload.upload} of {upload.policy} is another one, {why}: take a name of its own for each publication",
        boundary=Boundary.WEIGHTS,
        field=field,
    )


def _unknown(policy: PolicyState, upload: str) -> RollgridError:
    return RollgridError(
        ErrorCode.NOT_FOUND, f"{policy.policy} has no upload {upload[:80]!r}", boundary=Boundary.WEIGHTS, field="upload"
    )


def _too_large(size: int, limit: int) -> RollgridError:
    return RollgridError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the file has {size} bytes or more, the limit is max_upload_bytes={limit}",
        boundary=Boundary.CLIENT,
        field="body",
        limit=f"max_upload_bytes={limit}",
    )


def _all_of(write: Callable[[bytes], None], rest: bytes, file: IO[bytes]) -> Callable[[], None]:
    def finish() -> None:
        write(rest)
        file.flush()

    return finish
