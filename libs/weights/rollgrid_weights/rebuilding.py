"""Versions on this node's disk whatever their kind: a delta is rebuilt there once, from the nearest version that is whole.

Nothing that is held is touched: the rebuilt files appear by one rename, or not at all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import shutil
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo
from rollgrid_contracts.failures import ErrorCode

from .delta.blob import open_blob
from .delta.decode import apply_delta
from .delta.states import file_state, state_digest
from .errors import WeightsError, invalid
from .manifest import weight_files
from .names import is_delta
from .staging import Held, Staging

MAX_CHAIN = 1024
"""Deltas behind one another; more are taken for a cycle."""


@dataclasses.dataclass(frozen=True)
class Known:
    """A version's manifest, the digest of its bytes, and where its files are."""

    manifest: CheckpointManifest
    digest: str
    prefix: str

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.manifest.files)


Find = Callable[[int], Awaitable[Known]]
"""What is known of a version.  Raises for one that is not there any more."""
Bring = Callable[[str, FileInfo, Path], Awaitable[None]]
"""Fetches one file below a prefix."""


class Rebuilding:
    """`base` is the folder of version 0, where there is one."""

    def __init__(self, staging: Staging, find: Find, bring: Bring, base: Path | None, *, threads: int = 1) -> None:
        self._staging, self._find, self._bring = staging, find, bring
        self._base, self._threads = base, threads

    async def hold(self, known: Known, at_hand: Mapping[int, Path]) -> Held:
        """The version on disk.  `at_hand` are folders of whole versions that stay meanwhile.

        Raises WeightsError (a file or the state is not what a manifest says, a chain that leads nowhere, a full
        disk) and what `find` and `bring` raise; what was on disk is untouched.
        """
        if known.manifest.kind is not CheckpointKind.DELTA:
            return await self._staging.hold(known.manifest, known.digest, self._fetcher(known), base=self._base)
        found = await self._staging.find(known.manifest, known.digest)
        if found is not None:
            return found
        chain, start, held = await self._start(known, at_hand)
        try:
            return await self._staging.make(
                known.manifest, known.digest, lambda folder: self._rebuild(chain, start, folder), base=self._base
            )
        finally:
            if held is not None:
                held.release()

    async def repair(self, known: Known, held: Held) -> tuple[str, ...]:
        """Rebuild the files of a held delta version where they are not what its manifest says; their names."""
        wanted = known.manifest.weights_digest
        if await asyncio.to_thread(folder_digest, held.folder, self._threads) == wanted:
            return ()
        chain, start, below = await self._start(known, {})
        fresh = held.folder / f".{secrets.token_hex(4)}"
        fresh.mkdir()
        try:
            await self._rebuild(chain, start, fresh)
            paths = weight_files(fresh)
            for path in paths:  # users keep what they have mapped
                path.replace(held.folder / path.name)
            return tuple(path.name for path in paths)
        finally:
            await asyncio.to_thread(shutil.rmtree, fresh, ignore_errors=True)
            if below is not None:
                below.release()

    async def _start(self, known: Known, at_hand: Mapping[int, Path]) -> tuple[list[Known], Path, Held | None]:
        """The deltas to apply, oldest first, and the folder of the state that they begin with."""
        chain = [known]
        while True:
            version = chain[-1].manifest.base_version or 0
            if version >= chain[-1].manifest.version or len(chain) > MAX_CHAIN:
                raise invalid(f"version {chain[-1].manifest.version} is a delta to version {version}", "base_version")
            folder = self._base if version == 0 else at_hand.get(version)
            if folder is not None and (version == 0 or folder.is_dir()):  # a cache may be emptied under who uses it
                return chain[::-1], folder, None
            if version == 0:
                raise invalid("a delta to the base, of which there is no folder here", "base_version")
            below = await self._find(version)
            held = await self._staging.find(below.manifest, below.digest)
            if held is None and below.manifest.kind is CheckpointKind.FULL:
                held = await self._staging.hold(below.manifest, below.digest, self._fetcher(below), base=self._base)
            if held is not None:
                return chain[::-1], held.folder, held
            if below.manifest.kind is not CheckpointKind.DELTA:
                raise invalid(f"version {version} is no version that a delta can go on from", "base_version")
            chain.append(below)

    async def _rebuild(self, chain: Sequence[Known], start: Path, folder: Path) -> int:
        """Fetch the deltas, copy the state they begin with, and change it; the bytes that were fetched."""
        paths: list[Path] = []
        for known in chain:
            for file in known.manifest.files:
                if is_delta(file.name):
                    path = folder / f".{known.manifest.version}-{file.name}"
                    await self._staging.bring(file, path, self._fetcher(known))
                    paths.append(path)
        wanted = chain[-1].manifest.weights_digest
        needed = sum(path.stat().st_size for path in weight_files(start))
        self._staging.check_room(needed)
        with self._staging.writing(needed):
            await asyncio.to_thread(rebuild, start, paths, folder, wanted, threads=self._threads)
        for path in paths:
            path.unlink()
        return sum(known.bytes for known in chain)

    def _fetcher(self, known: Known) -> Callable[[FileInfo, Path], Awaitable[None]]:
        return lambda file, path: self._bring(known.prefix, file, path)


def folder_digest(folder: Path, threads: int = 1) -> str:
    """`weights_digest` of the safetensors files in a folder.  Blocks; raises WeightsError for malformed ones."""
    with ThreadPoolExecutor(threads) as pool:
        return state_digest(file_state(weight_files(folder)), pool)


def rebuild(start: Path, deltas: Sequence[Path], folder: Path, digest: str, *, threads: int = 1) -> None:
    """The state of `start` after all deltas, as safetensors files in `folder`.  Blocks.

    Raises WeightsError: a damaged delta, one that does not fit, or an end that does not have `digest`.
    """
    for path in weight_files(start):
        shutil.copyfile(path, folder / path.name)
    state = file_state(weight_files(folder), writable=True)
    for path in deltas:
        apply_delta(open_blob(path), state, state, threads=threads)
    found = folder_digest(folder, threads)
    if found != digest:
        raise WeightsError(
            ErrorCode.INVALID_REQUEST,
            f"the deltas lead to a state with digest {found}, not {digest}: they were made against another base",
            field="base_version",
        )
