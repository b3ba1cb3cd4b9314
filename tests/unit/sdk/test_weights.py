"""Publishing from a trainer's memory: what is copied when, how it is cut into files, who waits for whom (A21, A43)."""

from __future__ import annotations

import asyncio
import enum
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from rollgrid import AsyncClient, Client, DeadlineExceeded, Retries, VersionRefused, VersionRolledBack
from rollgrid.answers import Policy
from rollgrid.errors import ConfigurationError, InvalidRequest, UploadIncomplete
from rollgrid.weights_live import LiveWait, live_on
from rollgrid.weights_source import distinct, read_source, serialised
from rollgrid_contracts.checkpoints import CheckpointKind
from rollgrid_contracts.fleet import LoadedVersion, WorkerState
from safetensors.numpy import load as load_numpy
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.sdk.faulty import FaultyIngest, cut, refuse, running

QUICK = Retries(budget_s=20, outage_budget_s=20, first_pause_s=0.01, max_pause_s=0.05)
CONFIG = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": {"v_proj", "q_proj"}}


@pytest.fixture
def ingest() -> FaultyIngest:
    return FaultyIngest()


@pytest.fixture
def url(ingest: FaultyIngest) -> Iterator[str]:
    with running(ingest) as server:
        yield server.url


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, "key", retries=QUICK) as connected:
        yield connected


@pytest.fixture
async def async_client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, "key", retries=QUICK) as connected:
        yield connected


def held(release: threading.Event, begun: threading.Event) -> Any:
    """A fault that lets nothing pass until it is released."""

    async def fault(_: Request) -> Response | None:
        begun.set()
        await asyncio.to_thread(release.wait, 20)
        return None

    return fault


# -- what is copied ---------------------------------------------------------------------------------


def test_a_snapshot_is_all_that_blocks_and_what_is_published(ingest: FaultyIngest, client: Client) -> None:
    """The optimizer steps on while nothing has left the machine; the bytes of the step are published."""
    weights = {"w": np.arange(4, dtype=np.float32), "b": np.zeros(2, np.float32)}
    release, begun = threading.Event(), threading.Event()
    ingest.faults.append(held(release, begun))
    publishing = client.weights.publish("p", weights, step=3, block=False)
    assert begun.wait(10)
    weights["w"] += 1  # in place, as an optimizer does
    assert not publishing.done()
    with pytest.raises(DeadlineExceeded, match="still on its way"):
        publishing.result(timeout=0.01)
    release.set()
    assert publishing.result(timeout=10).version == 1
    (file,) = ingest.files.values()
    assert load_numpy(file)["w"].tolist() == [0, 1, 2, 3]
    assert publishing.wait_live(timeout=10).version == 1


def test_publications_beside_the_trainer_keep_their_order_and_are_two(ingest: FaultyIngest, client: Client) -> None:
    release, begun = threading.Event(), threading.Event()
    ingest.faults.append(held(release, begun))
    pending = [client.weights.publish("p", {"w": np.full(1, n, np.float32)}, step=n, block=False) for n in range(2)]
    with pytest.raises(DeadlineExceeded):
        client.weights.publish("p", {"w": np.zeros(1, np.float32)}, block=False, timeout=0.05)
    release.set()
    assert [one.result(timeout=10).version for one in pending] == [1, 2]
    assert [terms["step"] for terms in ingest.uploads.values()] == [0, 1]
    assert client.weights.publish("p", {"w": np.zeros(1, np.float32)}, block=False).result(10).version == 3


def test_torch_tensors_of_every_kind_arrive_as_they_are(ingest: FaultyIngest, client: Client) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load

    embedding = torch.nn.Parameter(torch.randn(6, 4).to(torch.bfloat16))
    state = {
        "lm_head.weight": embedding,  # before the name the base has
        "model.embed_tokens.weight": embedding,
        "transposed": torch.randn(3, 5).t(),
        "view": torch.randn(10)[2:6],
        "array": np.ones(3, np.float32),
    }
    client.weights.publish("p", state)
    found = {name: tensor for file in ingest.files.values() for name, tensor in load(file).items()}
    assert set(found) == set(state) - {"lm_head.weight"}
    for name, tensor in found.items():
        assert torch.equal(tensor, torch.as_tensor(state[name])), name
        assert tensor.dtype == torch.as_tensor(state[name]).dtype


def test_a_state_of_several_gigabytes_would_be_cut_between_tensors(
    ingest: FaultyIngest, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgrid.weights_upload.SHARD_BYTES", 100)
    state = {f"t{n}": np.full(10, n, np.float32) for n in range(5)} | {"large": np.zeros(50, np.float32)}
    client.weights.publish("p", state)
    sizes = {name: sorted(load_numpy(content)) for name, content in sorted(ingest.files.items())}
    assert list(sizes.values()) == [["t0", "t1"], ["t2", "t3"], ["t4"], ["large"]]
    assert next(iter(sizes)) == "model-00000-00001.safetensors"


def test_shared_memory_is_written_once_and_equal_values_are_not_shared() -> None:
    whole = np.ones((2, 3), np.float32)
    state = {
        "lm_head.weight": whole,
        "a": whole,
        "b": whole,
        "same": whole.copy(),
        "half": whole[:1],
        "turned": whole.T,
    }
    assert list(distinct(state)) == ["a", "same", "half", "turned"]
    assert list(distinct({"a": np.empty(0), "b": np.empty(0)})) == ["a", "b"]


@pytest.mark.parametrize("bad", [{"w": 1}, {"w": [1.0]}, {}, {"w": np.array(["x"])}, {"w": np.zeros(2, np.complex128)}])
def test_what_is_no_tensor_is_refused_before_anything_is_published(
    ingest: FaultyIngest, client: Client, bad: dict[str, Any]
) -> None:
    for block in (True, False):
        with pytest.raises(ConfigurationError):
            client.weights.publish("p", bad, block=False).result(10) if not block else client.weights.publish("p", bad)
    assert not ingest.committed


# -- adapters ---------------------------------------------------------------------------------------


class Config:
    """As PEFT's LoraConfig: sets and enums inside."""

    class Task(enum.StrEnum):
        CAUSAL_LM = "CAUSAL_LM"

    def to_dict(self) -> dict[str, Any]:
        return {**CONFIG, "task_type": self.Task.CAUSAL_LM}


def test_an_adapter_from_memory_is_written_as_peft_saves_it(ingest: FaultyIngest, client: Client) -> None:
    state = {"base_model.model.q_proj.lora_A.default.weight": np.ones((1, 2), np.float32)}
    for config in (Config(), CONFIG):
        client.weights.publish("p", state, kind="lora", adapter_config=config, base_version=4)
        assert set(ingest.files) == {"adapter_model.safetensors", "adapter_config.json"}
        written = json.loads(ingest.files["adapter_config.json"])
        assert written.get("task_type", "CAUSAL_LM") == "CAUSAL_LM"
        assert written["target_modules"] == ["q_proj", "v_proj"]
        assert list(load_numpy(ingest.files["adapter_model.safetensors"])) == ["base_model.model.q_proj.lora_A.weight"]
    assert [(terms["kind"], terms["base_version"]) for terms in ingest.uploads.values()] == [("lora", 4)] * 2
    with pytest.raises(ConfigurationError, match="adapter_config"):
        client.weights.publish("p", state, kind="lora")


def test_a_folder_says_what_it_is(ingest: FaultyIngest, client: Client, tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 1}))
    (tmp_path / "optimizer.pt").write_bytes(b"the trainer's own")
    client.weights.publish("p", tmp_path)
    assert ingest.files == {"adapter_model.safetensors": b"adapter", "adapter_config.json": b'{"r": 1}'}
    with pytest.raises(ConfigurationError, match=r"no \*.safetensors"):
        client.weights.publish("p", tmp_path, kind="full")
    with pytest.raises(ConfigurationError, match=r"no \*.safetensors"):
        client.weights.publish("p", tmp_path / "optimizer.pt")
    (tmp_path / "model.safetensors").write_bytes(b"whole")
    ingest.files.clear()
    client.weights.publish("p", tmp_path, kind="full")
    assert ingest.files == {"model.safetensors": b"whole"}


# -- ranks ------------------------------------------------------------------------------------------


def test_ranks_publish_one_version_and_the_last_is_waited_for(ingest: FaultyIngest, client: Client) -> None:
    arrived = threading.Event()

    def rank_one() -> None:
        arrived.wait(10)
        with client.weights.begin("p", upload="step-1", rank=1, world=2) as upload:
            upload.put("b", np.ones(2, np.float32))

    other = threading.Thread(target=rank_one)
    other.start()
    with client.weights.begin("p", upload="step-1", rank=0, world=2) as upload:
        upload.put("a", np.ones(2, np.float32))
        with pytest.raises(UploadIncomplete) as missing:
            upload.commit(timeout=0.2)
        assert missing.value.limit == "missing=[1]"
        assert missing.value.retryable
        arrived.set()
        assert upload.commit(timeout=10).version == 1
    other.join(10)
    assert set(ingest.files) == {f"model-0000{rank}-00001.safetensors" for rank in (0, 1)}
    assert set(ingest.shards["step-1"]) == {0, 1}


def test_an_exception_inside_publishes_nothing(ingest: FaultyIngest, client: Client) -> None:
    with pytest.raises(ZeroDivisionError), client.weights.begin("p") as upload:  # noqa: PT012
        upload.put("a", np.ones(2, np.float32))
        raise ZeroDivisionError
    assert not ingest.shards
    with pytest.raises(ConfigurationError, match="has ended"):
        upload.put("b", np.ones(2, np.float32))
    for wrong in ({"world": 2}, {"rank": 1}, {"kind": "deltas"}):
        with pytest.raises(ConfigurationError):
            client.weights.begin("p", **wrong)
    with client.weights.begin("p") as upload:
        upload.put("a", np.ones(2, np.float32))
        with pytest.raises(ConfigurationError, match="twice"):
            upload.put("a", np.ones(2, np.float32))


def test_a_refused_file_ends_the_publication_with_its_reason(ingest: FaultyIngest, client: Client) -> None:
    async def let_it_begin(_: Request) -> None:
        return None

    ingest.faults.extend([let_it_begin, refuse(400, "invalid_request", retryable=False, param="body")])
    with pytest.raises(InvalidRequest) as refused:
        client.weights.publish("p", {"w": np.ones(2, np.float32)})
    assert refused.value.field == "body"
    assert not ingest.committed


# -- live -------------------------------------------------------------------------------------------


def worker(name: str, *versions: tuple[int, str, bool], **more: Any) -> WorkerState:
    loaded = tuple(
        LoadedVersion(policy="p", version=version, kind=CheckpointKind(kind), current=current)
        for version, kind, current in versions
    )
    fields = {"incarnation": "1", "pool": "x", "engine": "scripted", "device": "cpu", "slots": 1}
    return WorkerState(worker=name, loaded=loaded, **{**fields, **more})


def policy(desired: int, *workers: WorkerState) -> Policy:
    return Policy(policy="p", desired=desired, newest=9, workers=workers)


OLD, NEW = worker("old", (1, "full", True)), worker("new", (2, "full", True))


def test_A44_a_version_is_live_when_all_in_rotation_or_enough_serve_it() -> None:
    assert live_on(policy(2, NEW), 2)
    assert not live_on(policy(2, NEW, OLD), 2)
    assert live_on(policy(2, NEW, OLD), 2, min_workers=1)
    assert not live_on(policy(2, NEW, OLD), 2, min_workers=2)
    assert live_on(policy(2, NEW, worker("ill", (1, "full", True), quarantined="x")), 2)
    assert live_on(policy(2, NEW, worker("leaving", (1, "full", True), draining=True)), 2)
    assert not live_on(policy(2), 2)
    assert not live_on(policy(2, worker("ill", (2, "full", True), quarantined="x")), 2)


def test_A44_adapters_later_versions_and_ways_back_are_told_apart() -> None:
    beside = worker("w", (1, "full", False), (2, "lora", False), (3, "lora", True))
    for version in (1, 2, 3):
        assert live_on(policy(3, beside), version)
    assert not live_on(policy(4, beside), 4)
    assert live_on(policy(5, worker("w", (5, "full", True))), 4), "superseded by what runs"
    assert not live_on(policy(1, NEW), 1), "the fleet has yet to go back"


def test_waiting_ends_with_the_reason_of_a_refusal_or_a_way_back(ingest: FaultyIngest, client: Client) -> None:
    version = client.weights.publish("p", {"w": np.ones(2, np.float32)})
    ingest.desired = 0
    why = {"code": "invalid_request", "message": "tensor w is not finite", "field": "w"}
    ingest.standing = {"status": "refused", "error": why}
    with pytest.raises(VersionRefused, match="not finite") as refused:
        version.wait_live(timeout=10)
    assert (refused.value.code, refused.value.field) == ("invalid_request", "w")
    ingest.standing = {"status": "rolled_back"}
    with pytest.raises(VersionRolledBack):
        version.wait_live(timeout=10)
    ingest.standing = {"status": "rolled_back", "error": {**why, "code": "expired", "field": "rollout"}}
    with pytest.raises(VersionRolledBack) as back:
        version.wait_live(timeout=10)
    assert (back.value.code, back.value.field) == ("expired", "rollout")


def test_A44_what_a_server_has_not_heard_of_yet_is_no_proof() -> None:
    """The way back to 1 was written as revision 8; a server that still shows 7 seems to have superseded it."""
    wait = LiveWait("p", 1, 10, None, revision=8)
    assert not wait.accept(msgspec.structs.replace(policy(2, NEW), revision=7))
    assert not wait.accept(msgspec.structs.replace(policy(1, NEW), revision=8))
    assert wait.accept(msgspec.structs.replace(policy(1, OLD), revision=8))


# -- asyncio ----------------------------------------------------------------------------------------


async def test_the_async_client_publishes_with_the_same_words(ingest: FaultyIngest, async_client: AsyncClient) -> None:
    weights = {"w": np.arange(3, dtype=np.float32)}
    ingest.faults.extend([cut, cut])
    assert (await (await async_client.weights.publish("p", weights)).live(timeout=10)).version == 1
    publishing = await async_client.weights.publish("p", weights, block=False)
    weights["w"] += 1
    assert (await publishing.result(timeout=10)).version == 2
    assert (await publishing.live(timeout=10)).version == 2
    async with async_client.weights.begin("p", upload="step-1", world=1) as upload:
        await upload.put("w", weights["w"])
        assert (await upload.commit(timeout=10)).version == 3
    with pytest.raises(ZeroDivisionError):
        async with async_client.weights.begin("p", upload="step-2") as upload:
            raise ZeroDivisionError
    assert "step-2" not in ingest.shards


async def test_a_cancelled_publish_publishes_nothing(ingest: FaultyIngest, async_client: AsyncClient) -> None:
    release, begun = threading.Event(), threading.Event()
    ingest.faults.append(held(release, begun))
    task = asyncio.create_task(async_client.weights.publish("p", {"w": np.ones(2, np.float32)}))
    await asyncio.to_thread(begun.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not ingest.committed


def test_reading_a_source_copies_only_when_asked() -> None:
    weights = {"w": np.ones(2, np.float32)}
    assert read_source(weights, None, None, copy=False).tensors["w"] is weights["w"]
    assert read_source(weights, None, None, copy=True).tensors["w"] is not weights["w"]
    assert read_source(weights, None, None, copy=True).bytes == 8
    assert load_numpy(serialised(weights))["w"].tolist() == [1, 1]
