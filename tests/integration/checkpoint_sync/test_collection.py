"""Garbage collection on real S3, KV and a real ledger: what is needed stays, the rest goes, crashes are repaired."""

from __future__ import annotations

import time

import msgspec
import pytest
from rollgrid_checkpoint_sync.collector import Collector
from rollgrid_contracts import codec, topology
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    REFUSED_NAME,
    UPLOAD_NAME,
    AdoptedVersion,
    CheckpointKind,
    CheckpointManifest,
    FileInfo,
    Pin,
    PolicyState,
    Upload,
    pin_key,
    upload_root,
    version_root,
)
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import encode_manifest
from rollgrid_weights.rollback import roll_back

from tests.integration.trajectory_logger.driver import Driver, logger_in_process, make_job
from tests.support.policies import policy_state

KEY, DAY_S = "shared.tiny", 24 * 3600.0
STATE = policy_state(policy="tiny")


@pytest.fixture
def table(bus: Bus) -> Table[PolicyState]:
    return Table(bus, topology.POLICIES, PolicyState)


@pytest.fixture
def pins(bus: Bus) -> Table[Pin]:
    return Table(bus, topology.PINS, Pin)


def collector(bus: Bus, table: Table[PolicyState], blobs: Blobs, *, keep: int = 2, ttl_s: float = DAY_S) -> Collector:
    return Collector(bus, table, blobs, keep_versions=keep, upload_ttl_s=ttl_s)


async def published(blobs: Blobs, number: int, base: int = 0) -> AdoptedVersion:
    root = version_root("shared", "tiny", number)
    kind = CheckpointKind.LORA if base else CheckpointKind.FULL
    manifest = CheckpointManifest(
        tenant="shared",
        policy="tiny",
        version=number,
        kind=kind,
        base_version=base or None,
        files=(FileInfo(name="model.safetensors", size=3, sha256="00"),),
        prefix=f"{root}up/",
        created_at=1.0,
    )
    await blobs.put(f"{root}up/model.safetensors", b"abc")
    await blobs.put(root + MANIFEST_NAME, encode_manifest(manifest))
    return AdoptedVersion(version=number, kind=kind, base_version=base, prefix=f"{root}up/", committed_at=1.0)


async def adopted(table: Table[PolicyState], blobs: Blobs, count: int, *, bases: dict[int, int] | None = None) -> None:
    """A policy that has adopted versions 1 to `count`."""
    versions = [await published(blobs, number, (bases or {}).get(number, 0)) for number in range(1, count + 1)]
    state = msgspec.structs.replace(
        STATE,
        desired=count,
        desired_prefix=versions[-1].prefix,
        newest=count,
        history=tuple(range(count + 1)),
        versions=tuple(versions),
        newest_at=1.0,
    )
    await table.create(KEY, state)


async def listed(table: Table[PolicyState]) -> list[int]:
    found = await table.get(KEY)
    assert found is not None
    return [one.version for one in found.value.versions]


async def stored(blobs: Blobs) -> set[int]:
    """Versions of which any object is left."""
    return {int(key.split("/")[3]) for key in await blobs.keys("checkpoints/shared/tiny/") if "/uploads/" not in key}


def worker(*loaded: LoadedVersion) -> WorkerState:
    return WorkerState(
        worker="w-1", incarnation="w-1/a", pool="pool", engine="scripted", device="cpu", slots=1, loaded=loaded
    )


async def test_what_is_needed_stays_and_the_rest_goes(
    bus: Bus, blobs: Blobs, table: Table[PolicyState], pins: Table[Pin]
) -> None:
    await adopted(table, blobs, 9, bases={3: 2})
    await blobs.put(version_root("shared", "tiny", 1) + REFUSED_NAME, b"{}")
    await pins.put(pin_key("shared", "tiny", 3, "batch"), Pin(until=time.time() + 600))
    await pins.put(pin_key("shared", "tiny", 4, "batch"), Pin(until=time.time() - 1))
    await pins.put(pin_key("shared", "other", 6, "batch"), Pin(until=time.time() + 600))
    loaded = LoadedVersion(policy="tiny", version=5), LoadedVersion(policy="other", version=6)
    await Table(bus, topology.WORKERS, WorkerState).put("w-1", worker(*loaded))
    await collector(bus, table, blobs).collect(KEY)
    assert await listed(table) == [2, 3, 5, 8, 9], "the adapter's base with it, what a worker has, the newest two"
    assert await stored(blobs) == {1, 2, 3, 5, 8, 9}
    assert await blobs.keys(version_root("shared", "tiny", 1)) == [version_root("shared", "tiny", 1) + REFUSED_NAME]
    assert set(await pins.items()) == {"shared.tiny.3.batch", "shared.other.6.batch"}
    assert len(await pins.keys()) == 2, "ended pins leave nothing behind"
    state = await table.get(KEY)
    assert state is not None
    with pytest.raises(WeightsError) as caught:
        roll_back(state.value, 4)
    assert caught.value.code is ErrorCode.VERSION_GONE
    revision = state.revision
    await collector(bus, table, blobs).collect(KEY)
    again = await table.get(KEY)
    assert again is not None
    assert again.revision == revision, "with nothing to do nothing is written"


async def test_the_next_round_repairs_what_a_crash_left(bus: Bus, blobs: Blobs, table: Table[PolicyState]) -> None:
    await adopted(table, blobs, 5)
    found = await table.get(KEY)
    assert found is not None
    state = found.value
    going = tuple(msgspec.structs.replace(one, going=one.version < 3) for one in state.versions[1:])
    await table.update(KEY, msgspec.structs.replace(state, versions=going), found.revision)  # 1 trimmed, 2 marked
    await blobs.delete(version_root("shared", "tiny", 1) + MANIFEST_NAME)
    await collector(bus, table, blobs, keep=3).collect(KEY)
    assert await listed(table) == [3, 4, 5]
    assert await stored(blobs) == {3, 4, 5}


async def test_undecided_and_young_objects_are_left_alone(bus: Bus, blobs: Blobs, table: Table[PolicyState]) -> None:
    await adopted(table, blobs, 1)
    await published(blobs, 7)
    await blobs.put(version_root("shared", "tiny", 8) + "up/model.safetensors", b"being copied")
    for name, expires_at in (("dead", 1.0), ("alive", time.time() + 600)):
        root = upload_root("shared", "tiny", name)
        upload = Upload(tenant="shared", policy="tiny", upload=name, kind=CheckpointKind.FULL, expires_at=expires_at)
        await blobs.put(root + UPLOAD_NAME, codec.encode(upload, codec.JSON))
        await blobs.put(root + "files/model.safetensors", b"abc")
    await collector(bus, table, blobs).collect(KEY)
    assert await stored(blobs) == {1, 7, 8}
    assert len(await blobs.keys("checkpoints/shared/tiny/uploads/")) == 4
    await collector(bus, table, blobs, ttl_s=-5).collect(KEY)
    assert await stored(blobs) == {1, 7}, "what is published waits for its verdict, however old"
    left = await blobs.keys("checkpoints/shared/tiny/uploads/")
    assert {key.split("/")[4] for key in left} == {"alive"}


async def test_a_state_from_before_versions_were_listed_is_completed(
    bus: Bus, blobs: Blobs, table: Table[PolicyState]
) -> None:
    for number in (1, 2, 3):
        await published(blobs, number)
    await table.create(KEY, msgspec.structs.replace(STATE, desired=2, newest=2, history=(0, 1, 2)))
    await collector(bus, table, blobs).collect(KEY)
    assert await listed(table) == [1, 2]
    assert await stored(blobs) == {1, 2, 3}


async def test_a_pin_ends_with_its_batch(
    driver: Driver,
    bus: Bus,
    blobs: Blobs,
    table: Table[PolicyState],
    pins: Table[Pin],
    stack_env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The real ledger says so: not while a group is open, nor while it is silent, nor at the first look."""
    await adopted(table, blobs, 4)
    jobs = [make_job(position) for position in range(2)]
    key = pin_key("shared", "tiny", 1, jobs[0].batch_id)
    await pins.put(key, Pin(until=time.time() + 600, batch_id=jobs[0].batch_id, tenant=jobs[0].tenant))
    collecting = collector(bus, table, blobs)
    await collecting.collect(KEY)
    assert await listed(table) == [1, 3, 4], "no ledger, no verdict"
    async with logger_in_process(stack_env, monkeypatch):
        sequences = await driver.submit(jobs)
        await driver.finish(jobs[0], sequences[0])
        await driver.wait_closed(1)
        for _ in range(2):
            await collecting.collect(KEY)
        assert await pins.get(key) is not None
        await driver.finish(jobs[1], sequences[1])
        await driver.wait_closed(2)
        await collecting.collect(KEY)
        assert await pins.get(key) is not None, "jobs of the batch could still have been on their way"
        await collecting.collect(KEY)
        assert await pins.get(key) is None
    assert await listed(table) == [3, 4]
    assert await stored(blobs) == {3, 4}
