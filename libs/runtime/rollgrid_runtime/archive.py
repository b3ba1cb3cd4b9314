"""Reading the archive in S3: closed groups and posted rewards under the same sequence numbers as the stream.

Manifests alone say what exists; an object without one is the remains of a crash.  Needs the extra
`[archive]` (pyarrow) once rows are read.  The writer is the trajectory logger.
"""

from __future__ import annotations

import asyncio
import hashlib
from bisect import bisect_right
from collections import OrderedDict
from typing import NamedTuple

import msgspec
from rollgrid_contracts.columns import (
    ARCHIVE_SCHEMA,
    MANIFEST_PREFIX,
    ArchivedPost,
    ArchiveManifest,
    first_of_manifest,
    manifest_key,
)
from rollgrid_contracts.trajectories import GroupClosed, RewardsPosted

from .blobs import Blobs
from .errors import PayloadGone, StorageError

MANIFESTS_CACHED = 256
OBJECTS_CACHED = 2
OBJECTS_PER_READ = 8
"""Objects one `read` downloads at most, so that a sparse reader answers within seconds."""


class ArchivePage(NamedTuple):
    """Groups in sequence order.  Everything up to `read_to` has been looked at: the next cursor.

    `more` says that the archive goes on behind it; without more, the stream does.
    """

    groups: list[tuple[int, GroupClosed]]
    read_to: int
    more: bool


class PostsPage(NamedTuple):
    """Posted rewards in sequence order; `read_to` and `more` as in `ArchivePage`."""

    posts: list[tuple[int, RewardsPosted]]
    read_to: int
    more: bool


def decode_manifest(data: bytes) -> ArchiveManifest:
    """Raises StorageError on a manifest that is malformed or newer than this reader."""
    try:
        manifest = msgspec.json.decode(data, type=ArchiveManifest)
    except msgspec.MsgspecError as error:
        raise StorageError(f"archive manifest: {error}") from error
    if manifest.schema > ARCHIVE_SCHEMA:
        raise StorageError(f"archive manifest {manifest.first} has schema {manifest.schema}, newer than this reader")
    return manifest


class ArchiveManifests:
    """The manifests in order, listed as far as they are needed.  All methods raise StorageError."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._firsts: list[int] = []
        self._cache: OrderedDict[int, ArchiveManifest] = OrderedDict()

    async def refresh(self, after: int = 0) -> None:
        """List what has been written since; on an empty list begin behind sequence `after` (a hint)."""
        known = self._firsts[-1] if self._firsts else after
        keys = await self._blobs.keys(MANIFEST_PREFIX, manifest_key(known) if known else "")
        self._firsts += [
            first for first in map(first_of_manifest, keys) if not self._firsts or first > self._firsts[-1]
        ]

    async def last(self) -> ArchiveManifest | None:
        """The newest manifest."""
        await self.refresh()
        return await self._get(self._firsts[-1]) if self._firsts else None

    async def covering(self, sequence: int) -> ArchiveManifest | None:
        """The manifest whose range holds `sequence`, or the first behind it; None beyond the archive's end."""
        manifest = await self._known(sequence)
        if manifest is None:
            await self.refresh()
            manifest = await self._known(sequence)
        return manifest

    async def _known(self, sequence: int) -> ArchiveManifest | None:
        place = max(0, bisect_right(self._firsts, sequence) - 1)
        for first in self._firsts[place : place + 2]:
            manifest = await self._get(first)
            if manifest.last >= sequence:
                return manifest
        return None

    async def _get(self, first: int) -> ArchiveManifest:
        manifest = self._cache.get(first)
        if manifest is None:
            data = await self._blobs.get(manifest_key(first))
            if data is None:
                raise PayloadGone(f"archive manifest {first} is gone")
            manifest = decode_manifest(data)
            self._cache[first] = manifest
            if len(self._cache) > MANIFESTS_CACHED:
                self._cache.popitem(last=False)
        return manifest


class ArchiveReader:
    """Closed groups and posted rewards of one tenant, behind a cursor.  All methods raise StorageError."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self.manifests = ArchiveManifests(blobs)
        self._objects: OrderedDict[str, bytes] = OrderedDict()

    async def read(self, tenant: str, run: str | None = None, after: int = 0, limit: int = 100) -> ArchivePage:
        """Up to `limit` groups of `tenant` (and `run`) with a sequence greater than `after`."""
        groups: list[tuple[int, GroupClosed]] = []
        downloads = 0
        while len(groups) < limit:
            manifest = await self.manifests.covering(after + 1)
            if manifest is None:
                return ArchivePage(groups, after, False)
            if _holds(manifest, tenant, run, after):
                if downloads == OBJECTS_PER_READ:
                    break
                downloads += 1
                found = await self._rows(manifest, tenant, run, after, limit - len(groups))
                groups += found
                if len(groups) >= limit:
                    return ArchivePage(groups, groups[-1][0], True)
            after = manifest.last
        return ArchivePage(groups, after, True)

    async def get(self, tenant: str, sequence: int) -> GroupClosed | None:
        """The group closed at `sequence`, None when the archive has none of this tenant there."""
        manifest = await self.manifests.covering(sequence)
        if manifest is None or not any(c.sequence == sequence and c.tenant == tenant for c in manifest.closes):
            return None
        found = await self._rows(manifest, tenant, None, sequence - 1, 1)
        return found[0][1] if found else None

    async def rewards(self, tenant: str, run: str, after: int = 0, limit: int = 100) -> PostsPage:
        """Up to `limit` posts onto groups of `run` with a sequence greater than `after`."""
        posts: list[tuple[int, RewardsPosted]] = []
        downloads = 0
        while len(posts) < limit:
            manifest = await self.manifests.covering(after + 1)
            if manifest is None:
                return PostsPage(posts, after, False)
            if posts_of(manifest, tenant, run, after):
                if downloads == OBJECTS_PER_READ:
                    break
                downloads += 1
                posts += await self._posts(manifest, tenant, run, after, limit - len(posts))
                if len(posts) >= limit:
                    return PostsPage(posts, posts[-1][0], True)
            after = manifest.last
        return PostsPage(posts, after, True)

    async def post_keys(self, tenant: str, run: str, after: int) -> dict[str, int]:
        """Sequence by key of every archived post onto `run` behind `after`, from the manifests alone."""
        found: dict[str, int] = {}
        while (manifest := await self.manifests.covering(after + 1)) is not None:
            for post in posts_of(manifest, tenant, run, after):
                found.setdefault(post.key, post.sequence)
            after = manifest.last
        return found

    async def _posts(
        self, manifest: ArchiveManifest, tenant: str, run: str, after: int, limit: int
    ) -> list[tuple[int, RewardsPosted]]:
        from .archive_rewards import from_parquet  # pyarrow: only readers of rows pay for it

        assert manifest.rewards is not None
        data = await self._object(manifest.rewards.key, manifest.rewards.sha256)
        return await asyncio.to_thread(from_parquet, data, tenant, run, after, limit)

    async def _rows(
        self, manifest: ArchiveManifest, tenant: str, run: str | None, after: int, limit: int
    ) -> list[tuple[int, GroupClosed]]:
        from .archive_rows import from_parquet  # pyarrow: only readers of rows pay for it

        data = await self.object_bytes(manifest)
        groups = await asyncio.to_thread(from_parquet, data, tenant, run, after, limit)
        return await self.with_turns(manifest, groups)

    async def with_turns(
        self, manifest: ArchiveManifest, groups: list[tuple[int, GroupClosed]]
    ) -> list[tuple[int, GroupClosed]]:
        """Groups of this range, as `archive_rows` gives them, with the turns of their sessions."""
        if manifest.turns is None or not groups:
            return groups
        from . import archive_turns

        data = await self._object(manifest.turns.key, manifest.turns.sha256)
        turns = await asyncio.to_thread(archive_turns.from_parquet, data, [sequence for sequence, _ in groups])
        return archive_turns.joined(groups, turns)

    async def object_bytes(self, manifest: ArchiveManifest) -> bytes:
        """The Parquet file of a manifest, checked against its digest."""
        if manifest.key is None:
            raise PayloadGone(f"archive range {manifest.first}-{manifest.last} holds no group")
        return await self._object(manifest.key, manifest.sha256)

    async def _object(self, key: str, sha256: str) -> bytes:
        data = self._objects.get(key)
        if data is None:
            data = await self._blobs.get(key)
            if data is None:
                raise PayloadGone(f"archive object {key} is gone")
            digest = await asyncio.to_thread(lambda whole: hashlib.sha256(whole).hexdigest(), data)
            if digest != sha256:
                raise PayloadGone(f"archive object {key} does not match its digest")
            self._objects[key] = data
            if len(self._objects) > OBJECTS_CACHED:
                self._objects.popitem(last=False)
        return data


def _holds(manifest: ArchiveManifest, tenant: str, run: str | None, after: int) -> bool:
    return tenant in manifest.tenants and any(
        close.sequence > after and close.tenant == tenant and run in (None, close.run) for close in manifest.closes
    )


def posts_of(manifest: ArchiveManifest, tenant: str, run: str, after: int = 0) -> list[ArchivedPost]:
    """The manifest's posts of one run behind a sequence."""
    posts = manifest.rewards.posts if manifest.rewards is not None else ()
    return [post for post in posts if post.sequence > after and (post.tenant, post.run) == (tenant, run)]
