"""Reading posted rewards: pages by cursor, what stands for one group, and posts by the id of their request.

The stream is read first, the archive for what was purged from it; the manifests name every post, so
a page that a purge has cut is made whole.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from rollgrid_contracts import subjects
from rollgrid_contracts.topology import DEDUPE_HEADER, TRAJECTORIES
from rollgrid_contracts.trajectories import RewardsPosted
from rollgrid_runtime.archive import ArchiveReader
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import Stored, Tail, read_after

from .rewards_schema import StandingReward

PAGE = 500
REMEMBERED_REWARDS = 200_000
"""Standing rewards kept in memory, about 300 bytes each."""


class PostPage(NamedTuple):
    """Posts with their sequences; everything up to `cursor` has been read."""

    posts: list[tuple[int, RewardsPosted]]
    cursor: int


@dataclass(slots=True)
class _Standing:
    """What stands in one run: posts in (`start`, `read_to`] folded by group, sample and name."""

    start: int
    read_to: int
    groups: dict[str, dict[tuple[int, str], StandingReward]] = field(default_factory=dict)
    size: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class PostReader:
    """All methods raise BusError and StorageError."""

    def __init__(self, bus: Bus, blobs: Blobs, stopping: asyncio.Event) -> None:
        self._bus, self._stopping = bus, stopping
        self._archive = ArchiveReader(blobs)
        self._standing: OrderedDict[tuple[str, str], _Standing] = OrderedDict()

    async def page(self, tenant: str, run: str, cursor: int, limit: int, wait_s: float = 0.0) -> PostPage:
        """Up to `limit` posts behind `cursor`; an empty page is held back for `wait_s` until something comes."""
        found = await self._next(tenant, run, cursor, limit)
        if found.posts or wait_s <= 0:
            return found
        deadline = time.monotonic() + wait_s
        async with Tail(self._bus, TRAJECTORIES.name, subjects.run_rewards(tenant, run)) as tail:
            while True:
                found = await self._next(tenant, run, found.cursor, limit)
                left = deadline - time.monotonic()
                if found.posts or left <= 0 or self._stopping.is_set():
                    return found
                await tail.wait(left)

    async def standing(self, tenant: str, run: str, group_id: str, closed_seq: int) -> list[StandingReward]:
        """The latest reward of each sample and name, posted onto the group closed at `closed_seq`."""
        known = self._standing.get((tenant, run))
        if known is None or closed_seq < known.start:  # of a run that is asked for backwards, all is read
            start = closed_seq if known is None else 0
            known = self._standing[(tenant, run)] = _Standing(start, start)
        self._standing.move_to_end((tenant, run))
        async with known.lock:
            while (page := await self._next(tenant, run, known.read_to, PAGE)).posts:
                for sequence, post in page.posts:
                    _fold(known, sequence, post)
                known.read_to = page.cursor
        found = sorted(known.groups.get(group_id, {}).values(), key=lambda reward: (reward.index, reward.name))
        while self._standing and sum(run.size for run in self._standing.values()) > REMEMBERED_REWARDS:
            self._standing.popitem(last=False)
        return found

    async def find(self, tenant: str, run: str, keys: Collection[str], after: int) -> dict[str, int]:
        """Sequences behind `after` of the posts stored under these ids."""
        found: dict[str, int] = {}
        subject = subjects.run_rewards(tenant, run)
        cursor, more = after, True
        while more:
            page = await read_after(self._bus, TRAJECTORIES.name, subject, cursor, PAGE)
            for stored in page.messages:
                cursor = stored.sequence
                if stored.headers.get(DEDUPE_HEADER) in keys:
                    found.setdefault(stored.headers[DEDUPE_HEADER], cursor)
            more = page.pending > 0 and bool(page.messages)
        if len(found) < len(keys) and await self._purged_behind(after):
            archived = await self._archive.post_keys(tenant, run, after)
            found |= {key: sequence for key, sequence in archived.items() if key in keys}
        return found

    # -- one read ---------------------------------------------------------------------------------

    async def _next(self, tenant: str, run: str, cursor: int, limit: int) -> PostPage:
        """What is there now; reads on until there is something or no more."""
        while True:
            found, more = await self._read(tenant, run, cursor, limit)
            if found.posts or not more:
                return found
            cursor = found.cursor

    async def _read(self, tenant: str, run: str, cursor: int, limit: int) -> tuple[PostPage, bool]:
        """(a page, whether more may follow at once)."""
        page = await read_after(self._bus, TRAJECTORIES.name, subjects.run_rewards(tenant, run), cursor, limit)
        if not page.messages:  # the last post of a run is never purged: there is none behind the cursor
            return PostPage([], cursor), False
        reached, more = page.messages[-1].sequence, page.pending > 0
        posts = {stored.sequence: await self._decoded(stored) for stored in page.messages}
        # asked after the page: whatever was purged before or while it was read is seen here
        if await self._purged_behind(cursor):
            archived = await self._archive.rewards(tenant, run, cursor, limit)
            if archived.more and archived.read_to < reached:
                reached, more = archived.read_to, True
            posts |= dict(archived.posts)
        chosen = sorted((sequence, post) for sequence, post in posts.items() if sequence <= reached)
        if len(chosen) > limit:
            chosen, more = chosen[:limit], True
            reached = chosen[-1][0]
        return PostPage(chosen, reached), more

    async def _purged_behind(self, cursor: int) -> bool:
        """Whether a message behind `cursor` may have left the stream."""
        state = (await self._bus.stream_info(TRAJECTORIES.name)).state
        return int(state.first_seq) > cursor + 1 or bool(state.num_deleted)

    async def _decoded(self, stored: Stored) -> RewardsPosted:
        return await self._bus.decoded(stored.data, stored.headers, RewardsPosted)


def _fold(standing: _Standing, sequence: int, post: RewardsPosted) -> None:
    group = standing.groups.setdefault(post.group_id, {})
    for reward in post.rewards:
        standing.size += (reward.index, reward.name) not in group
        group[(reward.index, reward.name)] = StandingReward(
            index=reward.index,
            name=reward.name,
            kind=reward.kind,
            value=reward.value,
            turn_values=list(reward.turn_values),
            detail=reward.detail,
            source=post.source,
            posted_at=post.posted_at,
            cursor=sequence,
        )
