"""I11: accepted work, closed groups and manifested archives survive a power cut of the real flow.

The stores of NATS and S3 lie on a loop image.  In full flow the servers are stopped, the image is
copied, everything is killed, and the same stack is started on the copy: first the servers alone, to
see what the disk had, then the services, which must end what was open.

`ROLLGRID_POWER_RUNS` makes more cuts (1), in turns with and without purging; `ROLLGRID_POWER_SEED`
repeats the draws of one; `ROLLGRID_POWER_CONTROL=1` adds the cut of servers that do not flush.
"""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.chaos.checker import check
from tests.support.stack import Stack, StackPlan, scripted, stack

from .flow import Flow
from .loop_image import LoopDisk, loop_disk, unavailable
from .verdict import Before, figures, report, survived, undelivered

RUNS = int(os.environ.get("ROLLGRID_POWER_RUNS", "1"))
CONTROL = os.environ.get("ROLLGRID_POWER_CONTROL") == "1"
DISK_MB = 3000
QUIET_S = 120.0
"""Everything accepted must have closed and been archived so long after the power is back."""

PURGING = {
    # closes are archived and purged while the flow runs, so that the order of both is put to the test
    "ROLLGRID_NATS_TRAJECTORIES_MAX_BYTES": str(3 * 2**20),
    "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_SHARE": "0.1",
    "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "0.5",
}
KEEPING = {"ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.5"}

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


@pytest.mark.timeout(500)
@pytest.mark.parametrize("run", range(RUNS))
def test_i11_a_power_cut_loses_nothing_that_was_acknowledged(run: int) -> None:
    purging = run % 2 == 0
    with loop_disk(DISK_MB) as disk, stack(on_disk(disk, KEEPING | (PURGING if purging else {}))) as pipe:
        with flowing(pipe, run) as flow:
            before = cut_in_flow(flow, disk, purged=purging)
            copy = flow.servers_on(disk)
            lost = survived(before, copy)
            say(f"{figures(before, copy, lost)}")
            after = flow.finish(QUIET_S)
            violations = [*lost, *survived(before, after), *check(after.evidence), *undelivered(after.evidence)]
            say(f"in the end {len(flow.client.accepted_groups)} groups, {after.evidence.last_sequence} closes")
            assert not flow.client.unanswered
            assert not violations, report(violations) + pipe.logs()


@pytest.mark.skipif(not CONTROL, reason="the control of the test above: ROLLGRID_POWER_CONTROL=1")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("careless", ["nats", "s3"])
def test_servers_that_do_not_flush_are_found_out(careless: str) -> None:
    with loop_disk(DISK_MB) as disk:
        plan = on_disk(disk, KEEPING)
        plan = plan._replace(nats_sync="2m") if careless == "nats" else plan._replace(weed_durable=False)
        with stack(plan) as pipe, flowing(pipe, 0) as flow:
            before = cut_in_flow(flow, disk, purged=False)
            copy = flow.servers_on(disk)
            lost = survived(before, copy)
            say(f"{careless} without flushing: {figures(before, copy, lost)}")
            assert lost


def on_disk(disk: LoopDisk, env: dict[str, str]) -> StackPlan:
    return scripted(
        samplers=2,
        token_rate=400,
        ack_wait_s=3.0,
        nats_store=disk.mount_point / "js",
        weed_data=disk.mount_point / "s3",
        weed_durable=True,
        env=env,
    )


def flowing(pipe: Stack, run: int) -> Flow:
    given = os.environ.get("ROLLGRID_POWER_SEED")
    seed = int(given) + run if given else random.SystemRandom().randrange(10**6)
    say(f"ROLLGRID_POWER_SEED={seed - run} run {run}")
    return Flow(pipe, seed)


def cut_in_flow(flow: Flow, disk: LoopDisk, *, purged: bool) -> Before:
    """A cut at a drawn moment, which must have found something of everything."""
    flow.run(random.Random(flow.seed).uniform(5.0, 9.0), purged=purged)
    before = flow.cut(disk)
    assert len(before.accepted) > 20
    assert set(before.accepted) - before.closed, "nothing was in flight"
    assert before.delivered
    return before


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
