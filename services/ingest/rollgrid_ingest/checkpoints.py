"""New versions of a policy: uploaded file by file, visible from the commit on, immutable after it.

An uploaded file lies under its digest, so racing publishers cannot overwrite each other; a commit
copies its files below a prefix named by their digests and creates the manifest, once.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import IO, NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    REFUSED_NAME,
    CheckpointKind,
    CheckpointManifest,
    CheckpointPublished,
    FileInfo,
    PolicyState,
    TensorInfo,
    version_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_runtime.logging import get_logger

from .rollout_schema import CommitAnswer, CommitRequest, FileAnswer, VersionAnswer
from .wire import invalid, unsupported

log = get_logger(__name__)

SMALL_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "merges.txt",
        "chat_template.jinja",
    }
)
_WEIGHTS = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,120}\.safetensors")
MAX_VERSION = 2**31 - 1
WRITE_CHUNK = 1 << 20


class Part(NamedTuple):
    """An uploaded file: where it lies until some commit takes it."""

    name: str
    size: int
    sha256: str
    key: str


class Checkpoints:
    def __init__(self, bus: Bus, blobs: Blobs, *, max_bytes: int) -> None:
        self._bus, self._blobs, self._max_bytes = bus, blobs, max_bytes

    async def upload(
        self, policy: PolicyState, version: int, name: str, chunks: AsyncIterator[bytes], declared: int | None
    ) -> FileAnswer:
        """Take one file, through a temporary file, under its digest.

        Raises invalid_request, unsupported, payload_too_large, StorageError.
        """
        check_version(version)
        check_file_name(name)
        if declared is not None and declared > self._max_bytes:
            raise _too_large(declared, self._max_bytes)
        with tempfile.NamedTemporaryFile(prefix="rollgrid-upload-") as file:
            size, digest = await self._receive(chunks, file)
            if declared is not None and size != declared:
                raise invalid(f"{name}: {size} bytes came of {declared}", "body")
            if size == 0:
                raise invalid(f"{name} is empty", "body")
            part = _part(policy, version, name, size, digest)
            await self._blobs.upload(Path(file.name), part.key)
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

    async def commit(self, policy: PolicyState, version: int, request: CommitRequest) -> CommitAnswer:
        """Make the version exist.  The same files again are the same version.

        Raises version_unavailable when the number is taken by other content or not the next,
        invalid_request, unsupported, StorageError.
        """
        check_version(version)
        if request.kind != CheckpointKind.FULL:
            raise unsupported("kind", "only full versions are offered")
        manifest_key = _root(policy, version) + MANIFEST_NAME
        uploaded = await self._parts(policy, version)
        created = False
        stored = await self._blobs.get(manifest_key)
        if stored is None:
            if version <= policy.newest:
                raise _taken(policy, version, f"the newest is {policy.newest}")
            parts = _chosen(uploaded, request)
            manifest = _manifest(policy, version, request, parts)
            for part in parts:
                await self._blobs.copy(part.key, manifest.prefix + part.name)
            stored = msgspec.json.encode(manifest)
            created = await self._blobs.create(manifest_key, stored)
            if not created:
                stored = await self._blobs.get(manifest_key) or b""
        if not created and not _is_same(stored, request, uploaded):
            raise _taken(policy, version, "it exists with other content")
        await self._announce(policy, version, manifest_key)
        await self._forget(uploaded)
        return CommitAnswer(policy=policy.policy, version=version, manifest_key=manifest_key, created=created)

    async def status(self, policy: PolicyState, version: int) -> VersionAnswer:
        """Where a published version stands.  Raises not_found, invalid_request, StorageError."""
        check_version(version)
        if version == policy.desired or version in policy.history:
            state = "desired" if version == policy.desired else "superseded"
            return VersionAnswer(policy=policy.policy, version=version, status=state)
        refused = await self._blobs.get(_root(policy, version) + REFUSED_NAME)
        if refused is not None:
            error = msgspec.json.decode(refused, type=ErrorInfo)
            return VersionAnswer(policy=policy.policy, version=version, status="refused", error=error)
        if await self._blobs.get(_root(policy, version) + MANIFEST_NAME) is None:
            raise RollgridError(
                ErrorCode.NOT_FOUND,
                f"{policy.policy} has no version {version}",
                boundary=Boundary.WEIGHTS,
                field="version",
                limit=f"newest={policy.newest}",
            )
        return VersionAnswer(policy=policy.policy, version=version, status="verifying")

    async def _parts(self, policy: PolicyState, version: int) -> dict[tuple[str, str], Part]:
        """(name, sha256) → uploaded file."""
        found: dict[tuple[str, str], Part] = {}
        for key in await self._blobs.keys(_parts_prefix(policy, version)):
            folder, _, name = key.removeprefix(_parts_prefix(policy, version)).partition("/")
            digest, _, size = folder.partition("-")
            if name and size.isdigit():
                found[name, digest] = Part(name, int(size), digest, key)
        return found

    async def _announce(self, policy: PolicyState, version: int, manifest_key: str) -> None:
        event = CheckpointPublished(
            tenant=policy.tenant, policy=policy.policy, version=version, manifest_key=manifest_key
        )
        await self._bus.publish(subjects.checkpoints(policy.tenant, policy.policy), event)

    async def _forget(self, uploaded: dict[tuple[str, str], Part]) -> None:
        try:
            for part in uploaded.values():
                await self._blobs.delete(part.key)
        except StorageError as error:
            log.warning("parts_not_deleted", error=error.message)


def _chosen(uploaded: dict[tuple[str, str], Part], request: CommitRequest) -> list[Part]:
    """The uploaded files a commit means, by name.  Raises invalid_request."""
    if request.files is None:
        chosen = list(uploaded.values())
    else:
        chosen = []
        for i, file in enumerate(request.files):
            part = uploaded.get((file.name, file.sha256.lower()))
            if part is None or (file.size is not None and file.size != part.size):
                raise invalid(f"files[{i}]: {file.name[:130]} was not uploaded with these bytes", f"files[{i}]")
            chosen.append(part)
    names = [part.name for part in chosen]
    if len(set(names)) != len(names):
        raise invalid("a file came with several contents: name those that count in files", "files")
    if not any(name.endswith(".safetensors") for name in names):
        raise invalid("the version holds no .safetensors file", "files")
    return sorted(chosen)


def _is_same(stored: bytes, request: CommitRequest, uploaded: dict[tuple[str, str], Part]) -> bool:
    """Whether a commit of a version that exists means just what exists."""
    there = {(file.name, file.sha256) for file in msgspec.json.decode(stored, type=CheckpointManifest).files}
    if request.files is not None:
        return {(file.name, file.sha256.lower()) for file in request.files} == there
    return not uploaded or set(uploaded) == there


def _root(policy: PolicyState, version: int) -> str:
    return version_root(policy.tenant, policy.policy, version)


def _parts_prefix(policy: PolicyState, version: int) -> str:
    return f"{_root(policy, version)}parts/"


def _part(policy: PolicyState, version: int, name: str, size: int, digest: str) -> Part:
    return Part(name, size, digest, f"{_parts_prefix(policy, version)}{digest}-{size}/{name}")


def check_version(version: int) -> None:
    if not 1 <= version <= MAX_VERSION:
        raise invalid(f"version is {version}, not in 1..{MAX_VERSION}", "version", limit=f"1<=version<={MAX_VERSION}")


def check_file_name(name: str) -> None:
    """Weights as safetensors, configuration and tokenizer; optimizer state, pickles and code are refused."""
    if name not in SMALL_FILES and not _WEIGHTS.fullmatch(name):
        raise invalid(
            f"{name[:130]!r} is not a file of a version: *.safetensors, {', '.join(sorted(SMALL_FILES))}",
            "name",
            code=ErrorCode.UNSUPPORTED,
        )


def _manifest(policy: PolicyState, version: int, request: CommitRequest, parts: list[Part]) -> CheckpointManifest:
    digest = hashlib.sha256("".join(f"{part.name}\0{part.sha256}\n" for part in parts).encode()).hexdigest()
    return CheckpointManifest(
        tenant=policy.tenant,
        policy=policy.policy,
        version=version,
        kind=CheckpointKind.FULL,
        step=request.step,
        dtype=request.dtype or policy.dtype,
        tokenizer_digest=policy.tokenizer_digest,
        files=tuple(FileInfo(name=part.name, size=part.size, sha256=part.sha256) for part in parts),
        tensors=tuple(
            TensorInfo(name=t.name, dtype=t.dtype, shape=tuple(t.shape), sha256=t.sha256) for t in request.tensors or ()
        ),
        created_at=time.time(),
        prefix=f"{_root(policy, version)}{digest[:32]}/",
    )


def _taken(policy: PolicyState, version: int, why: str) -> RollgridError:
    return RollgridError(
        ErrorCode.VERSION_UNAVAILABLE,
        f"version {version} of {policy.policy} cannot be published: {why}",
        boundary=Boundary.WEIGHTS,
        field="version",
        limit=f"newest={policy.newest}",
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
