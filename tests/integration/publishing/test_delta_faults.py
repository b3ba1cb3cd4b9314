"""Faults of a chain of deltas, on the whole stack: pruned, gone back behind, applied twice (A43, A60, I4)."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollgrid import Client, VersionRefused, VersionSuperseded
from rollgrid.errors import ConfigurationError, IdempotencyConflict
from rollgrid.weights_delta import delta_body, snapshot_of
from rollgrid.weights_live import PublishedVersion
from rollgrid.weights_source import read_source
from rollgrid_contracts.checkpoints import MANIFEST_NAME, REFUSED_NAME, PolicyState, version_root
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from rollgrid_contracts.topology import POLICIES, WORKERS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_weights.delta.blob import Codec
from rollgrid_weights.delta.encode import encode_delta
from rollgrid_weights.manifest import weight_files, weights_digest
from rollgrid_weights.rebuilding import folder_digest
from rollgrid_weights.staging import FETCHING

from tests.support.services import ServiceProcess
from tests.support.stack import POLICY, Stack
from tests.support.waiting import wait_until

from .trainer import State, Trainer

OTHER_NODE = "other-node"


def copied(state: State) -> State:
    return {name: tensor.copy() for name, tensor in state.items()}


def keys_of(pipe: Stack, version: int) -> list[str]:
    listed = pipe.weed.client().list_objects_v2(Bucket=pipe.bucket, Prefix=version_root("shared", POLICY, version))
    return [item["Key"] for item in listed["Contents"]]


def prune(pipe: Stack, version: int, *, manifest: bool) -> None:
    """Take a version's manifest, or its files, from the bucket, as a lifecycle rule or a clean-up would."""
    for key in keys_of(pipe, version):
        if key.endswith("/" + MANIFEST_NAME) == manifest:
            pipe.weed.client().delete_object(Bucket=pipe.bucket, Key=key)


@pytest.fixture
def joiner(pipe: Stack, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A worker on a node of its own, whose disk is empty."""
    env = {**pipe.environment(), "ROLLGRID_SAMPLER_CACHE": str(tmp_path / OTHER_NODE)}
    process = ServiceProcess("sampler", pipe.folder / "logs", env, name="joiner")
    yield process
    process.stop()


def loaded(trainer: Trainer) -> dict[str, LoadedVersion]:
    """By worker what it gives new requests."""
    workers = trainer.client.policy(POLICY).workers
    return {worker.worker: one for worker in workers for one in worker.loaded if one.current}


def refused(trainer: Trainer, kind: str) -> VersionRefused:
    """What the publisher sees; every worker goes on serving what it served, in rotation and without a reload."""
    before = {(name, one.version, one.loaded_at) for name, one in loaded(trainer).items()}
    published = trainer.client.weights.publish(POLICY, trainer.state, kind=kind)
    with pytest.raises(VersionRefused) as error:
        published.wait_live(timeout=60)
    assert trainer.client.weights.version(POLICY, published.version).status == "refused"
    after = {(name, one.version, one.loaded_at) for name, one in loaded(trainer).items()}
    assert after <= before
    assert len(after) >= 2
    trainer.fleet.assert_truthful()
    return error.value


def test_A43_a_pruned_chain_is_refused_by_name_and_a_full_version_heals_it(pipe: Stack, trainer: Trainer) -> None:
    """checkpoint-sync and all workers have the state at hand that the delta goes on from; who joins would not."""
    anchor = trainer.fleet.version
    for _ in range(2):
        trainer.step()
        trainer.publish("delta")
    prune(pipe, anchor, manifest=False)
    trainer.step()
    error = refused(trainer, "delta")
    assert (error.code, error.field) == ("version_gone", "base_version")
    assert f"version {anchor}, whose model-" in str(error)
    assert trainer.publish("auto") == "full", "auto does not go on from there once it was told"
    trainer.fleet.assert_truthful()
    trainer.step()
    assert trainer.publish("auto") == "delta"
    trainer.fleet.assert_truthful()


def test_A43_a_joiner_of_a_pruned_chain_waits_and_says_why(
    pipe: Stack, trainer: Trainer, joiner: ServiceProcess
) -> None:
    """checkpoint-sync has nothing at hand, the joiner neither; a full version is what both go on with."""
    trainer.step()
    trainer.publish("delta")
    link = trainer.fleet.version
    trainer.step()
    trainer.publish("delta")
    prune(pipe, link, manifest=True)
    joiner.start()
    pipe["checkpoint_sync"].restart(60)
    wait_until(
        lambda: f"/{link}/{MANIFEST_NAME} does not exist" in str(joiner.readiness()), 60, "a word from the joiner"
    )
    trainer.step()
    error = refused(trainer, "auto")
    assert (error.code, error.field) == ("version_gone", "base_version")
    assert f"version {link}, whose {MANIFEST_NAME} is gone" in str(error)
    assert joiner.running
    assert trainer.publish("full") == "full"
    joiner.wait_ready(pipe.ready_s(joiner))
    assert joiner.readiness()[1]["version"] == trainer.fleet.version
    trainer.fleet.assert_truthful()


def digest_of(state: State) -> str:
    """The `weights_digest` of the trainer's own bytes."""
    return weights_digest(snapshot_of(read_source(state, "full", None, copy=True)).tensors.values())


def assert_is(trainer: Trainer, kind: str, *, rewinds: int | None, base: int | None = None) -> None:
    """The newest version is the trainer's state, byte for byte, and says what it went back behind."""
    version = trainer.client.weights.version(POLICY, trainer.fleet.version)
    assert (version.kind, version.rewinds) == (kind, rewinds)
    assert version.weights_digest == digest_of(trainer.state)
    if base is not None:
        assert version.base_version == base
    trainer.fleet.assert_truthful()


def test_A60_a_trainer_that_went_back_is_served_its_state_and_named(pipe: Stack, trainer: Trainer) -> None:
    """A checkpoint of an early step is loaded again, in the process that went on from it, and in a new one."""
    trainer.step()
    trainer.publish("delta", step=1, upload="went-back-1")
    early, early_version = copied(trainer.state), trainer.fleet.version
    for step in (2, 3):
        trainer.step(5000)
        trainer.publish("delta", step=step)
    assert_is(trainer, "delta", rewinds=None)

    for kind, step in (("delta", 2), ("auto", 1)):
        trainer.state, newest = copied(early), trainer.fleet.version
        trainer.step()
        trainer.publish(kind, step=step)
        assert_is(trainer, "delta", rewinds=newest, base=newest)

    trainer.state = copied(early)
    trainer.publish("delta", step=1)  # the very checkpoint; the step is none that was passed
    assert_is(trainer, "delta", rewinds=None)
    assert digest_of(early) == trainer.client.weights.version(POLICY, early_version).weights_digest

    with Client(pipe.url) as restarted:
        trainer.client, newest = restarted, trainer.fleet.version
        trainer.step()
        with pytest.raises(ConfigurationError, match="restarted"):
            restarted.weights.publish(POLICY, trainer.state, kind="delta", step=0)
        with pytest.raises(IdempotencyConflict) as taken:
            restarted.weights.publish(POLICY, trainer.state, kind="auto", upload="went-back-1", step=1)
        assert taken.value.field == "kind"
        trainer.publish("auto", step=0)
        assert_is(trainer, "full", rewinds=newest)


def test_A60_ranks_that_went_back_build_on_the_version_they_have(trainer: Trainer) -> None:
    trainer.step()
    trainer.publish("full", step=1, upload="ranks-1")
    early, early_version = copied(trainer.state), trainer.fleet.version
    for step in (2, 3):
        trainer.step()
        trainer.publish("delta", step=step)
    newest, trainer.state = trainer.fleet.version, copied(early)
    trainer.step()
    weights = trainer.client.weights
    # the very bytes of then under the name of then would not be served again
    with pytest.raises(VersionSuperseded) as followed:
        weights.publish(POLICY, early, kind="full", step=1, upload="ranks-1")
    assert (followed.value.version, followed.value.field) == (early_version, "upload")
    with weights.begin(POLICY, kind="delta", base_version=early_version, base=early, step=2) as upload:
        for name, tensor in trainer.state.items():
            upload.put(name, tensor)
        trainer.is_live(upload.commit())
    assert_is(trainer, "delta", rewinds=newest, base=early_version)


async def order_again(pipe: Stack) -> int:
    """The policy's state is written once more as it is, for every worker to look at: its new revision."""
    bus = await Bus.connect(pipe.nats.settings(), "test")
    try:
        table = Table(bus, POLICIES, PolicyState)
        found = await table.get(f"shared.{POLICY}")
        assert found is not None
        return await table.update(f"shared.{POLICY}", found.value, found.revision)
    finally:
        await bus.close()


async def forget_lease(pipe: Stack, worker: str) -> None:
    """Of a worker that was killed: what its TTL would do in some seconds."""
    bus = await Bus.connect(pipe.nats.settings(), "test")
    try:
        await Table(bus, WORKERS, WorkerState).delete(worker)
    finally:
        await bus.close()


def staged(folder: Path, version: int) -> list[Path]:
    """The folders of a version on a node."""
    return [path for path in (folder / "shared" / POLICY).glob(f"{version}-*") if path.is_dir()]


def assert_as_sent_whole(trainer: Trainer) -> None:
    """A full version of the same state has the digest and the fingerprint that the newest has."""
    ours = trainer.client.weights.version(POLICY, trainer.fleet.version), loaded(trainer)
    assert trainer.publish("full") == "full"
    whole = trainer.client.weights.version(POLICY, trainer.fleet.version), loaded(trainer)
    assert ours[0].weights_digest == whole[0].weights_digest == digest_of(trainer.state)
    assert {one.fingerprint for one in ours[1].values()} == {one.fingerprint for one in whole[1].values()}


def test_A43_orders_that_come_again_apply_nothing_twice(pipe: Stack, trainer: Trainer) -> None:
    trainer.step()
    trainer.publish("delta")
    before = trainer.fleet.version, trainer.fleet.digest, copied(trainer.state)
    trainer.step()
    weights = trainer.client.weights
    with weights.begin(POLICY, kind="delta", base_version=before[0], base=before[2]) as upload:
        for name, tensor in trainer.state.items():
            upload.put(name, tensor)
    trainer.is_live(upload.commit())
    version, once = trainer.fleet.version, loaded(trainer)

    assert upload.commit().version == version  # announces it again
    revision = asyncio.run(order_again(pipe))
    wait_until(
        lambda: min(one.policy_revision for one in loaded(trainer).values()) >= revision, 30, "all to have looked again"
    )
    again = loaded(trainer)
    assert {name: (one.version, one.loaded_at) for name, one in again.items()} == {
        name: (one.version, one.loaded_at) for name, one in once.items()
    }
    assert trainer.client.policy(POLICY).history.count(version) == 1
    assert weights.version(POLICY, version).status == "desired"
    assert not [key for key in keys_of(pipe, version) if key.endswith(REFUSED_NAME)]

    here = trainer.fleet.digest
    for number, digest in ((before[0], before[1]), (version, here)):  # back, and the delta is applied a second time
        weights.rollback(POLICY, number).wait_live(timeout=60)
        trainer.fleet.version, trainer.fleet.digest = number, digest
        trainer.fleet.assert_truthful()
    assert_as_sent_whole(trainer)


def test_A43_a_delta_published_twice_and_upon_itself_leads_where_it_leads(trainer: Trainer) -> None:
    base, before = trainer.fleet.version, snapshot_of(read_source(trainer.state, "full", None, copy=True))
    trainer.step()
    after = snapshot_of(read_source(trainer.state, "full", None, copy=True))

    def publish(body: bytes, base_version: int) -> PublishedVersion:
        with trainer.client.weights.begin(POLICY, kind="delta", base_version=base_version) as upload:
            upload.describe(after.tensors.values())
            upload.put_bytes("model.rgdelta", body)
            return upload.commit()

    steps = delta_body(before, after, sorted(trainer.state))
    values = encode_delta(before.state, after.state, codec=Codec.GAPS)
    assert steps is not None
    for body, goes_on_from in ((steps, base), (steps, base), (values, None)):
        trainer.is_live(publish(body, trainer.fleet.version if goes_on_from is None else goes_on_from))
        assert_is(trainer, "delta", rewinds=None)
    with pytest.raises(VersionRefused) as elsewhere:  # steps are taken from where the base is, not from where they lead
        publish(steps, trainer.fleet.version).wait_live(timeout=60)
    assert elsewhere.value.code == "invalid_request"
    trainer.fleet.assert_truthful()
    assert_as_sent_whole(trainer)


def test_A43_a_kill_in_mid_staging_and_one_before_the_apply(
    pipe: Stack, trainer: Trainer, joiner: ServiceProcess, tmp_path: Path
) -> None:
    for _ in range(2):
        trainer.step()
        trainer.publish("delta")
    node, version = tmp_path / OTHER_NODE, trainer.fleet.version

    def torn() -> list[Path]:
        """The anchor's copy lies there, and the delta that will change it; before the rename."""
        folders = [folder for folder in staged(node, version) if FETCHING in folder.name]
        return [one for one in folders if list(one.glob("*.safetensors")) and list(one.glob(f".{version}-*"))]

    def whole() -> bool:
        return any(FETCHING not in one.name for one in staged(node, version))

    for _ in range(3):
        joiner.start()
        wait_until(lambda: bool(torn()) or whole(), 60, "the joiner to rebuild", every_s=0.001)
        joiner.kill()
        if torn():
            break
        shutil.rmtree(node)  # it was quicker
    assert torn(), "it was in the middle"
    joiner.start().wait_ready(pipe.ready_s(joiner))
    (folder,) = staged(node, version)
    assert folder_digest(folder) == digest_of(trainer.state)

    paused = pipe["sampler-1"]
    paused.pause()
    trainer.step()
    trainer.is_live(trainer.client.weights.publish(POLICY, trainer.state, kind="delta"), min_workers=2)
    (folder,) = staged(pipe.folder / "versions", trainer.fleet.version)
    (stale,) = [name for name, one in loaded(trainer).items() if one.version == version]
    made = [(path.stat().st_ino, path.stat().st_mtime_ns) for path in weight_files(folder)]
    paused.kill()
    asyncio.run(forget_lease(pipe, stale))
    paused.start().wait_ready(pipe.ready_s(paused))
    assert [(path.stat().st_ino, path.stat().st_mtime_ns) for path in weight_files(folder)] == made
    assert folder_digest(folder) == digest_of(trainer.state)
    trainer.fleet.assert_truthful()
    assert_as_sent_whole(trainer)
