"""I11: accepted work, closed groups and manifested archives survive a power cut of the real flow.

The stores of NATS and S3 lie on a loop image.  In full flow the servers are stopped, the image is
copied, everything is killed, and the same stack is started on the copy: everything the client had
been told must be there, and whatever was open goes on.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time

import pytest
from botocore.exceptions import BotoCoreError, ClientError
from rollgrid_contracts.columns import MANIFEST_PREFIX

from tests.chaos import journal as journals
from tests.chaos.checker import Evidence, Violation, check
from tests.chaos.client import Load, StormClient
from tests.chaos.evidence import gather
from tests.chaos.journal import Delivered
from tests.chaos.storm import Reader, connect, wait_closed
from tests.power.loop_image import LoopDisk, loop_disk, unavailable
from tests.support.stack import Stack, scripted, stack
from tests.support.waiting import wait_until

FLOW_S = 8.0
DEADLINE_S = 600.0
BOUNDS = {
    # closes are archived and purged while the flow runs, so that the order of both is put to the test
    "ROLLGRID_NATS_TRAJECTORIES_MAX_BYTES": str(3 * 2**20),
    "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_SHARE": "0.2",
    "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "1",
    "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "1",
}

pytestmark = [pytest.mark.power, pytest.mark.slow]


@pytest.fixture(scope="module", autouse=True)
def _loop_images() -> None:
    why = unavailable()
    if why is not None:
        pytest.skip(why)


def test_the_cut_is_real() -> None:
    """What was not flushed is gone, what was is there: else the other test would prove nothing."""
    with loop_disk(64) as disk:
        flushed, cached = disk.mount_point / "flushed", disk.mount_point / "cached"
        with flushed.open("wb") as out:
            out.write(b"x" * 100_000)
            out.flush()
            os.fsync(out.fileno())
        cached.write_bytes(b"y" * 100_000)
        disk.copy()
        disk.mount_copy()
        assert flushed.read_bytes() == b"x" * 100_000
        assert not cached.exists() or cached.read_bytes() != b"y" * 100_000


@pytest.mark.timeout(400)
@pytest.mark.parametrize("cut", range(2))
def test_i11_a_power_cut_loses_nothing_that_was_acknowledged(cut: int) -> None:
    with loop_disk(3000) as disk:
        plan = scripted(
            samplers=1,
            token_rate=400,
            ack_wait_s=3.0,
            nats_store=disk.mount_point / "js",
            weed_data=disk.mount_point / "s3",
            weed_durable=True,
            env=BOUNDS,
        )
        with stack(plan) as pipe:
            flow = Flow(pipe, cut)
            flow.run(FLOW_S + cut)
            accepted, delivered, manifests = flow.cut(disk)
            disk.mount_copy()
            pipe.start()
            evidence = asyncio.run(flow.after())
            print(
                f"{len(accepted)} groups accepted, {len(delivered)} delivered, {len(manifests)} manifests seen before "
                f"the cut; stream now {evidence.first_sequence}-{evidence.last_sequence}",
                file=sys.stderr,
            )
            assert len(accepted) > 20
            assert delivered
            assert manifests
            violations = [*check(evidence), *lost_closes(evidence, delivered), *lost_manifests(evidence, manifests)]
            assert not violations, "\n".join(map(str, violations)) + pipe.logs()


class Flow:
    """A client, an iterator and a watcher of manifests against a stack that will lose its power."""

    def __init__(self, pipe: Stack, seed: int) -> None:
        self.pipe = pipe
        self.run_name = f"power-{seed}"
        load = Load(samples=100_000, over_s=600, deadline_s=DEADLINE_S, cancelled=0.05, workers=8)
        self.client = StormClient(pipe.url, self.run_name, pipe.folder / "client.jsonl", seed, load)
        self.seen = pipe.folder / "reader.jsonl"
        self.reader = Reader(pipe, self.run_name, self.seen)
        self._stop = threading.Event()
        self._manifests: set[str] = set()
        self._threads = [
            *(threading.Thread(target=self._submit, args=(f"w{number}",), daemon=True) for number in range(6)),
            threading.Thread(target=self._watch_manifests, daemon=True),
        ]

    def run(self, seconds: float) -> None:
        self.reader.start()
        for thread in self._threads:
            thread.start()
        time.sleep(seconds)  # the flow itself is what is cut: its length is no condition
        wait_until(lambda: bool(self._manifests), 30, "a first manifest")

    def _submit(self, name: str) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            scorers = [{"type": "exact_match", "name": "exact"}] if number % 2 else []
            if number % 5:
                self.client.submit(f"{name}-{number}", 1 + number % 7, 4, scorers=scorers)
            else:
                self.client.ask(f"{name}-{number}", 2)

    def _watch_manifests(self) -> None:
        client = self.pipe.weed.new_client()
        while not self._stop.is_set():
            try:
                answer = client.list_objects_v2(Bucket=self.pipe.bucket, Prefix=MANIFEST_PREFIX)
            except (BotoCoreError, ClientError):
                return  # the power is gone
            self._manifests |= {item["Key"] for item in answer.get("Contents", [])}

    def cut(self, disk: LoopDisk) -> tuple[dict[str, int], list[Delivered], set[str]]:
        """The power fails.  What the outside knew at that moment: accepted groups, delivered closes, manifests."""
        for server in (self.pipe.nats, self.pipe.weed):
            server.pause()
        disk.copy()
        self.reader.kill()
        delivered = [line for line in journals.read(self.seen) if isinstance(line, Delivered)]
        accepted, manifests = dict(self.client.accepted_groups), set(self._manifests)
        self._stop.set()  # requests without an answer are retried under their keys until the power is back
        self.pipe.kill()
        return accepted, delivered, manifests

    async def after(self) -> Evidence:
        """The power is back: the client gets its answers, the iterator goes on, everything ends."""
        self.reader.start()
        for thread in self._threads:
            await asyncio.to_thread(thread.join, 120)
        await wait_closed(self.pipe, self.client, 90, by_archive=True)
        bus, blobs = await connect(self.pipe)
        try:
            give_up = time.monotonic() + 60
            while True:
                evidence = await gather(bus, blobs, [self.client.path, self.seen])
                covered = max((part.last_sequence for part in evidence.archive), default=0)
                delivered = {line.group_id for line in evidence.journal if isinstance(line, Delivered)}
                if covered >= evidence.last_sequence and set(self.client.accepted_groups) <= delivered:
                    return evidence
                if time.monotonic() > give_up:
                    return evidence
                await asyncio.sleep(0.5)
        finally:
            await bus.close()
            blobs.close()
            self.reader.kill()
            self.client.close()


def lost_closes(evidence: Evidence, delivered: list[Delivered]) -> list[Violation]:
    """A close a trainer has read is where it was, in the stream or in the archive."""
    there = {close.sequence: close.record.group_id for close in evidence.closes}
    for part in evidence.archive:
        there |= {group.sequence: group.group_id for group in part.groups}
    return [
        Violation("I11", line.group_id, f"was read at {line.cursor} and is {there.get(line.cursor)} now")
        for line in delivered
        if there.get(line.cursor) != line.group_id
    ]


def lost_manifests(evidence: Evidence, manifests: set[str]) -> list[Violation]:
    there = {part.manifest for part in evidence.archive}
    return [Violation("I11", key, "was listed before the cut and is gone") for key in sorted(manifests - there)]
