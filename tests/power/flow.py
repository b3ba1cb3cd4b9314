"""The whole flow on a disk that loses its power: who uses it before, and who looks at it afterwards."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import sys
import threading
import time
from pathlib import Path

from rollgrid_contracts import subjects, topology
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import read_after

from tests.chaos import journal as journals
from tests.chaos.archive import read_archive
from tests.chaos.checker import Evidence, StoredPost
from tests.chaos.client import Load, StormClient
from tests.chaos.journal import Delivered
from tests.chaos.storm import Reader, connect
from tests.support.processes import Process
from tests.support.stack import Stack
from tests.support.waiting import wait_until

from . import witness as witnesses
from .loop_image import LoopDisk
from .verdict import After, Before

WRITERS = 6
N = 4
DEADLINE_S = 600.0
"""Of every group: no cut makes one expire."""

PAGE = 500


class Flow:
    """Clients, an iterator and a witness at a running stack.  A context manager: they end with it."""

    def __init__(self, pipe: Stack, seed: int) -> None:
        self.pipe, self.seed = pipe, seed
        self.run_name = f"power-{seed}"
        load = Load(deadline_s=DEADLINE_S)
        self.client = StormClient(pipe.url, self.run_name, pipe.folder / "client.jsonl", seed, load)
        self.delivered = pipe.folder / "reader.jsonl"
        self.reader = Reader(pipe, self.run_name, self.delivered)
        self.read = pipe.folder / "witness.jsonl"
        self.witness = Process(
            "witness",
            [sys.executable, "-m", "tests.power.witness", str(self.read)],
            pipe.folder / "logs" / "witness.log",
            {**os.environ, **pipe.environment()},
        )
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._submit, args=(f"w{number}",), daemon=True) for number in range(WRITERS)
        ]

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.reader.kill()
        self.witness.kill()
        if not any(thread.is_alive() for thread in self._threads):  # else they give up by themselves, and are daemons
            self.client.close()

    # -- before -----------------------------------------------------------------------------------------

    def run(self, seconds: float, *, purged: bool) -> None:
        """Flow for so long, and until a close, a manifest and (if `purged`) a purge have been seen."""
        self.witness.start()
        wait_until(self.read.exists, 60, "the witness")  # else what is purged early is never read
        self.reader.start()
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)  # the flow itself is what is cut: its length is no condition

        def shown() -> bool:
            seen = witnesses.read(self.read)
            return bool(seen.closes and seen.manifests and (seen.first > 1 or not purged))

        wait_until(shown, 60, "a first close, manifest and purge", every_s=0.25)

    def _submit(self, name: str) -> None:
        """Requests without a pause; one without an answer is sent again under its key, over the cut."""
        draw = random.Random(f"{self.seed}-{name}")
        number = 0
        while not self._stop.is_set():
            number += 1
            key = f"{name}-{number}"
            scorers = [{"type": "exact_match", "name": "exact"}] if draw.random() < 0.5 else []
            if draw.random() < 0.2:
                self.client.ask(key, 2)
                continue
            accepted = self.client.submit(key, draw.randint(1, 7), N, scorers=scorers)
            if accepted is not None and draw.random() < 0.05:
                self.client.cancel(*accepted)

    # -- the cut ----------------------------------------------------------------------------------------

    def cut(self, disk: LoopDisk) -> Before:
        """The power fails.  Returns what the outside knew; nothing runs any more."""
        servers = (self.pipe.nats, self.pipe.weed)
        for server in servers:
            server.pause()
        for server in servers:
            wait_until(functools.partial(stopped, server.pid), 30, f"{server.name} to stop", every_s=0.001)
        disk.copy()
        for process in (self.witness, self.reader):
            process.kill()
        lines = journals.read(self.delivered) if self.delivered.exists() else []
        before = Before(
            dict(self.client.accepted_groups),
            [line for line in lines if isinstance(line, Delivered)],
            witnesses.read(self.read),
        )
        self._stop.set()
        self.pipe.kill()
        return before

    # -- after ------------------------------------------------------------------------------------------

    def servers_on(self, disk: LoopDisk) -> After:
        """The power is back, for the servers alone: what the disk had, before anybody works on it."""
        disk.mount_copy()
        self.pipe.start_servers()
        return asyncio.run(self._look(held=True))

    def finish(self, timeout_s: float) -> After:
        """The services too: requests get their answers, the iterator goes on, everything accepted closes.

        It does not raise when something is missing after `timeout_s`: the verdict says what.
        """
        self.pipe.heal()
        self.reader.start()
        give_up = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
        return asyncio.run(self._settled(give_up))

    async def _settled(self, give_up: float) -> After:
        bus, blobs = await connect(self.pipe)
        try:
            while not await self._is_settled(bus) and time.monotonic() < give_up:
                await asyncio.sleep(0.25)
            while True:
                found = await look(bus, blobs, [self.client.path, self.delivered], held=False)
                covered = max((part.last_sequence for part in found.evidence.archive), default=0)
                if covered >= found.evidence.last_sequence or time.monotonic() > give_up:
                    return found
                await asyncio.sleep(0.25)
        finally:
            await bus.close()
            blobs.close()

    async def _is_settled(self, bus: Bus) -> bool:
        """Whether the iterator has had everything, and no job is held."""
        delivered = {line.group_id for line in journals.read(self.delivered) if isinstance(line, Delivered)}
        jobs = int((await bus.stream_info(topology.JOBS.name)).state.messages)
        return set(self.client.accepted_groups) <= delivered and not jobs

    async def _look(self, *, held: bool) -> After:
        bus, blobs = await connect(self.pipe)
        try:
            return await look(bus, blobs, [self.client.path, self.delivered], held=held)
        finally:
            await bus.close()
            blobs.close()


async def look(bus: Bus, blobs: Blobs, files: list[Path], *, held: bool) -> After:
    """Everything there is to see.  A stream or bucket that is gone holds nothing."""
    await blobs.ensure_bucket()
    names = await streams(bus)
    stored: dict[int, witnesses.ReadClose] = {}
    first, last = 1, 0
    if topology.TRAJECTORIES.name in names:
        stored = {close.sequence: close for close in await witnesses.stream_closes(bus)}
        state = (await bus.stream_info(topology.TRAJECTORIES.name)).state
        first, last = int(state.first_seq), int(state.last_seq)
    jobs = await held_jobs(bus) if topology.JOBS.name in names else frozenset()
    lines = [line for path in files if path.exists() for line in journals.read(path)]
    closes = [close.close() for close in stored.values() if not subjects.is_rewards(close.subject)]
    posts = [StoredPost(post.sequence, post.group_id) for post in stored.values() if subjects.is_rewards(post.subject)]
    evidence = Evidence(lines, closes, await read_archive(blobs), first, last, posts)
    return After(evidence, stored, await witnesses.new_manifests(blobs, {}), jobs if held else None)


async def streams(bus: Bus) -> set[str]:
    infos = await bus.js.streams_info()
    return {str(info.config.name) for info in infos}


async def held_jobs(bus: Bus) -> frozenset[str]:
    """Groups that RG_JOBS holds; read without a consumer, which would be one more interest."""
    groups: set[str] = set()
    after = 0
    while True:
        page = await read_after(bus, topology.JOBS.name, subjects.JOBS_ALL, after, PAGE)
        groups |= {stored.headers[topology.Header.GROUP.value] for stored in page.messages}
        if not page.messages or not page.pending:
            return frozenset(groups)
        after = page.messages[-1].sequence


def stopped(pid: int) -> bool:
    """Whether SIGSTOP has taken hold of every thread: one inside a write or a flush ends that first."""
    states = [task.read_text().rpartition(")")[2].split()[0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    return bool(states) and set(states) == {"T"}
