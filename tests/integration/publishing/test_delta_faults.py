"""Faults of a chain of deltas, on the whole stack: pruned, gone back behind, applied twice (A43, A60, I4)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rollgrid import Client, VersionRefused
from rollgrid.errors import ConfigurationError, IdempotencyConflict
from rollgrid.weights_delta import snapshot_of
from rollgrid.weights_source import read_source
from rollgrid_contracts.checkpoints import MANIFEST_NAME, version_root
from rollgrid_weights.manifest import weights_digest

from tests.support.services import ServiceProcess
from tests.support.stack import POLICY, Stack
from tests.support.waiting import wait_until

from .trainer import State, Trainer


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
def joiner(pipe: Stack) -> Iterator[ServiceProcess]:
    """A worker on a node of its own, whose disk is empty."""
    env = {**pipe.environment(), "ROLLGRID_SAMPLER_CACHE": str(pipe.folder / "other-node")}
    process = ServiceProcess("sampler", pipe.folder / "logs", env, name="joiner")
    yield process
    process.stop()


def refused(trainer: Trainer, kind: str) -> VersionRefused:
    """What the publisher sees; the fleet goes on serving what it served."""
    published = trainer.client.weights.publish(POLICY, trainer.state, kind=kind)
    with pytest.raises(VersionRefused) as error:
        published.wait_live(timeout=60)
    assert trainer.client.weights.version(POLICY, published.version).status == "refused"
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
    assert len(trainer.client.policy(POLICY).workers) == 3
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
    trainer.publish("delta", step=1)
    early, early_version = copied(trainer.state), trainer.fleet.version
    for step in (2, 3):
        trainer.step()
        trainer.publish("delta", step=step)
    newest, trainer.state = trainer.fleet.version, copied(early)
    trainer.step()
    weights = trainer.client.weights
    with weights.begin(POLICY, kind="delta", base_version=early_version, base=early, step=2) as upload:
        for name, tensor in trainer.state.items():
            upload.put(name, tensor)
        trainer.is_live(upload.commit())
    assert_is(trainer, "delta", rewinds=newest, base=early_version)
