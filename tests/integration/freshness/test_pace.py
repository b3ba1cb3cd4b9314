"""A39, A40: a paced run samples ahead of its training as far as its bound and no further; nothing is thrown away."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest
from rollgrid import Client, DeadlineExceeded, NatsClient
from rollgrid.client import Batch
from rollgrid.results import Group
from rollgrid.weights_live import live_on
from rollgrid_contracts.fleet import PacedBatch, RunPace
from rollgrid_contracts.ids import new_key
from rollgrid_contracts.topology import RUNS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table

from tests.support.stack import Stack
from tests.support.waiting import wait_until

from .conftest import SECOND, Trainer

BATCH, N, SLOW, FAST = 4, 2, 320, 8
LENGTHS = (SLOW, FAST, FAST, FAST)
"""One slow task in each batch: eight tenths of a second among those that take none."""


def step_of(client: Client, run: str, step: int, bound: int, **options: Any) -> Batch:
    tasks = [{"prompt": f"{step}/{at}", "sampling": {"max_tokens": length}} for at, length in enumerate(LENGTHS)]
    return client.submit(
        tasks, n=N, sampling={"max_tokens": FAST}, run=run, policy=SECOND, idempotency_key=f"{run}-{step}-{options}",
        pace={"batch": BATCH, "max_staleness": bound}, **options,
    )  # fmt: skip


class Ahead(threading.Thread):
    """Submits the steps of a run one behind the other, as fast as it may."""

    def __init__(self, client: Client, run: str, steps: range, bound: int) -> None:
        super().__init__()
        self.client, self.run_name, self.steps, self.bound = client, run, steps, bound
        self.batches: dict[int, Batch] = {}
        self.failed: BaseException | None = None
        self.news = threading.Condition()

    def run(self) -> None:
        try:
            for step in self.steps:
                batch = step_of(self.client, self.run_name, step, self.bound)
                with self.news:
                    self.batches[step] = batch
                    self.news.notify_all()
        except BaseException as error:
            self.failed = error

    def batch(self, step: int) -> Batch:
        with self.news:
            assert self.news.wait_for(lambda: step in self.batches or self.failed is not None, 60), step
        assert self.failed is None, self.failed
        return self.batches[step]


def live(client: Client, trainer: Trainer) -> int:
    """A version that runs everywhere, with nothing behind it."""
    version = trainer.full()
    wait_until(lambda: live_on(client.policy(SECOND), version), 60, f"{SECOND}@{version} live")
    return version


def in_order(batch: Batch) -> list[Group]:
    return sorted(batch.groups(timeout=60), key=lambda group: group.position)


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_staleness_keeps_its_bound_and_slow_tasks_are_not_starved(client: Client, trainer: Trainer, bound: int) -> None:
    run, steps = f"paced-{bound}-{new_key()[:6]}", bound + 3
    versions = [live(client, trainer)]
    first = [step_of(client, run, step, bound) for step in range(bound + 1)]  # as far as it may run ahead
    with pytest.raises(DeadlineExceeded):
        step_of(client, run, bound + 1, bound, deadline_s=0.5)
    ahead = Ahead(client, run, range(bound + 1, steps), bound)
    ahead.start()
    stale: list[int] = []
    delivered: list[int] = []
    for step in range(steps):
        groups = in_order(first[step] if step <= bound else ahead.batch(step))
        assert [group.position for group in groups] == list(range(BATCH))
        for group in groups:
            assert all(sample.ok for sample in group), [sample.error for sample in group]
            delivered += [len(sample) for sample in group]
            stale.append(len(versions) - 1 - versions.index(min(group.versions)))
        versions.append(trainer.full())
    ahead.join(30)
    assert max(stale) <= bound, stale
    # an asynchronous trainer really has samples that are as old as it bears, and nobody's were dropped
    assert max(stale) == bound, stale
    assert sorted(delivered) == sorted(length for length in LENGTHS * steps for _ in range(N))


async def test_a_batch_that_was_counted_and_never_became_jobs_gives_its_places_back(
    pipe: Stack, client: Client, trainer: Trainer
) -> None:
    """A39: its client died between the count and the jobs; a synchronous run would stand still for ever."""
    run, version = f"ghost-{new_key()[:6]}", await asyncio.to_thread(live, client, trainer)
    ghost = PacedBatch(batch_id="batch-of-nobody", groups=BATCH, at=time.time() - 100)
    pace = RunPace(
        policy=SECOND, batch=BATCH, max_staleness=0, first_version=version, version=version, admitted=BATCH,
        recent=(ghost,),
    )  # fmt: skip
    bus = await Bus.connect(pipe.nats.settings(), "test", None)
    try:
        table = Table(bus, RUNS, RunPace)
        await table.create(f"local.{run}", pace)
        batch = await asyncio.to_thread(step_of, client, run, 0, 0)
        found = await table.get(f"local.{run}")
    finally:
        await bus.close()
    assert len(await asyncio.to_thread(in_order, batch)) == BATCH
    assert found is not None
    assert (found.value.admitted, [item.groups for item in found.value.recent]) == (BATCH, [0, BATCH])


async def test_the_queue_door_keeps_the_pace_without_dropping(pipe: Stack, client: Client, trainer: Trainer) -> None:
    run = f"queued-{new_key()[:6]}"
    pace = {"batch": 2, "max_staleness": 0}
    fields: dict[str, Any] = {"n": 1, "sampling": {"max_tokens": 4}, "run": run, "policy": SECOND, "pace": pace}
    nats = pipe.nats
    async with NatsClient(nats.url, tenant="local", user=nats.user, password=nats.password) as queue:
        version = await asyncio.to_thread(live, client, trainer)
        now = await queue.submit(["a", "b"], **fields)
        ahead = await queue.submit(["c", "d"], **fields)
        late = await queue.submit(["e", "f"], deadline_s=3, **fields)
        async for group in queue.groups(now, timeout=60):
            assert group.versions == (version,)
        refused = [group async for group in queue.groups(late, timeout=60)]
        codes = {sample.error.code.value for group in refused for sample in group if sample.error is not None}
        assert codes == {"paced"}
        version = await asyncio.to_thread(trainer.full)
        done = [group async for group in queue.groups(ahead, timeout=60)]
    assert [group.versions for group in done] == [(version,)] * 2
    assert json.loads(json.dumps(done[0].to_dict()))["weights"] == {"rule": "min_version", "value": version}
