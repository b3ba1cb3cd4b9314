"""Writes the trajectory stream to S3: Parquet objects for a range of sequences (one of closed groups, one of their
turns, one of posted rewards), then their manifest, then the acks.

A range begins behind the last manifest's, and manifests are created only if absent, so ranges
never overlap and never leave a hole, whoever writes and wherever he is killed.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.columns import (
    SUPERSEDED_PREFIX,
    ArchivedClose,
    ArchivedPost,
    ArchivedRewards,
    ArchivedTurns,
    ArchiveManifest,
    data_key,
    manifest_key,
    rewards_key,
    turns_key,
)
from rollgrid_contracts.ids import new_key
from rollgrid_contracts.topology import ARCHIVER, DEDUPE_HEADER, TRAJECTORIES, Header
from rollgrid_contracts.trajectories import GroupClosed, RewardsPosted, Superseded, count_statuses
from rollgrid_runtime import archive_rewards, archive_turns, telemetry
from rollgrid_runtime.archive import ArchiveManifests
from rollgrid_runtime.archive_rows import to_parquet
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone, PayloadGone, StorageError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer
from rollgrid_runtime.pulling import Delivery

from . import metrics
from .closed_index import format_counts
from .settings import TrajectoryLoggerSettings

log = get_logger(__name__)
FETCH = 256
FETCH_WAIT_S = 0.5
BACKOFF_S = (0.5, 1.0, 2.0, 5.0)
LIST_BEHIND = 100_000
"""Sequences before the durable's ack floor at which the listing of manifests begins: it must meet one."""


class Buffered(NamedTuple):
    """A stored message: a close, a post (with the id under which its repeats are known), or neither (unreadable)."""

    seq: int
    group: GroupClosed | None = None
    post: RewardsPosted | None = None
    post_key: str = ""

    @property
    def unreadable(self) -> bool:
        return self.group is None and self.post is None


class Archiver:
    """`take_superseded` gives the finishes that lost since it was last called."""

    def __init__(
        self,
        bus: Bus,
        blobs: Blobs,
        settings: TrajectoryLoggerSettings,
        writer: str,
        take_superseded: Callable[[], list[Superseded]],
    ) -> None:
        self._bus, self._blobs, self._settings, self._writer = bus, blobs, settings, writer
        self._take_superseded = take_superseded
        self._manifests = ArchiveManifests(blobs)
        self._buffer: list[Buffered] = []
        self._bytes = 0
        self._since = 0.0
        self._acks: dict[int, str] = {}
        self._pending = 0
        self.archived_to = 0
        self.read_to = 0
        self.known = False
        """Whether `archived_to` has been read from the manifests."""
        self.problem: str | None = "not started"
        metrics.ARCHIVE_LAG.set_function(lambda: self._pending + len(self._buffer))
        metrics.ARCHIVE_AGE.set_function(lambda: time.monotonic() - self._since if self._buffer else 0.0)

    async def run(self) -> None:
        """Archive for ever; waits out whatever S3 and NATS do."""
        failures = 0
        while True:
            try:
                await self._archive()
            except (BusError, StorageError, ConsumerGone) as error:
                self._hold(error.message)
                await asyncio.sleep(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                failures += 1
            else:
                failures = 0

    async def _archive(self) -> None:
        """From the last manifest on, until something fails."""
        await self._blobs.ensure_bucket()
        await ensure_consumer(self._bus, ARCHIVER)
        await self._resume()
        puller = self._bus.puller(ARCHIVER)
        connection = -1
        try:
            while True:
                self.problem = None
                if connection != self._bus.connection_epoch:
                    connection = self._bus.connection_epoch
                    await self._read_undelivered()
                for delivery in await puller.fetch(FETCH, self._patience()):
                    await self._take(delivery)
                if self._buffer and time.monotonic() - self._since >= self._settings.archive_age_s:
                    await self._write()
        finally:
            await puller.close()

    async def _resume(self) -> None:
        """Find the last manifest; keep of the buffer what is behind it."""
        if not self.known:
            info = await self._bus.consumer_info(ARCHIVER.stream, ARCHIVER.durable)
            floor = int(info.ack_floor.stream_seq) if info is not None and info.ack_floor is not None else 0
            await self._manifests.refresh(after=max(0, floor - LIST_BEHIND))
        last = await self._manifests.last()
        if last is None and not self.known:
            self._manifests = ArchiveManifests(self._blobs)
            last = await self._manifests.last()
        await self._continue_behind(last.last if last else 0)
        self.known = True

    async def _continue_behind(self, last: int) -> None:
        self.archived_to = last
        self._buffer = [item for item in self._buffer if item.seq > last]
        if not self._buffer:
            self._bytes = 0
        self.read_to = max((item.seq for item in self._buffer), default=last)
        metrics.ARCHIVED_TO.set(last)
        await self._acknowledge()

    # -- reading ------------------------------------------------------------------------------

    async def _take(self, delivery: Delivery) -> None:
        self._pending = delivery.pending
        if delivery.sequence <= self.archived_to:
            await delivery.ack()
            return
        self._acks[delivery.sequence] = delivery.ack_subject
        if delivery.sequence <= self.read_to:
            return
        if delivery.sequence > self.read_to + 1:
            await self._fill(delivery.sequence - 1)
        await self._add(delivery.sequence, delivery.subject, delivery.data, delivery.headers)

    async def _read_undelivered(self) -> None:
        """Read what was sent to an earlier life or connection: by itself it would come only after the ack-wait."""
        info = await self._bus.consumer_info(ARCHIVER.stream, ARCHIVER.durable)
        if info is not None and info.delivered is not None:
            await self._fill(int(info.delivered.stream_seq))

    async def _fill(self, last: int) -> None:
        """Read one by one what did not come by itself: lost with a connection (still stored), or purged.

        The stream's leader is asked, so that nothing passes for purged that is not.
        """
        if last <= self.read_to:
            return
        first = int((await self._bus.stream_info(TRAJECTORIES.name)).state.first_seq)
        while self.read_to < last:
            seq = max(self.read_to + 1, min(first, last))
            message = await self._bus.stored(TRAJECTORIES.name, seq)
            if message is None:
                self.read_to = seq
            else:
                await self._add(seq, message.subject or "", message.data or b"", message.headers or {})

    async def _add(self, seq: int, subject: str, data: bytes, headers: dict[str, str]) -> None:
        """Buffer what is stored at `seq`, unless a rival has archived it meanwhile."""
        if seq <= self.read_to:
            return
        found = Buffered(seq)
        try:
            body = await self._bus.resolve(data, headers)
            found = _decoded(seq, subject, body, headers)
            self._bytes += len(body)
        except (msgspec.MsgspecError, RecursionError, PayloadGone) as error:
            metrics.UNREADABLE.labels(TRAJECTORIES.name).inc()
            log.error("unreadable_close", seq=seq, error=repr(error))
        if not self._buffer:
            self._since = time.monotonic()
        self._buffer.append(found)
        self.read_to = seq
        if self._is_full():
            await self._write()

    def _is_full(self) -> bool:
        return len(self._buffer) >= self._settings.archive_groups or self._bytes >= self._settings.archive_bytes

    def _patience(self) -> float:
        if not self._buffer:
            return FETCH_WAIT_S
        return min(FETCH_WAIT_S, max(0.01, self._since + self._settings.archive_age_s - time.monotonic()))

    # -- writing ------------------------------------------------------------------------------

    async def _write(self) -> None:
        """Write what is buffered, however long S3 takes; nothing more is read meanwhile."""
        attempt = 0
        while self._buffer:
            try:
                await self._write_once()
                self.problem = None
                return
            except StorageError as error:
                self._hold(error.message)
                await asyncio.sleep(BACKOFF_S[min(attempt, len(BACKOFF_S) - 1)])
                attempt += 1

    def _hold(self, problem: str) -> None:
        self.problem = problem
        metrics.ARCHIVE_ERRORS.inc()
        log.warning("archive_held", error=problem, waiting=len(self._buffer))

    async def _write_once(self) -> None:
        """The range's objects and its manifest.  Raises StorageError; the buffer stays until a manifest covers it."""
        first, last, begun = self.archived_to + 1, self.read_to, time.time()
        assert first <= self._buffer[0].seq <= last == max(last, self._buffer[-1].seq)
        groups = [(item.seq, item.group) for item in self._buffer if item.group is not None]
        key, digest, size = None, "", 0
        if groups:
            key, digest, size = await self._put(data_key, first, last, await asyncio.to_thread(to_parquet, groups))
        turns = await self._write_turns(first, last, groups)
        rewards = await self._write_rewards(first, last)
        manifest = ArchiveManifest(
            schema=1 if turns is None else 2,
            first=first,
            last=last,
            groups=len(groups),
            rows=sum(len(group.entries) for _, group in groups),
            key=key,
            sha256=digest,
            size=size,
            closes=tuple(_archived_close(seq, group) for seq, group in groups),
            unreadable=tuple(item.seq for item in self._buffer if item.unreadable),
            tenants=tuple(sorted({group.tenant for _, group in groups})),
            last_at=groups[-1][1].closed_at if groups else 0.0,
            created_at=time.time(),
            writer=self._writer,
            rewards=rewards,
            turns=turns,
        )
        if await self._blobs.create(manifest_key(first), msgspec.json.encode(manifest)):
            metrics.ARCHIVED_GROUPS.inc(len(groups))
            metrics.ARCHIVED_POSTS.inc(len(rewards.posts) if rewards else 0)
            metrics.ARCHIVED_BYTES.inc(size + (rewards.size if rewards else 0) + (turns.size if turns else 0))
            for seq, group in groups:
                _trace(seq, group, begun, key)
            await self._continue_behind(last)
            return
        log.info("manifest_exists", first=first)  # a rival's, or ours whose answer was lost
        written = await self._manifests.last()
        if written is None or written.last < first:
            raise StorageError(f"manifest {first} exists and is not listed yet")
        await self._continue_behind(written.last)

    async def _write_turns(self, first: int, last: int, groups: list[tuple[int, GroupClosed]]) -> ArchivedTurns | None:
        rows = archive_turns.rows_of(groups)
        if not rows:
            return None
        data = await asyncio.to_thread(archive_turns.to_parquet, rows)
        key, digest, size = await self._put(turns_key, first, last, data)
        return ArchivedTurns(key=key, sha256=digest, size=size, rows=len(rows))

    async def _write_rewards(self, first: int, last: int) -> ArchivedRewards | None:
        posts = [(item.seq, item.post) for item in self._buffer if item.post is not None]
        if not posts:
            return None
        data = await asyncio.to_thread(archive_rewards.to_parquet, posts)
        key, digest, size = await self._put(rewards_key, first, last, data)
        return ArchivedRewards(
            key=key,
            sha256=digest,
            size=size,
            rows=sum(len(post.rewards) for _, post in posts),
            posts=tuple(_archived_post(item, item.post) for item in self._buffer if item.post is not None),
        )

    async def _put(
        self, name: Callable[[int, int, str], str], first: int, last: int, data: bytes
    ) -> tuple[str, str, int]:
        """Key, digest and size of the object."""
        digest = hashlib.sha256(data).hexdigest()
        key = name(first, last, digest)
        await self._blobs.put(key, data)
        return key, digest, len(data)

    async def _acknowledge(self) -> None:
        for seq in [seq for seq in self._acks if seq <= self.archived_to]:
            await self._bus.publish_raw(self._acks.pop(seq), b"+ACK")

    # -- what lost ----------------------------------------------------------------------------

    async def keep_superseded(self) -> None:
        """Write finishes that lost, as far as memory kept them, to a dataset of their own: for diagnosis, not a record."""
        while True:
            await asyncio.sleep(self._settings.superseded_every_s)
            rows = self._take_superseded()
            if not rows:
                continue
            key = f"{SUPERSEDED_PREFIX}{int(time.time())}-{new_key()[:8]}.json"
            try:
                await self._blobs.put(key, msgspec.json.encode(rows))
            except StorageError as error:
                log.warning("superseded_not_kept", count=len(rows), error=error.message)

    @property
    def facts(self) -> dict[str, Any]:
        """`archive_lag` counts messages that are stored and not yet behind a manifest."""
        return {"archived_to": self.archived_to, "archive_lag": self._pending + len(self._buffer)}


def _decoded(seq: int, subject: str, body: bytes, headers: dict[str, str]) -> Buffered:
    """Raises msgspec.MsgspecError, RecursionError."""
    kind = headers.get(Header.CONTENT_TYPE.value, codec.MSGPACK)
    if not subjects.is_rewards(subject):
        return Buffered(seq, codec.decode(body, GroupClosed, kind))
    post = codec.decode(body, RewardsPosted, kind)
    if not post.rewards:
        raise msgspec.ValidationError("a post without a reward")
    return Buffered(seq, None, post, headers.get(DEDUPE_HEADER, ""))


def _trace(seq: int, group: GroupClosed, begun: float, key: str | None) -> None:
    """The group's way from its close into the file; its wait for the file's other groups is the queue's."""
    trace, name = group.traceparent, group.group_id
    log.debug("group_archived", tenant=group.tenant, run=group.run, group=name, trace_id=telemetry.trace_id(trace))
    if not telemetry.sampled(trace):
        return
    stream = TRAJECTORIES.name
    telemetry.record(
        "queue trajectories", trace, group.closed_at, begun, kind="consumer", stream=stream, group=name, sequence=seq
    )
    with telemetry.start("archive group", trace, at=begun, tenant=group.tenant, run=group.run, group=name) as span:
        span.set(batch=group.batch_id, samples=group.n, sequence=seq, object=key)


def _archived_post(item: Buffered, post: RewardsPosted) -> ArchivedPost:
    return ArchivedPost(sequence=item.seq, group_id=post.group_id, tenant=post.tenant, run=post.run, key=item.post_key)


def _archived_close(seq: int, group: GroupClosed) -> ArchivedClose:
    return ArchivedClose(
        sequence=seq,
        group_id=group.group_id,
        batch_id=group.batch_id,
        tenant=group.tenant,
        run=group.run,
        counts=format_counts(tuple(count_statuses(group.entries).values())),
        at=group.closed_at,
    )
