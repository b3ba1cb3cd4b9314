"""Rebuilding a delta version on a node's disk: whole or not at all, whatever happens in the middle of it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid_contracts.checkpoints import CheckpointKind, CheckpointManifest, FileInfo
from rollgrid_contracts.failures import ErrorCode
from rollgrid_weights.delta.blob import Codec
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.states import file_state
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import decode_manifest, encode_manifest, folder_tensors, weights_digest
from rollgrid_weights.rebuilding import Known, Rebuilding
from rollgrid_weights.staging import FETCHING, Held, Staging
from safetensors.numpy import save_file

FULL, DELTA, NEWEST = 1, "model.rgdelta", 3
MODEL = "model.safetensors"


class Store:
    """A full version and two deltas behind it, as files below `root`; `states` are what they lead to."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def states(self) -> dict[int, Path]:
        return {version: self.root / f"state-{version}" for version in (1, 2, 3)}

    def fill(self) -> Store:
        weights = np.arange(4096, dtype=np.float32)
        for version, folder in self.states.items():
            folder.mkdir(parents=True)
            weights[version :: 7 + version] += 0.5
            save_file({"w": weights}, str(folder / MODEL))
            self._publish(version, folder)
        return self

    def _publish(self, version: int, state: Path) -> None:
        folder = self.root / str(version)
        folder.mkdir()
        if version == FULL:
            file = folder / MODEL
            shutil.copyfile(state / MODEL, file)
        else:
            file = folder / DELTA
            before, after = (file_state([self.states[one] / MODEL]) for one in (version - 1, version))
            file.write_bytes(encode_delta(before, after, codec=Codec.GAPS))
        made = CheckpointManifest(
            tenant="t", policy="p", version=version, kind=CheckpointKind.FULL if version == FULL else CheckpointKind.DELTA,
            base_version=None if version == FULL else version - 1, weights_digest=weights_digest(folder_tensors([state / MODEL])),
            files=(FileInfo(name=file.name, size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest()),),
        )  # fmt: skip
        (folder / "manifest.json").write_bytes(encode_manifest(made))

    async def find(self, version: int) -> Known:
        data = (self.root / str(version) / "manifest.json").read_bytes()
        return Known(decode_manifest(data), hashlib.sha256(data).hexdigest(), str(version))

    async def bring(self, prefix: str, file: FileInfo, path: Path) -> None:
        shutil.copyfile(self.root / prefix / file.name, path)

    async def hold(self, cache: Path, version: int = NEWEST) -> Held:
        return await Rebuilding(Staging(cache, reserve=0), self.find, self.bring, None).hold(
            await self.find(version), {}
        )

    async def find_held(self, cache: Path, version: int = NEWEST) -> Held | None:
        known = await self.find(version)
        return await Staging(cache).find(known.manifest, known.digest)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store").fill()


def killed_in(event: str, args: tuple[Any, ...], at: int) -> None:
    """An audit hook of the child: SIGKILL when the copy of state 1 lies there, or between the first delta and the second."""
    if event != "open" or not isinstance(args[0], (str, os.PathLike)):
        return
    path = Path(args[0])
    rebuilding = path.parent.name.startswith(f"{NEWEST}-") and FETCHING in path.parent.name
    if rebuilding and path.with_name(MODEL).exists() and path.name == (MODEL, f".{NEWEST}-{DELTA}")[at - 1]:
        os.kill(os.getpid(), signal.SIGKILL)


CHILD = """
import asyncio, sys
from pathlib import Path
from tests.unit.weights.test_rebuilding import Store, killed_in

sys.addaudithook(lambda event, args: killed_in(event, args, int(sys.argv[3])))
asyncio.run(Store(Path(sys.argv[1])).hold(Path(sys.argv[2])))
"""


@pytest.mark.parametrize("at", [1, 2])
async def test_A43_a_kill_in_the_middle_of_rebuilding_leaves_nothing_torn_to_be_seen(
    store: Store, tmp_path: Path, at: int
) -> None:
    cache = tmp_path / "cache"
    done = subprocess.run([sys.executable, "-c", CHILD, str(store.root), str(cache), str(at)], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    (torn,) = cache.rglob(f"{NEWEST}-*{FETCHING}*")
    states = {version: (folder / MODEL).read_bytes() for version, folder in store.states.items()}
    assert (torn / MODEL).read_bytes() == states[at], "it was in the middle"
    assert await store.find_held(cache) is None, "what is torn is no version"

    async with asyncio.timeout(30):
        held = await store.hold(cache)
    assert {path.name: path.read_bytes() for path in held.folder.iterdir()} == {MODEL: states[NEWEST]}
    assert not torn.exists()
    full = await store.find_held(cache, FULL)
    assert full is not None
    assert (full.folder / MODEL).read_bytes() == states[FULL], "what it was rebuilt from is as it was"


async def test_a_disk_that_is_full_in_the_middle_of_rebuilding_is_said(store: Store, tmp_path: Path) -> None:
    async def bring(prefix: str, file: FileInfo, path: Path) -> None:
        await store.bring(prefix, file, path)
        if prefix == str(NEWEST):
            path.with_name(MODEL).symlink_to("/dev/full")

    rebuilding = Rebuilding(Staging(tmp_path / "cache", reserve=0), store.find, bring, None)
    with pytest.raises(WeightsError) as full:
        await rebuilding.hold(await store.find(NEWEST), {})
    assert (full.value.code, full.value.field) == (ErrorCode.STORAGE_ERROR, "cache")
    assert await store.find_held(tmp_path / "cache") is None
    assert list((tmp_path / "cache").rglob(f"*{FETCHING}*")) == []


async def test_what_is_at_hand_no_more_is_fetched(store: Store, tmp_path: Path) -> None:
    rebuilding = Rebuilding(Staging(tmp_path / "cache", reserve=0), store.find, store.bring, None)
    held = await rebuilding.hold(await store.find(NEWEST), {2: tmp_path / "emptied"})
    assert (held.folder / MODEL).read_bytes() == (store.states[NEWEST] / MODEL).read_bytes()


async def test_repair_rebuilds_what_rotted(store: Store, tmp_path: Path) -> None:
    rebuilding = Rebuilding(Staging(tmp_path, reserve=0), store.find, store.bring, None)
    known = await store.find(NEWEST)
    held = await rebuilding.hold(known, {})
    assert await rebuilding.repair(known, held) == ()
    wanted = (held.folder / MODEL).read_bytes()
    (held.folder / MODEL).write_bytes(wanted[:-1] + bytes([wanted[-1] ^ 1]))
    assert await rebuilding.repair(known, held) == (MODEL,)
    assert {path.name: path.read_bytes() for path in held.folder.iterdir()} == {MODEL: wanted}
