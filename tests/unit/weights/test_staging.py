"""Staging: once per node, whole or not at all, kept while somebody holds it."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.staging import Staging, link_base, wanted_files

from tests.support.waiting import wait_until

CONTENT = {"a.safetensors": b"aaaa", "b.safetensors": b"bb"}
DIGEST = "d" * 64


def info(name: str, data: bytes) -> FileInfo:
    return FileInfo(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest())


def manifest(version: int = 3, kind: CheckpointKind = CheckpointKind.FULL, **more: bytes) -> CheckpointManifest:
    files = {**CONTENT, **{f"{name}.json": data for name, data in more.items()}}
    return CheckpointManifest(
        tenant="t", policy="p", version=version, kind=kind, files=tuple(info(n, d) for n, d in files.items())
    )


class Store:
    """Where versions come from; `gate` holds every fetch back."""

    def __init__(self) -> None:
        self.content: dict[str, bytes] = {**CONTENT, "adapter_config.json": b"{}"}
        self.fetched: Counter[str] = Counter()
        self.at_once = self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, file: FileInfo, path: Path) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
            self.fetched[file.name] += 1
            path.write_bytes(self.content[file.name])
        finally:
            self.at_once -= 1


async def test_two_workers_of_one_node_fetch_a_version_once(tmp_path: Path) -> None:
    store = Store()
    store.gate.clear()
    one, other = Staging(tmp_path), Staging(tmp_path)
    holds = [asyncio.create_task(s.hold(manifest(), DIGEST, store.fetch)) for s in (one, other)]
    while not store.at_once:
        await asyncio.sleep(0.01)
    store.gate.set()
    first, second = await asyncio.gather(*holds)
    assert store.fetched == {"a.safetensors": 1, "b.safetensors": 1}
    assert first.folder == second.folder
    assert sorted([first.fetched, second.fetched]) == [0, 6]
    assert {p.name: p.read_bytes() for p in first.folder.iterdir()} == CONTENT
    assert store.most_at_once == 2, "its files come in parallel"


async def test_a_folder_lives_as_long_as_somebody_holds_or_wants_it(tmp_path: Path) -> None:
    store, one, other = Store(), Staging(tmp_path), Staging(tmp_path)
    mine = await one.hold(manifest(), DIGEST, store.fetch)
    theirs = await other.hold(manifest(), DIGEST, store.fetch)
    mine.release()
    assert one.sweep("t", "p", keep=()) == []
    assert theirs.folder.exists()
    theirs.release()
    assert one.sweep("t", "p", keep={3}) == []
    assert one.sweep("t", "p", keep={4}) == [mine.folder.name]
    assert list(one.room("t", "p").iterdir()) == []
    again = await one.hold(manifest(), DIGEST, store.fetch)
    assert again.fetched == 6
    assert one.sweep("t", "other", keep=()) == []


FETCHER = """
import asyncio, sys
from pathlib import Path
from rollgrid_weights.staging import Staging
from tests.unit.weights.test_staging import DIGEST, manifest

async def fetch(file, path):
    path.write_bytes(b"half")
    print("fetching", flush=True)
    await asyncio.Event().wait()

asyncio.run(Staging(Path(sys.argv[1])).hold(manifest(), DIGEST, fetch))
"""


async def test_what_a_killed_fetch_leaves_is_cleaned_and_its_lock_is_free(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", FETCHER, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"fetching\n"
        store, staging = Store(), Staging(tmp_path)
        waiting = asyncio.create_task(staging.hold(manifest(), DIGEST, store.fetch))
        await asyncio.sleep(0.2)
        assert not waiting.done(), "the other one is at it"
        assert not store.fetched
    finally:
        child.kill()
        child.wait(10)
    async with asyncio.timeout(10):
        held = await waiting
    assert held.folder.joinpath("a.safetensors").read_bytes() == b"aaaa"
    assert sorted(p.name for p in held.folder.parent.iterdir()) == [held.folder.name, f"{held.folder.name}.lock"]


async def test_a_cancelled_or_torn_fetch_leaves_nothing(tmp_path: Path) -> None:
    store, staging = Store(), Staging(tmp_path)
    store.gate.clear()
    fetching = asyncio.create_task(staging.hold(manifest(), DIGEST, store.fetch))
    while not store.at_once:
        await asyncio.sleep(0.01)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    store.gate.set()
    store.content["b.safetensors"] = b"b!"
    with pytest.raises(WeightsError, match=r"b\.safetensors does not match"):
        await staging.hold(manifest(), DIGEST, store.fetch)
    assert [p.name for p in staging.room("t", "p").iterdir() if p.is_dir()] == []


async def test_a_full_disk_is_said_before_and_during_a_fetch(tmp_path: Path) -> None:
    store = Store()
    with pytest.raises(WeightsError) as before:
        await Staging(tmp_path, reserve=1 << 60).hold(manifest(), DIGEST, store.fetch)
    assert (before.value.code, before.value.field) == (ErrorCode.STORAGE_ERROR, "cache")
    assert not store.fetched

    async def full(file: FileInfo, path: Path) -> None:
        with Path("/dev/full").open("wb", buffering=0) as out:
            out.write(b"x")

    with pytest.raises(WeightsError) as during:
        await Staging(tmp_path, reserve=0).hold(manifest(), DIGEST, full)
    assert (during.value.code, during.value.field) == (ErrorCode.STORAGE_ERROR, "cache")
    assert os.strerror(errno.ENOSPC) in during.value.message


async def test_a_full_version_runs_the_bases_side_files_and_an_adapter_its_own(tmp_path: Path) -> None:
    base, store = tmp_path / "base", Store()
    base.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (base / name).write_text(name)
    staging = Staging(tmp_path / "cache")
    full = await staging.hold(manifest(4, config=b"theirs"), DIGEST, store.fetch, base=base)
    assert sorted(p.name for p in full.folder.iterdir()) == [*CONTENT, "config.json", "tokenizer.json"]
    assert full.folder.joinpath("config.json").read_text() == "config.json"
    lora = await staging.hold(manifest(5, CheckpointKind.LORA, adapter_config=b"{}"), DIGEST, store.fetch, base=base)
    assert sorted(p.name for p in lora.folder.iterdir()) == ["a.safetensors", "adapter_config.json", "b.safetensors"]
    link_base(None, lora.folder)


async def test_a_link_that_leads_nowhere_is_made_again(tmp_path: Path) -> None:
    staging, store = Staging(tmp_path / "cache"), Store()
    for base in (tmp_path / "old", tmp_path / "new"):
        base.mkdir()
        (base / "config.json").write_text(base.name)
    held = await staging.hold(manifest(), DIGEST, store.fetch, base=tmp_path / "old")
    (tmp_path / "old" / "config.json").unlink()
    await staging.hold(manifest(), DIGEST, store.fetch, base=tmp_path / "new")
    assert held.folder.joinpath("config.json").read_text() == "new"


async def test_repair_replaces_what_rotted(tmp_path: Path) -> None:
    store, staging = Store(), Staging(tmp_path)
    held = await staging.hold(manifest(), DIGEST, store.fetch)
    assert await staging.repair(manifest(), held, store.fetch) == ()
    held.folder.joinpath("a.safetensors").write_bytes(b"aaab")
    held.folder.joinpath("b.safetensors").unlink()
    assert await staging.repair(manifest(), held, store.fetch) == ("a.safetensors", "b.safetensors")
    assert {p.name: p.read_bytes() for p in held.folder.iterdir()} == CONTENT


def test_names_stay_in_their_folder() -> None:
    for name in ("../x.safetensors", "/etc/x", ".x", "a/b.safetensors"):
        with pytest.raises(WeightsError):
            wanted_files(
                CheckpointManifest(
                    tenant="t", policy="p", version=1, kind=CheckpointKind.LORA, files=(info(name, b""),)
                )
            )


def test_the_lock_of_a_dead_holder_is_free(tmp_path: Path) -> None:
    """The kernel counts users: nothing has to be cleaned after a crash."""
    code = "import sys, time; from pathlib import Path; from rollgrid_weights.staging import Lock\n"
    code += "lock = Lock(Path(sys.argv[1])); print(lock.take(exclusive=False), flush=True); time.sleep(60)"
    (tmp_path / "t" / "p").mkdir(parents=True)
    path = tmp_path / "t" / "p" / "3-dd.lock"
    child = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"True\n"
        (tmp_path / "t" / "p" / "3-dd").mkdir()
        assert Staging(tmp_path).sweep("t", "p", keep=()) == []
    finally:
        child.kill()
        child.wait(10)
    wait_until(lambda: Staging(tmp_path).sweep("t", "p", keep=()) == ["3-dd"], 30, "the folder is removed")
