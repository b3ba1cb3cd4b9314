"""checkpoint-sync as a process: models become policies, verified versions become desired, others are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from rollgrid_checkpoint_sync.handler import Handler
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    CheckpointKind,
    CheckpointManifest,
    CheckpointPublished,
    PolicyState,
    version_root,
)
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_weights.delta.blob import Codec
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.delta.states import file_state
from rollgrid_weights.manifest import build_manifest, encode_manifest, folder_tensors, weights_digest
from rollgrid_weights.tensors import file_info

from tests.support.services import ServiceProcess, run_service
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import until, wait_until

KEY = "shared.tiny"


@pytest.fixture
def base() -> Path:
    return tiny_model()


@pytest.fixture
def env(stack_env: dict[str, str], base: Path) -> dict[str, str]:
    models = [{"name": "tiny", "path": str(base), "aliases": ["t"]}]
    return {
        **stack_env,
        "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps(models),
        "ROLLGRID_CHECKPOINT_SYNC_LIST_EVERY_S": "300",
    }


@pytest.fixture
async def sync(env: dict[str, str]) -> AsyncIterator[ServiceProcess]:
    with run_service("checkpoint_sync", env) as process:
        yield process


@pytest.fixture
def table(bus: Bus) -> Table[PolicyState]:
    return Table(bus, topology.POLICIES, PolicyState)


async def current(table: Table[PolicyState]) -> Versioned[PolicyState]:
    found = await table.get(KEY)
    assert found is not None
    return found


async def publish(
    bus: Bus, blobs: Blobs, folder: Path, version: int, *, wake: bool = True, leave_out: str = "", **changes: object
) -> str:
    """As ingest does: files below a prefix of their own, then the manifest by conditional create, then the wake-up."""
    root = version_root("shared", "tiny", version)
    prefix = f"{root}{'ab' * 16}/"
    manifest = build_manifest(folder, tenant="shared", policy="tiny", version=version)
    manifest = msgspec.structs.replace(manifest, **{"prefix": prefix, **changes})
    for file in manifest.files:
        if file.name != leave_out and (folder / file.name).is_file():
            await blobs.upload(folder / file.name, prefix + file.name)
    await announce(bus, blobs, manifest, root, wake=wake)
    return prefix


async def announce(bus: Bus, blobs: Blobs, manifest: CheckpointManifest, root: str, *, wake: bool = True) -> None:
    assert await blobs.create(root + MANIFEST_NAME, encode_manifest(manifest))
    if wake:
        event = CheckpointPublished(
            tenant="shared", policy="tiny", version=manifest.version, manifest_key=root + MANIFEST_NAME
        )
        await bus.publish(subjects.checkpoints("shared", "tiny"), event)


async def desired(table: Table[PolicyState], version: int) -> PolicyState:
    async def reached() -> bool:
        return (await current(table)).value.desired == version

    await until(reached, 30, f"version {version} is desired")
    return (await current(table)).value


async def refusal(blobs: Blobs, version: int) -> ErrorInfo:
    key = f"checkpoints/shared/tiny/{version}/refused.json"

    async def there() -> bool:
        return await blobs.get(key) is not None

    await until(there, 30, f"{key} is written")
    return codec.decode(await blobs.get(key) or b"", ErrorInfo, codec.JSON)


def weights_only(folder: Path, seed: int) -> Path:
    """A folder as a trainer would publish it: one safetensors file."""
    folder.mkdir()
    shutil.copy(tiny_model(TinyModel(seed=seed)) / "model.safetensors", folder)
    return folder


async def test_a_model_becomes_a_policy(
    sync: ServiceProcess, table: Table[PolicyState], blobs: Blobs, base: Path
) -> None:
    state = (await current(table)).value
    assert (state.tenant, state.policy, state.aliases, state.desired) == ("shared", "tiny", ("t",), 0)
    names = {key.removeprefix(state.tokenizer_prefix) for key in await blobs.keys(state.tokenizer_prefix)}
    assert {"tokenizer.json", "tokenizer_config.json", "config.json"} <= names
    assert await blobs.get(state.tokenizer_prefix + "tokenizer.json") == (base / "tokenizer.json").read_bytes()
    assert sync.readiness()[1]["policies"] == [KEY]


async def test_versions_are_verified_then_desired_and_survive_a_restart(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    first = (await current(table)).revision
    prefix = await publish(bus, blobs, weights_only(tmp_path / "one", 1), 1)
    state = await desired(table, 1)
    assert (state.newest, state.history, state.desired_prefix) == (1, (0, 1), prefix)
    assert (await current(table)).revision > first
    sync.restart(60)
    assert (await current(table)).value == state
    await publish(bus, blobs, weights_only(tmp_path / "two", 0), 2)
    assert (await desired(table, 2)).history == (0, 1, 2)


async def test_a_lost_wake_up_is_healed_by_the_listing(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path, env: dict[str, str]
) -> None:
    sync.kill()
    await publish(bus, blobs, weights_only(tmp_path / "one", 1), 1, wake=False)
    await publish(bus, blobs, weights_only(tmp_path / "two", 0), 2, wake=False)
    sync.start().wait_ready(60)
    assert (await desired(table, 2)).history == (0, 1, 2)
    sync.stop()
    with run_service("checkpoint_sync", {**env, "ROLLGRID_CHECKPOINT_SYNC_LIST_EVERY_S": "0.2"}):
        await publish(bus, blobs, weights_only(tmp_path / "three", 1), 3, wake=False)
        await desired(table, 3)


async def test_refusals_are_typed_and_recorded_and_the_next_good_version_runs(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    good = weights_only(tmp_path / "good", 1)
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(tiny_model(TinyModel("qwen3")) / "model.safetensors", other)

    await publish(bus, blobs, other, 1)
    info = await refusal(blobs, 1)
    assert (info.code, info.boundary, info.retryable) == (ErrorCode.INVALID_REQUEST, Boundary.WEIGHTS, False)
    assert "tensor" in info.message
    assert info.field

    prefix = "checkpoints/shared/tiny/2/"  # altered after its manifest was made
    content = bytearray((good / "model.safetensors").read_bytes())
    content[-1] ^= 1
    await blobs.put(prefix + "model.safetensors", bytes(content))
    await announce(bus, blobs, build_manifest(good, tenant="shared", policy="tiny", version=2), prefix)
    assert "digest" in (await refusal(blobs, 2)).message

    await publish(bus, blobs, good, 3, leave_out="model.safetensors")
    assert (await refusal(blobs, 3)).code is ErrorCode.NOT_FOUND

    await publish(bus, blobs, good, 4, policy="another")
    assert (await refusal(blobs, 4)).field == "version"

    await publish(bus, blobs, good, 5, prefix="checkpoints/acme/secret/1/")
    assert (await refusal(blobs, 5)).code is ErrorCode.FORBIDDEN

    await publish(bus, blobs, good, 6, tokenizer_digest="0" * 64)
    assert (await refusal(blobs, 6)).field == "tokenizer_digest"

    await blobs.create("checkpoints/shared/tiny/7/manifest.json", b"{not a manifest")
    await publish(bus, blobs, good, 8)
    state = await desired(table, 8)
    assert state.history == (0, 8)
    assert (await refusal(blobs, 7)).field == "manifest.json"

    await publish(bus, blobs, good, 9)
    await desired(table, 9)
    assert sync.is_ready()


async def test_a_disk_without_room_for_a_delta_refuses_nothing(
    env: dict[str, str], bus: Bus, blobs: Blobs, table: Table[PolicyState], base: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    target = tmp_path / "target"
    target.mkdir()
    body = delta(folder / "model.safetensors", weights_only(tmp_path / "one", 1) / "model.safetensors")
    (target / "model.rgdelta").write_bytes(body)
    tensors = folder_tensors([tmp_path / "one" / "model.safetensors"])
    env["ROLLGRID_CHECKPOINT_SYNC_MODELS"] = json.dumps([{"name": "tiny", "path": str(folder)}])
    with run_service("checkpoint_sync", env) as process:
        with (folder / "z.safetensors").open("wb") as sparse:  # more than there is room for, were it copied
            sparse.truncate(shutil.disk_usage(tmp_path).total)
        root = version_root("shared", "tiny", 1)
        manifest = CheckpointManifest(
            tenant="shared", policy="tiny", version=1, kind=CheckpointKind.DELTA, base_version=0, tensors=tensors,
            files=(file_info(target / "model.rgdelta"),), weights_digest=weights_digest(tensors), prefix=root,
        )  # fmt: skip
        await blobs.upload(target / "model.rgdelta", f"{root}model.rgdelta")
        await announce(bus, blobs, manifest, root)
        wait_until(lambda: "bytes are free" in str(process.readiness()[1].get("problems")), 30, "the full disk is said")
        assert await blobs.get(f"{root}refused.json") is None
        (folder / "z.safetensors").unlink()
        await desired(table, 1)


def delta(old: Path, new: Path) -> bytes:
    return encode_delta(file_state([old]), file_state([new]), codec=Codec.GAPS)


async def test_a_version_that_comes_too_late(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    good = weights_only(tmp_path / "good", 1)
    await publish(bus, blobs, good, 5)
    await desired(table, 5)
    await publish(bus, blobs, good, 4)
    info = await refusal(blobs, 4)
    assert (info.field, info.limit) == ("version", "> 5")
    assert (await current(table)).value.desired == 5


async def test_a_rollback_holds_until_something_newer(
    sync: ServiceProcess, bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    good = weights_only(tmp_path / "good", 1)
    prefix = await publish(bus, blobs, good, 1)
    await publish(bus, blobs, good, 2)
    await desired(table, 2)
    handler = Handler(table, blobs, {}, None)
    state = await handler.roll_back(KEY, 1)
    assert (state.desired, state.newest, state.desired_prefix) == (1, 2, prefix)
    sync.restart(60)
    assert (await current(table)).value.desired == 1
    await publish(bus, blobs, good, 3)
    assert (await desired(table, 3)).history == (0, 1, 2, 1, 3)


async def test_another_base_under_the_same_name(
    sync: ServiceProcess, env: dict[str, str], bus: Bus, blobs: Blobs, table: Table[PolicyState], tmp_path: Path
) -> None:
    """It starts over while nothing was published on the old one, and is refused afterwards."""
    sync.stop()
    old = (await current(table)).value
    other = {
        **env,
        "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps([{"name": "tiny", "path": str(tiny_model(TinyModel(seed=1)))}]),
    }
    with run_service("checkpoint_sync", other) as process:
        state = (await current(table)).value
        assert state.base_digest != old.base_digest
        assert "policy_starts_over" in process.log_tail()
        await publish(bus, blobs, weights_only(tmp_path / "one", 1), 1)
        await desired(table, 1)
    sync.start()

    def conflict() -> bool:
        return "new name" in sync.readiness()[1].get("problems", {}).get(f"policy {KEY}", "")

    wait_until(conflict, 30, "the conflict is reported with its remedy")
    assert (await current(table)).value.base_digest == state.base_digest


async def test_one_bad_model_leaves_the_others(
    env: dict[str, str], bus: Bus, table: Table[PolicyState], base: Path, tmp_path: Path
) -> None:
    late = tmp_path / "late"
    models = [{"name": "absent", "path": str(late)}, {"name": "tiny", "path": str(base)}]
    environment = {**env, "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps(models)}
    with ServiceProcess("checkpoint_sync", tmp_path, environment) as process:
        process.start()
        wait_until(lambda: process.readiness()[1].get("policies") == [KEY], 30, "the good model is registered")
        assert list(process.readiness()[1]["problems"]) == ["policy shared.absent"]
        shutil.copytree(base, late)
        process.wait_ready(60)
        assert await table.get("shared.absent") is not None
