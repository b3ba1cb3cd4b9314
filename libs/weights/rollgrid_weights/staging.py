"""Checkpoint versions on this node's disk, fetched once for all processes that use them.

One folder per tenant, policy, version and manifest; beside it a lock file.  Whoever fetches holds it
exclusively, whoever uses the folder holds it shared: the kernel counts the users, over crashes too.
A folder appears whole, by one rename.  It is removed when nobody holds it and nobody wants it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterator
from pathlib import Path

from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo
from rollgrid_contracts.failures import ErrorCode

from .errors import WeightsError, invalid
from .names import INDEX, is_weights

POLL_S = 0.05
"""How often a lock that a neighbour holds is tried again: he may be fetching for minutes."""
RESERVE_BYTES = 256 * 1024 * 1024
"""Free space left on the disk."""
PARALLEL = 4
"""Files fetched at once."""
FETCHING = ".fetching-"
NOT_LINKED = (".safetensors", ".safetensors.index.json", ".bin", ".gguf")
"""Weights of the base: never part of another version."""

Fetch = Callable[[FileInfo, Path], Awaitable[None]]
"""Brings one file of the version to a path."""
Fill = Callable[[Path], Awaitable[int]]
"""Brings all of a version into an empty folder; how many bytes were fetched for it."""


class Lock:
    """flock on one path.  Raises nothing but OSError; what it holds ends with the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def take(self, *, exclusive: bool) -> bool:
        """Try; also to turn what is held into the other kind (not in one step)."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return self._current()

    def _current(self) -> bool:
        """Whether the path still names this file: whoever removes a folder removes its lock with it."""
        try:
            return os.fstat(self._file).st_ino == os.stat(self.path).st_ino
        except FileNotFoundError:
            return False

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Held:
    """A version that stays on disk until `release`."""

    def __init__(self, folder: Path, lock: Lock, fetched: int) -> None:
        self.folder = folder
        self.fetched = fetched
        """Bytes brought here for it by this process; 0 = it was there."""
        self._lock = lock

    def release(self) -> None:
        self._lock.close()


class Staging:
    """Everything below `root`; several processes may use it at once."""

    def __init__(self, root: Path, *, parallel: int = PARALLEL, reserve: int = RESERVE_BYTES) -> None:
        self._root, self._parallel, self._reserve = root, parallel, reserve

    def room(self, tenant: str, policy: str) -> Path:
        return self._root / tenant / policy

    async def hold(self, manifest: CheckpointManifest, digest: str, fetch: Fetch, *, base: Path | None = None) -> Held:
        """The version on disk, fetched unless it is there.  `digest` is that of the manifest's bytes.

        A full version is completed by the files of `base` that are no weights (configuration, tokenizer).

        Raises WeightsError (a file is not what its manifest says, the disk is full) and what `fetch` raises.
        """
        files = wanted_files(manifest)

        async def fetch_all(folder: Path) -> int:
            await self._fetch_files(files, folder, fetch)
            return sum(file.size for file in files)

        return await self.make(manifest, digest, fetch_all, base=base)

    async def find(self, manifest: CheckpointManifest, digest: str) -> Held | None:
        """The version if it is on disk."""
        folder = self._folder(manifest, digest)
        if not folder.exists():
            return None
        lock = Lock(folder.with_name(f"{folder.name}.lock"))
        if lock.take(exclusive=False) and folder.exists():
            return Held(folder, lock, 0)
        lock.close()
        return None

    async def make(self, manifest: CheckpointManifest, digest: str, fill: Fill, *, base: Path | None = None) -> Held:
        """As `hold`, with `fill` to bring everything into a new folder; it says how many bytes it has fetched."""
        folder = self._folder(manifest, digest)
        folder.parent.mkdir(parents=True, exist_ok=True)
        links = base if manifest.kind.whole else None
        fetched = 0
        while True:
            lock = Lock(folder.with_name(f"{folder.name}.lock"))
            try:
                if folder.exists():
                    if lock.take(exclusive=False) and folder.exists():
                        await asyncio.to_thread(link_base, links, folder)
                        held, lock = Held(folder, lock, fetched), None  # type: ignore[assignment]
                        return held
                elif lock.take(exclusive=True) and not folder.exists():
                    fetched = await self._fill(folder, fill, links)
                    continue
            finally:
                if lock is not None:
                    lock.close()
            await asyncio.sleep(POLL_S)

    async def repair(self, manifest: CheckpointManifest, held: Held, fetch: Fetch) -> tuple[str, ...]:
        """Replace the files of a held version that are not what its manifest says; their names."""
        damaged = []
        for file in wanted_files(manifest):
            path = held.folder / file.name
            if await asyncio.to_thread(_digest, path) == file.sha256:
                continue
            fresh = held.folder / f".{secrets.token_hex(4)}-{file.name}"  # users keep what they have mapped
            try:
                await self.bring(file, fresh, fetch)
                fresh.replace(path)
            finally:
                fresh.unlink(missing_ok=True)
            damaged.append(file.name)
        return tuple(damaged)

    def sweep(self, tenant: str, policy: str, keep: Collection[int]) -> list[str]:
        """Remove what nobody holds: folders of versions not in `keep`, and what fetches left.  Blocks."""
        room = self.room(tenant, policy)
        if not room.is_dir():
            return []
        names = {entry.name.split(FETCHING)[0].removesuffix(".lock") for entry in room.iterdir()}
        removed = []
        for name in sorted(names):
            version = name.partition("-")[0]
            if version.isdigit():
                wanted = int(version) in keep
                if self._remove(room / name, leftovers_only=wanted) and not wanted:
                    removed.append(name)
        return removed

    def _remove(self, folder: Path, *, leftovers_only: bool) -> bool:
        path = folder.with_name(f"{folder.name}.lock")
        lock = Lock(path)
        try:
            if not lock.take(exclusive=True):
                return False
            for left in folder.parent.glob(f"{folder.name}{FETCHING}*"):
                shutil.rmtree(left, ignore_errors=True)
            if not leftovers_only:
                shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                path.unlink(missing_ok=True)
            return True
        finally:
            lock.close()

    # -- fetching -----------------------------------------------------------------------------

    def _folder(self, manifest: CheckpointManifest, digest: str) -> Path:
        return self.room(manifest.tenant, manifest.policy) / f"{manifest.version}-{digest[:16]}"

    async def _fill(self, folder: Path, fill: Fill, base: Path | None) -> int:
        """With the lock held: everything into a folder beside, then one rename."""
        for left in folder.parent.glob(f"{folder.name}{FETCHING}*"):
            await asyncio.to_thread(shutil.rmtree, left, ignore_errors=True)
        # a name of its own: threads of a fetch that was cancelled may still write
        unfinished = folder.with_name(f"{folder.name}{FETCHING}{secrets.token_hex(4)}")
        unfinished.mkdir()
        try:
            fetched = await fill(unfinished)
            await asyncio.to_thread(link_base, base, unfinished)
            unfinished.rename(folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, unfinished, ignore_errors=True)
        return fetched

    async def _fetch_files(self, files: list[FileInfo], folder: Path, fetch: Fetch) -> None:
        self.check_room(sum(file.size for file in files))
        turns = asyncio.Semaphore(self._parallel)

        async def one(file: FileInfo) -> None:
            async with turns:
                await self.bring(file, folder / file.name, fetch)

        try:
            async with asyncio.TaskGroup() as group:
                for file in files:
                    group.create_task(one(file))
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def bring(self, file: FileInfo, path: Path, fetch: Fetch) -> None:
        """One file to `path`, with the digest of its manifest.  Raises WeightsError and what `fetch` raises."""
        with self.writing(file.size):
            await fetch(file, path)
            digest = await asyncio.to_thread(_digest, path)
        if digest != file.sha256:
            raise invalid(f"file {file.name} does not match the digest of its manifest", file.name)

    @contextlib.contextmanager
    def writing(self, needed: int) -> Iterator[None]:
        """Meanwhile so many bytes are written here.  Raises WeightsError (storage_error) when the disk is full."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._full(needed, error.strerror or "no space left") from error

    def check_room(self, needed: int) -> None:
        """Raises WeightsError (storage_error) unless so many bytes fit beside the reserve."""
        free = shutil.disk_usage(self._root).free
        if free < needed + self._reserve:
            raise self._full(needed, f"{free} bytes are free")

    def _full(self, needed: int, why: str) -> WeightsError:
        return WeightsError(
            ErrorCode.STORAGE_ERROR,
            f"{why} in {self._root}, {needed} are needed beside {self._reserve} in reserve",
            field="cache",
            limit=f"{needed + self._reserve} bytes",
        )


def wanted_files(manifest: CheckpointManifest) -> list[FileInfo]:
    """What of a version a worker needs: of a full one the weights, as it runs the base's own side files.

    Raises WeightsError for a name that leaves its folder.
    """
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name.startswith("."):
            raise invalid(f"file name {file.name[:150]!r} leaves its folder", file.name[:150])
    if manifest.kind is not CheckpointKind.FULL:
        return list(manifest.files)
    return [file for file in manifest.files if is_weights(file.name) or file.name == INDEX]


def link_base(base: Path | None, target: Path) -> None:
    """Links to every file of the base folder that is not weights, unless the target has one of that name."""
    if base is None:
        return
    for path in base.iterdir():
        link = target / path.name
        if not path.is_file() or path.name.endswith(NOT_LINKED) or link.exists():
            continue
        fresh = target / f".{secrets.token_hex(4)}"
        fresh.symlink_to(path.resolve())
        fresh.replace(link)  # a link that led nowhere is replaced, a neighbour's is as good


def _digest(path: Path) -> str:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
    return ""
