"""I1, I3: posted rewards lie between the closes of a run, disturb none of them, and are archived once each."""

from __future__ import annotations

import hashlib
import time

import pytest
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.columns import MANIFEST_PREFIX
from rollgrid_contracts.topology import Header
from rollgrid_contracts.trajectories import PostedReward, RewardsPosted
from rollgrid_runtime import archive_rewards
from rollgrid_runtime.archive import ArchiveReader, decode_manifest
from rollgrid_trajectory_logger import metrics

from .driver import RUN, TENANT, Driver, logger_in_process, make_job
from .test_archive import eventually, run_groups

Posts = list[tuple[int, RewardsPosted]]


async def post(driver: Driver, group_id: str, value: float, *, run: str = RUN, tenant: str = TENANT) -> int:
    """What ingest publishes for one posted reward; its sequence."""
    event = RewardsPosted(
        tenant=tenant,
        run=run,
        group_id=group_id,
        rewards=(PostedReward(index=0, value=value), PostedReward(index=1, name="steps", turn_values=(None, value))),
        posted_at=time.time(),
    )
    headers = {Header.GROUP.value: group_id}
    key = f"w{group_id}-{value}"
    return (await driver.bus.publish(subjects.run_rewards(tenant, run), event, msg_id=key, headers=headers)).sequence


async def archived_posts(driver: Driver) -> Posts:
    """Every post in the archive, by manifests alone; checks digests, rows and keys on the way."""
    found: Posts = []
    for key in await driver.blobs.keys(MANIFEST_PREFIX):
        rewards = decode_manifest(await driver.blobs.get(key) or b"").rewards
        if rewards is None:
            continue
        data = await driver.blobs.get(rewards.key) or b""
        assert (len(data), hashlib.sha256(data).hexdigest()) == (rewards.size, rewards.sha256)
        posts = archive_rewards.from_parquet(data)
        assert [(p.sequence, p.group_id) for p in rewards.posts] == [(seq, p.group_id) for seq, p in posts]
        assert [p.key for p in rewards.posts] == [f"w{p.group_id}-{p.rewards[0].value}" for _, p in posts]
        assert rewards.rows == sum(len(p.rewards) for _, p in posts)
        found += posts
    return found


def conflicts() -> float:
    return float(metrics.CONFLICTS._value.get())


async def test_i1_i3_posts_between_closes(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [make_job(position, n=2).group_id for position in range(60)]
    posted: list[int] = []
    before = conflicts()
    async with logger_in_process(stack_env, monkeypatch, archive_groups=16):
        for start in range(0, 60, 10):
            await run_groups(driver, range(start, start + 10))
            await driver.wait_closed(start + 10 + len(posted))
            posted += [await post(driver, groups[start], float(start)), await post(driver, groups[start], 0.5 + start)]
        closes = await driver.closes(subjects.trajectories(TENANT, RUN))
        assert {closed.group_id for _, closed in closes} == set(groups)
        assert conflicts() == before, "the compare-and-set of closes counts the closes' own subject only"
        assert await driver.wait_archived(60) == closes

        async def all_archived() -> bool:
            return [seq for seq, _ in await archived_posts(driver)] == posted

        await eventually(all_archived)
    # a new ledger reads both kinds, takes posts for no close, and appends behind them
    async with logger_in_process(stack_env, monkeypatch, archive_groups=16):
        answer = await driver.ask(group_ids=(groups[0], groups[59]))
        assert [group.closed_seq for group in answer.groups] == [closes[0][0], closes[59][0]]
        await run_groups(driver, range(60, 70))
        assert len(await driver.wait_archived(70)) == 70
    assert conflicts() == before


async def test_i3_i7_purged_posts_are_read_from_the_archive(
    driver: Driver, stack_env: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last post of a run stays as its last close does, so an empty stream says that there is nothing."""
    async with logger_in_process(stack_env, monkeypatch, archive_groups=8, retain_s=0.2):
        await run_groups(driver, range(5))
        group = make_job(0, n=2).group_id
        posted = [await post(driver, group, float(value)) for value in range(20)]
        foreign = await post(driver, group, 99.0, tenant="globex")
        await driver.wait_stored(topology.TRAJECTORIES.name, 3)  # the last close, the last posts of either tenant
        assert await driver.bus.last_stored(topology.TRAJECTORIES.name, subjects.run_rewards(TENANT, RUN)) is not None
        reader = ArchiveReader(driver.blobs)
        found: Posts = []
        after = 0
        while (page := await reader.rewards(TENANT, RUN, after, 6)).posts or page.more:
            found += page.posts
            after = page.read_to
        assert [seq for seq, _ in found] == posted
        assert [p.rewards[0].value for _, p in found] == list(range(20))
        assert [seq for seq, _ in (await reader.rewards("globex", RUN)).posts] == [foreign]
        assert (await reader.rewards(TENANT, "run-2")).posts == []
