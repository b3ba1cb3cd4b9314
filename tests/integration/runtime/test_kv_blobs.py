"""Tables, views and blobs against real servers: one winner each, and deletions seen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollgrid_contracts import topology
from rollgrid_contracts.fleet import LedgerLease, Suspect
from rollgrid_contracts.samples import BlobRef
from rollgrid_runtime import kv
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict, StorageError
from rollgrid_runtime.kv import Table, View
from rollgrid_runtime.provision import provision
from rollgrid_runtime.settings import S3Settings

from tests.support.servers import NatsServer


def suspect(starts: int) -> Suspect:
    return Suspect(group_id="g", starts=starts, workers=("w",))


@pytest.fixture
def table(bus: Bus) -> Table[Suspect]:
    return Table(bus, topology.SUSPECTS, Suspect)


async def test_create_update_delete(table: Table[Suspect]) -> None:
    assert await table.get("g") is None
    assert await table.items() == {}
    revision = await table.create("g", suspect(1))
    with pytest.raises(Conflict):
        await table.create("g", suspect(9))
    moved = await table.update("g", suspect(2), revision)
    with pytest.raises(Conflict):
        await table.update("g", suspect(3), revision)
    with pytest.raises(Conflict):
        await table.delete("g", revision)
    assert await table.get("g") == (suspect(2), moved)
    await table.delete("g", moved)
    assert await table.get("g") is None
    assert await table.items() == {}
    await table.create("g", suspect(4))
    assert {key: found.value for key, found in (await table.items()).items()} == {"g": suspect(4)}


async def test_one_of_many_takes_a_lease(bus: Bus) -> None:
    leases = Table(bus, topology.LEDGER, LedgerLease)

    async def take(holder: int) -> bool:
        lease = LedgerLease(epoch=1, holder=str(holder), consumer="ledger-1", renewed_at=0.0)
        try:
            await leases.create(topology.LEDGER_LEASE_KEY, lease)
        except Conflict:
            return False
        return True

    assert sum(await asyncio.gather(*map(take, range(16)))) == 1


@contextlib.asynccontextmanager
async def following(view: View[Suspect]) -> AsyncIterator[View[Suspect]]:
    task = asyncio.create_task(view.follow())
    try:
        async with asyncio.timeout(10):
            await view.loaded.wait()
        yield view
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def settles(view: View[Suspect], wanted: dict[str, Suspect], within_s: float = 20) -> None:
    async with asyncio.timeout(within_s):
        while {key: found.value for key, found in view.values.items()} != wanted:
            view.changed.clear()
            await view.changed.wait()


async def test_a_view_follows_writes_and_deletions(bus: Bus, table: Table[Suspect]) -> None:
    await table.create("a", suspect(1))
    async with following(View(bus, table)) as view:
        await settles(view, {"a": suspect(1)})
        await table.put("a", suspect(2))
        await table.put("b", suspect(3))
        await settles(view, {"a": suspect(2), "b": suspect(3)})
        await table.delete("a")
        await settles(view, {"b": suspect(3)})


async def test_a_view_heals_after_a_server_kill(
    nats: NatsServer, bus: Bus, table: Table[Suspect], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "RELIST_S", 1.0)
    await table.create("a", suspect(1))
    async with following(View(bus, table)) as view:
        nats.kill()
        nats.start().wait_ready(10)
        other = await Bus.connect(nats.settings(), "other")
        await Table(other, topology.SUSPECTS, Suspect).put("b", suspect(2))
        await settles(view, {"a": suspect(1), "b": suspect(2)}, 40)
        await other.close()


async def test_a_lease_that_is_not_renewed_disappears_from_the_view(
    nats: NatsServer, blobs: Blobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv, "RELIST_S", 0.5)
    bus = await Bus.connect(nats.settings(), "ttl", blobs)
    await provision(bus)
    short = topology.Bucket(name="rg_short", ttl_s=1.0)
    from rollgrid_runtime.provision import ensure_bucket

    await ensure_bucket(bus, short)
    leases = Table(bus, short, Suspect)
    await leases.put("w", suspect(1))
    async with following(View(bus, leases)) as view:
        await settles(view, {"w": suspect(1)})
        await settles(view, {})
    await bus.close()


# -- S3 --------------------------------------------------------------------------------------------------


async def test_i3_one_of_many_conditional_creates_wins(blobs: Blobs) -> None:
    bodies = [str(number).encode() * 100 for number in range(24)]
    won = await asyncio.gather(*(blobs.create("manifests/1", body) for body in bodies))
    assert sum(won) == 1
    assert await blobs.get("manifests/1") == bodies[won.index(True)]


async def test_objects_are_written_read_listed_and_deleted(blobs: Blobs, tmp_path: Path) -> None:
    assert await blobs.get("a/none") is None
    names = [f"a/{number:04d}" for number in range(25)]
    await asyncio.gather(*(blobs.put(name, name.encode()) for name in reversed(names)))
    await blobs.put("b/other", b"x")
    assert await blobs.keys("a/") == names
    assert await blobs.keys("a/", after=names[9]) == names[10:]
    await blobs.delete(names[0])
    await blobs.delete(names[0])
    assert await blobs.get(names[0]) is None
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"\x01" * 20_000_000)
    await blobs.upload(source, "big")
    await blobs.download("big", target)
    assert target.read_bytes() == source.read_bytes()
    with pytest.raises(StorageError):
        await blobs.download("a/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


async def test_payloads_are_checked_against_their_digest(blobs: Blobs) -> None:
    reference = await blobs.put_payload(b"payload")
    assert await blobs.get_payload(reference) == b"payload"
    wrong = BlobRef(key=reference.key, sha256="0" * 64, size=7)
    with pytest.raises(StorageError, match="digest"):
        await blobs.get_payload(wrong)


async def test_s3_out_of_reach_is_a_storage_error(s3: S3Settings) -> None:
    nobody = Blobs(s3.model_copy(update={"endpoint": "http://127.0.0.1:9"}))
    for call in (nobody.put("k", b""), nobody.get("k"), nobody.create("k", b""), nobody.keys(""), nobody.probe("t")):
        with pytest.raises(StorageError):
            await call
    nobody.close()
