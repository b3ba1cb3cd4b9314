"""One storm from start to verdict: a stack, a client, a killable reader, a seed's faults, and the checker."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from rollgrid_contracts import topology
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus

from tests.support.processes import Process
from tests.support.stack import Stack, StackPlan, stack

from . import journal as journals
from .archive import read_archive
from .checker import Evidence, Expectation, Violation, check
from .client import Load, StormClient
from .evidence import gather, read_closes
from .faults import Fault, Storm, deck, tapped
from .journal import Accepted, Delivered
from .refresher import Refresher, digests
from .sessions import play_sessions
from .truth import tokens_are_of_their_versions

QUIET_S = 60.0
"""I10: within so long after the last fault everything accepted has closed."""

ARCHIVE_S = 60.0


class Outcome(NamedTuple):
    evidence: Evidence
    violations: list[Violation]
    jobs_left: int
    faults: int
    quiet_after_s: float
    story: list[str]
    versions: frozenset[int] = frozenset()
    """Those that made tokens, where weights were refreshed."""

    def report(self) -> str:
        accepted = {g: line.n for line in self.evidence.journal if isinstance(line, Accepted) for g in line.group_ids}
        turns = sum(len(entry.turns) for close in self.evidence.closes for entry in close.record.entries)
        lines = [
            f"{turns} turns of sessions; {len(accepted)} groups, {sum(accepted.values())} samples accepted; {len(self.evidence.closes)} closes, "
            f"{len(self.evidence.archive)} manifests; {self.faults} faults; quiet {self.quiet_after_s:.1f} s after the last; "
            f"{self.jobs_left} jobs left",
            *self.story,
            *(f"VIOLATION {violation}" for violation in self.violations[:40]),
        ]
        return "\n".join(lines)


class Reader(Process):
    """The trainer's iterator, killed and started again under the same journal."""

    def __init__(self, pipe: Stack, run: str, journal: Path) -> None:
        argv = [sys.executable, "-m", "tests.chaos.reader", pipe.url, run, str(journal)]
        super().__init__("reader", argv, pipe.folder / "logs" / "reader.log")

    def strike(self) -> None:
        self.kill()
        self.start()


def run_storm(
    plan: StackPlan,
    load: Load,
    seed: int,
    *,
    pause_s: tuple[float, float] = (0.3, 2.0),
    faults: Iterator[Fault] | None = None,
    expect: Expectation | None = None,
    refresh_every_s: float | None = None,
) -> Outcome:
    """Everything the seed decides is decided here; the interleaving is the machine's.

    `pause_s` are the shortest and longest time between two faults.  With `refresh_every_s` new weights are
    published all the time, and every token is checked against those that its version names (scripted engine).
    """
    draw = random.Random(seed)
    story: list[str] = [f"seed {seed}"]
    began = time.monotonic()

    def say(text: str) -> None:
        story.append(f"{time.monotonic() - began:7.2f} {text}")
        print(story[-1], file=sys.stderr, flush=True)

    with stack(plan) as pipe, tapped(pipe.nats) as tap:
        say("the stack is up")
        run = f"storm-{seed}"
        journal, seen = pipe.folder / "client.jsonl", pipe.folder / "reader.jsonl"
        client = StormClient(pipe.url, run, journal, draw.randrange(2**32), load)
        reader = Reader(pipe, run, seen)
        reader.start()
        stop = threading.Event()
        player = threading.Thread(target=client.play, args=("k", stop), daemon=True)
        environments = threading.Thread(target=play_sessions, args=(client, draw.randrange(2**32), stop), daemon=True)
        refresher = Refresher(pipe, refresh_every_s) if refresh_every_s else None
        over = threading.Event()
        if refresher is not None:
            threading.Thread(target=refresher.play, args=(over,), daemon=True).start()
        storm = Storm(pipe, tap, say)
        storm.extra["reader"] = reader.strike
        cards = faults or itertools.chain.from_iterable(
            iter(lambda: deck(plan.samplers, plan.loggers, plan.ack_wait_s, draw), None)
        )
        try:
            player.start()
            environments.start()
            storm.play(cards, time.monotonic() + load.over_s, lambda: draw.uniform(*pause_s))
            over.set()
            pipe.heal()
            healed = time.monotonic()
            say("the storm is over; everything runs")
            player.join(load.deadline_s + QUIET_S)
            environments.join(load.deadline_s + QUIET_S)
            asyncio.run(wait_closed(pipe, client, max(QUIET_S, load.deadline_s)))
            quiet_after_s = time.monotonic() - healed
            say("everything accepted has closed")
            evidence, jobs_left = asyncio.run(_settle(pipe, [journal, seen]))
            violations = check(evidence, expect)
            versions: frozenset[int] = frozenset()
            if refresher is not None:
                violations += tokens_are_of_their_versions(evidence.closes, asyncio.run(_digests(pipe)))
                versions = versions_of(evidence)
                say(f"published {refresher.published}, failed {refresher.failures}; tokens of {sorted(versions)}")
            violations += [Violation("I1", key, "no verdict of the door ever came") for key in client.unanswered]
            violations += [Violation("client", "", what) for what in client.broken]
            if jobs_left:
                violations.append(Violation("clean", "RG_JOBS", f"{jobs_left} jobs are left over"))
            pipe.kill()
            violations += [Violation("orphan", "", what) for what in orphans(pipe, within_s=2.0)]
            return Outcome(evidence, violations, jobs_left, storm.played, quiet_after_s, story, versions)
        except BaseException:
            print(pipe.logs(), file=sys.stderr)
            raise
        finally:
            stop.set()
            over.set()
            reader.kill()
            client.close()


def versions_of(evidence: Evidence) -> frozenset[int]:
    entries = [entry for close in evidence.closes for entry in close.record.entries]
    return frozenset(version for entry in entries for version in entry.versions)


async def _digests(pipe: Stack) -> dict[int, bytes]:
    blobs = Blobs(pipe.weed.settings(pipe.bucket))
    try:
        return await digests(pipe, blobs)
    finally:
        blobs.close()


def orphans(pipe: Stack, within_s: float) -> list[str]:
    """Processes of the stack's services that live on after their leaders were killed (engines, verifiers)."""
    deadline = time.monotonic() + within_s
    while True:
        left = [process for process in psutil.process_iter() if _of_stack(process, pipe.bucket)]
        if not left or time.monotonic() > deadline:
            return [f"{process.pid} {' '.join(process.cmdline())[:120]}" for process in left]
        time.sleep(0.1)


def _of_stack(process: psutil.Process, bucket: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get("ROLLGRID_S3_BUCKET") == bucket
    except psutil.Error:
        return False


async def connect(pipe: Stack) -> tuple[Bus, Blobs]:
    blobs = Blobs(pipe.weed.settings(pipe.bucket))
    bus = await Bus.connect(pipe.nats.settings(), "checker", blobs)
    return bus, blobs


async def wait_closed(pipe: Stack, client: StormClient, timeout_s: float, *, by_archive: bool = False) -> None:
    """Until every accepted group is closed.  It does not raise: the checker says what is missing.

    `by_archive`: closes that were purged from the stream count by their manifests.
    """
    bus, blobs = await connect(pipe)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        closed = {close.record.group_id for close in await read_closes(bus)}
        if by_archive:
            closed |= {group.group_id for part in await read_archive(blobs) for group in part.groups}
        if set(client.accepted_groups) <= closed:
            break
        await asyncio.sleep(0.5)
    await bus.close()
    blobs.close()


async def _settle(pipe: Stack, files: list[Path]) -> tuple[Evidence, int]:
    """Wait for the archive, the reader and the jobs' acks to catch up, then gather."""
    bus, blobs = await connect(pipe)
    deadline = time.monotonic() + ARCHIVE_S
    while True:
        evidence = await gather(bus, blobs, files)
        jobs_left = (await bus.stream_info(topology.JOBS.name)).state.messages
        covered = max((part.last_sequence for part in evidence.archive), default=0)
        delivered = {line.group_id for line in journals.read(files[1]) if isinstance(line, Delivered)}
        wanted = {close.record.group_id for close in evidence.closes}
        caught_up = covered >= evidence.last_sequence and wanted <= delivered and not jobs_left
        if caught_up or time.monotonic() > deadline:
            await bus.close()
            blobs.close()
            return evidence, jobs_left
        await asyncio.sleep(0.5)
