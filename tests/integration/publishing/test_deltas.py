"""Deltas on the whole stack: small, truthful, rebuilt where they are needed, refused by name where they lead elsewhere (A18, A43, A51, A60)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rollgrid import Client, VersionRefused
from rollgrid.errors import ConfigurationError, InvalidRequest, VersionUnavailable
from rollgrid.weights_delta import delta_body, snapshot_of
from rollgrid.weights_source import read_source
from rollgrid_sampler.engines.script import weights_digest
from safetensors.numpy import save_file

from tests.integration.sdk.test_cli import lines_of, rollgrid
from tests.support.stack import POLICY, Stack

from .trainer import EMBEDDING, NORM, State, Trainer


def test_A18_deltas_are_small_and_every_token_tells_the_truth(trainer: Trainer) -> None:
    full = trainer.bytes
    for _ in range(4):
        trainer.step()
        assert trainer.publish("delta") == "delta"
        assert trainer.bytes < full / 10
        trainer.fleet.assert_truthful()


def test_A51_the_command_line_sizes_a_refresh_beside_what_was_measured(pipe: Stack, trainer: Trainer) -> None:
    full = trainer.bytes
    trainer.step()
    trainer.publish("delta")
    done = rollgrid(pipe, "weights", "size", POLICY, "--uplink-mbit", "8", "--cadence-s", "10", "--json")
    assert done.returncode == 0, done.stderr
    lines = lines_of(done)
    planned = {line["kind"]: line for line in lines if line["event"] == "planned"}
    assert planned["full"]["upload_s"] == pytest.approx(planned["full"]["bytes"] / 1e6)
    assert planned["full"]["bytes"] >= full > planned["delta"]["bytes"] * 10
    assert planned["delta"]["total_s"] < planned["full"]["total_s"]
    measured = {line["version"]: line for line in lines if line["event"] == "measured"}
    assert measured[trainer.fleet.version]["kind"] == "delta"
    assert 0 < measured[trainer.fleet.version]["seconds"] < 60


def test_A60_auto_makes_an_anchor_when_the_chain_is_long_or_the_delta_large(trainer: Trainer) -> None:
    kinds = []
    for _ in range(4):
        trainer.step()
        kinds.append(trainer.publish("auto", anchor_every=2))
    assert kinds == ["delta", "delta", "full", "delta"]
    trainer.state = {name: tensor * np.float32(1.37) for name, tensor in trainer.state.items()}
    assert trainer.publish("auto") == "full"
    trainer.fleet.assert_truthful()


def test_A44_back_across_deltas_and_on_from_there(trainer: Trainer) -> None:
    trainer.step()
    trainer.publish("delta")
    version, digest = trainer.fleet.version, trainer.fleet.digest
    for _ in range(2):
        trainer.step()
        trainer.publish("delta")
    trainer.client.weights.rollback(POLICY, version).wait_live(timeout=60)
    trainer.fleet.version, trainer.fleet.digest = version, digest
    trainer.fleet.assert_truthful()
    trainer.step()
    assert trainer.publish("delta") == "delta"
    trainer.fleet.assert_truthful()


def test_A60_a_publisher_that_remembers_nothing_is_told_so_and_auto_begins_anew(pipe: Stack, trainer: Trainer) -> None:
    trainer.step()
    with Client(pipe.url) as fresh:
        with pytest.raises(ConfigurationError, match="nothing a delta could go on from"):
            fresh.weights.publish(POLICY, trainer.state, kind="delta")
        trainer.client = fresh
        assert trainer.publish("auto") == "full"
        trainer.step()
        assert trainer.publish("auto") == "delta"
        trainer.fleet.assert_truthful()


def test_A60_a_tensor_that_is_there_no_more_is_no_matter_of_a_delta(trainer: Trainer) -> None:
    """A copy of the tied embedding beside it, and then not: a delta would leave the copy where it was."""
    trainer.state["lm_head.weight"] = trainer.state[EMBEDDING].copy()
    assert trainer.publish("auto") == "full"
    del trainer.state["lm_head.weight"]
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight"):
        trainer.publish("delta")
    assert trainer.publish("auto") == "full"
    trainer.step()
    assert trainer.publish("auto") == "delta"
    trainer.fleet.assert_truthful()


def test_A43_a_joiner_in_mid_chain_rebuilds_anchor_and_deltas(pipe: Stack, trainer: Trainer) -> None:
    for _ in range(3):
        trainer.step()
        trainer.publish("delta")
    joiner, other = pipe["sampler-1"], pipe["sampler-0"]
    joiner.kill()
    shutil.rmtree(pipe.folder / "versions" / "shared", ignore_errors=True)  # the other one holds its files open
    joiner.start()
    joiner.wait_ready(pipe.ready_s(joiner))
    assert joiner.readiness()[1]["version"] == trainer.fleet.version
    other.kill()  # what is sampled now is the joiner's
    trainer.fleet.assert_truthful()
    other.start()
    other.wait_ready(pipe.ready_s(other))


def test_A51_ranks_publish_their_parts_of_a_delta(trainer: Trainer) -> None:
    base, before = trainer.fleet.version, {name: tensor.copy() for name, tensor in trainer.state.items()}
    trainer.step()
    names = sorted(trainer.state)
    parts = [names[::2], names[1::2]]
    for rank, part in enumerate(parts):
        with trainer.client.weights.begin(
            POLICY, kind="delta", base_version=base, base={name: before[name] for name in part}, upload=f"two-{base}",
            rank=rank, world=2,
        ) as upload:  # fmt: skip
            for name in part:
                upload.put(name, trainer.state[name])
            if rank == 1:
                trainer.fleet.version = upload.commit().wait_live(timeout=60).version
    save_file(trainer.state, str(trainer.folder / "model.safetensors"))
    trainer.fleet.digest = weights_digest(trainer.folder)
    trainer.fleet.assert_truthful()


@pytest.fixture
def faulty(trainer: Trainer) -> Iterator[Trainer]:
    """Whatever is done to the delta, afterwards the fleet serves the old version truthfully and takes the next one."""
    yield trainer
    trainer.fleet.assert_truthful()
    trainer.step()
    assert trainer.publish("delta") == "delta"
    trainer.fleet.assert_truthful()


def published(trainer: Trainer, base: State, target: State, spoil: Any = None, base_version: int | None = None) -> Any:
    """A delta from `base` to `target`, as version numbers have it from what is live."""
    ours, theirs = (
        snapshot_of(read_source(base, "full", None, copy=True)),
        snapshot_of(read_source(target, "full", None, copy=True)),
    )
    body = delta_body(ours, theirs, sorted(target))
    assert body is not None
    if spoil is not None:
        body = spoil(body)
    number = trainer.fleet.version if base_version is None else base_version
    with trainer.client.weights.begin(POLICY, kind="delta", base_version=number) as upload:
        upload.describe(theirs.tensors.values())
        upload.put_bytes("model.rgdelta", body)
        return upload.commit()


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


def test_A43_a_flipped_byte_is_refused(faulty: Trainer) -> None:
    target = {**faulty.state, NORM: faulty.state[NORM] + np.float32(1)}
    with pytest.raises(VersionRefused, match="digest") as refused:
        published(faulty, faulty.state, target, flipped).wait_live(timeout=60)
    assert refused.value.code == "invalid_request"


def test_A43_a_delta_against_another_base_is_refused(faulty: Trainer) -> None:
    other = {**faulty.state, NORM: faulty.state[NORM] * np.float32(3)}
    target = {**other, NORM: other[NORM] + np.float32(1), EMBEDDING: other[EMBEDDING] * np.float32(2)}
    with pytest.raises(VersionRefused) as refused:
        published(faulty, other, target).wait_live(timeout=60)
    assert refused.value.code == "invalid_request"


def test_A43_a_delta_to_numbers_that_are_none_is_refused(faulty: Trainer) -> None:
    broken = faulty.state[EMBEDDING].copy()
    broken[3, 5] = np.nan
    with pytest.raises(VersionRefused, match="not finite") as refused:
        published(faulty, faulty.state, {**faulty.state, EMBEDDING: broken}).wait_live(timeout=60)
    assert refused.value.field == EMBEDDING


def test_A43_a_gap_and_a_missing_end_are_refused_at_the_door(faulty: Trainer) -> None:
    target = {**faulty.state, NORM: faulty.state[NORM] + np.float32(1)}
    with pytest.raises(VersionUnavailable) as unknown:
        published(faulty, faulty.state, target, base_version=faulty.fleet.version + 7)
    assert unknown.value.field == "base_version"
    with pytest.raises(InvalidRequest) as nowhere, faulty.client.weights.begin(POLICY, kind="delta") as upload:
        upload.finish()
    assert nowhere.value.field == "base_version"
    upload = faulty.client.weights.begin(POLICY, kind="delta", base_version=faulty.fleet.version)
    upload.put_bytes("model.rgdelta", b"rgdelta\n")
    with pytest.raises(InvalidRequest) as endless:
        upload.commit()
    assert endless.value.field == "tensors"
