"""Gathers what an outsider can see after a storm: the journals, the stream, the manifests and their objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.trajectories import GroupClosed, RewardsPosted
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import read_after

from . import journal as journals
from .archive import read_archive
from .checker import Close, Evidence, StoredPost
from .journal import Line


async def read_closes(bus: Bus) -> list[Close]:
    """Every close the trajectory stream holds, in order."""
    closes: list[Close] = []
    after = 0
    while True:
        page = await read_after(bus, topology.TRAJECTORIES.name, subjects.TRAJECTORIES_ALL, after, 500)
        for stored in page.messages:
            after = stored.sequence
            if subjects.is_rewards(stored.subject):
                continue
            body = await bus.resolve(stored.data, stored.headers)
            record = codec.decode(body, GroupClosed, stored.headers.get(topology.Header.CONTENT_TYPE, codec.MSGPACK))
            closes.append(Close(stored.sequence, stored.subject, stored.headers, record))
        if not page.messages or not page.pending:
            return closes


async def read_posts(bus: Bus) -> list[StoredPost]:
    """Every post of rewards the trajectory stream holds, in order."""
    posts: list[StoredPost] = []
    after = 0
    while True:
        page = await read_after(bus, topology.TRAJECTORIES.name, subjects.TRAJECTORIES_ALL, after, 500)
        for stored in page.messages:
            after = stored.sequence
            if subjects.is_rewards(stored.subject):
                posts.append(StoredPost(after, codec.decode(stored.data, RewardsPosted).group_id))
        if not page.messages or not page.pending:
            return posts


async def gather(bus: Bus, blobs: Blobs, journal_files: Iterable[Path]) -> Evidence:
    lines: list[Line] = []
    for path in journal_files:
        lines += journals.read(path) if path.exists() else []
    closes, posts = await read_closes(bus), await read_posts(bus)
    state = (await bus.stream_info(topology.TRAJECTORIES.name)).state
    return Evidence(lines, closes, await read_archive(blobs), state.first_seq, state.last_seq, posts)


async def gather_archived(bus: Bus, blobs: Blobs, journal_files: Sequence[Path], timeout_s: float = 60) -> Evidence:
    """`gather`, once the manifests reach the end of the stream or `timeout_s` has passed."""
    deadline = time.monotonic() + timeout_s
    while True:
        evidence = await gather(bus, blobs, journal_files)
        covered = max((part.last_sequence for part in evidence.archive), default=0)
        if covered >= evidence.last_sequence or time.monotonic() > deadline:
            return evidence
        await asyncio.sleep(0.5)
