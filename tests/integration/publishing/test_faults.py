"""Every fault that ends at the publisher: a typed error there, and the fleet serves the old version truthfully (A43, A44, I4)."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid import Client, Retries, Unreachable, VersionRefused
from rollgrid.errors import InvalidRequest, RollgridAPIError, Unsupported, UploadIncomplete, VersionUnavailable
from rollgrid_weights.safetensors_header import MAX_HEADER

from tests.support.stack import POLICY, Stack
from tests.support.wire import wire

from .conftest import Fleet

NORM, EMBEDDING, QUERY = (
    "model.norm.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj",
)  # fmt: skip
State = dict[str, Any]
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}


def without(state: State) -> State:
    return {name: tensor for name, tensor in state.items() if name != NORM}


def with_nan(state: State) -> State:
    broken = state[EMBEDDING].copy()
    broken[3, 5] = np.nan
    return {**state, EMBEDDING: broken}


STATES: dict[str, tuple[Callable[[State], State], str, str]] = {
    "missing tensor": (without, NORM, "missing"),
    "unknown tensor": (
        lambda state: {**state, "optimizer.exp_avg": state[NORM].copy()},
        "optimizer.exp_avg",
        "not one of the base",
    ),
    "wrong shape": (lambda state: {**state, NORM: state[NORM][:-1]}, NORM, "shape"),
    "wrong dtype": (lambda state: {**state, NORM: state[NORM].astype(np.float64)}, NORM, "dtype F64"),
    "NaN": (with_nan, EMBEDDING, "not finite"),
}


@pytest.mark.parametrize("fault", STATES)
def test_A43_wrong_tensors_are_refused_by_name(client: Client, fleet: Fleet, tensors: State, fault: str) -> None:
    spoil, field, says = STATES[fault]
    published = client.weights.publish(POLICY, spoil(tensors))
    with pytest.raises(VersionRefused, match=says) as refused:
        published.wait_live(timeout=60)
    assert (refused.value.code, refused.value.field) == ("invalid_request", field)
    state = client.weights.version(POLICY, published.version)
    assert (state.status, state.error and state.error.field) == ("refused", field)
    fleet.assert_truthful()


def test_A43_an_oversize_header_is_refused_unread(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes((MAX_HEADER + 1).to_bytes(8, "little") + b"{}")
    with pytest.raises(VersionRefused) as refused:
        client.weights.publish(POLICY, path).wait_live(timeout=60)
    assert (refused.value.code, refused.value.limit) == ("limit_exceeded", f"{MAX_HEADER} bytes")
    fleet.assert_truthful()


@pytest.mark.parametrize("name", ["optimizer.pt", "pytorch_model.bin", "weights.pkl", "rng_state.pth", "modeling.py"])
def test_A40_optimizer_state_pickles_and_code_never_get_in(client: Client, tensors: State, name: str) -> None:
    with pytest.raises(Unsupported) as refused, client.weights.begin(POLICY) as upload:  # noqa: PT012
        upload.put(NORM, tensors[NORM])
        upload.put_bytes(name, b"\x80\x04.")
        upload.commit()
    assert refused.value.field == "name"


def test_A43_a_byte_that_flips_on_its_way_is_sent_again_or_refused(
    pipe: Stack, client: Client, fleet: Fleet, tensors: State
) -> None:
    with wire(pipe.url) as bad, Client(bad.url, retries=Retries(budget_s=30, outage_budget_s=30)) as publisher:
        bad.every, bad.faults = 200_000, 1000
        with pytest.raises(InvalidRequest, match="not uploaded with these bytes") as refused:
            publisher.weights.publish(POLICY, tensors)
        assert refused.value.field == "files[0]"
        assert bad.suffered
        fleet.assert_truthful()
        bad.faults = 1
        publisher.weights.publish(POLICY, tensors).wait_live(timeout=60)
        assert bad.faults == 0


def test_A43_an_interrupted_upload_leaves_nothing_and_is_sent_again(pipe: Stack, fleet: Fleet, tensors: State) -> None:
    with wire(pipe.url) as bad, Client(bad.url, retries=Retries(budget_s=1, outage_budget_s=1)) as publisher:
        bad.every, bad.cuts, bad.faults = 200_000, True, 1000
        with pytest.raises(Unreachable):
            publisher.weights.publish(POLICY, tensors, upload="interrupted")
        fleet.assert_truthful()
        bad.faults = 1
        before = bad.suffered
        version = publisher.weights.publish(POLICY, tensors, upload="interrupted").wait_live(timeout=60)
        assert bad.suffered == before + 1
        assert publisher.weights.publish(POLICY, tensors, upload="interrupted").version == version.version


def test_A43_one_of_four_ranks_dies(client: Client, fleet: Fleet, tensors: State) -> None:
    names = sorted(tensors)

    def rank(number: int, *, dies: bool = False) -> None:
        with client.weights.begin(POLICY, upload="four", rank=number, world=4, step=4) as upload:
            for name in names[number::4]:
                upload.put(name, tensors[name])
            if dies:
                raise ChildProcessError

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, (1, 2)))
        with pytest.raises(ChildProcessError):
            rank(3, dies=True)
    with client.weights.begin(POLICY, upload="four", rank=0, world=4, step=4) as upload:
        for name in names[0::4]:
            upload.put(name, tensors[name])
        with pytest.raises(UploadIncomplete) as missing:
            upload.commit(timeout=0.5)
        assert (missing.value.retryable, missing.value.limit) == (True, "missing=3")
        fleet.assert_truthful()
        late = threading.Thread(target=rank, args=(3,))
        late.start()
        version = upload.commit(timeout=60).wait_live(timeout=60)
        late.join(60)
    assert client.weights.version(POLICY, version.version).step == 4


def test_A43_two_publishers_race_for_a_number(client: Client, fleet: Fleet, tensors: State) -> None:
    number = client.policy(POLICY).newest + 5

    def publish(change: float) -> int | RollgridAPIError:
        try:
            return client.weights.publish(POLICY, {**tensors, NORM: tensors[NORM] + change}, version=number).version
        except VersionUnavailable as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(publish, (100.0, 200.0)))
    lost = [result for result in results if isinstance(result, VersionUnavailable)]
    assert len(lost) == 1
    assert number in results
    assert (lost[0].code, lost[0].field, lost[0].retryable) == ("version_unavailable", "version", False)
    with pytest.raises(VersionUnavailable):
        client.weights.publish(POLICY, tensors, version=number)
    fleet.publish({**tensors, NORM: tensors[NORM] + 300})
    fleet.assert_truthful()


def adapter(rank: int = 2, module: str = QUERY) -> State:
    """Of the tiny Llama: its q_proj is 64 by 64."""
    name = f"base_model.model.{module}"
    return {
        f"{name}.lora_A.weight": np.full((rank, 64), 0.5, np.float32),
        f"{name}.lora_B.weight": np.full((64, rank), 0.25, np.float32),
    }


ADAPTERS: dict[str, tuple[State, dict[str, Any], str, str]] = {
    "modules_to_save": (adapter(), {"modules_to_save": ["lm_head"]}, "unsupported", "modules_to_save"),
    "dora": (adapter(), {"use_dora": True}, "unsupported", "use_dora"),
    "rank over the fleet's limit": (adapter(17), {"r": 17}, "limit_exceeded", "r"),
    "rank over any limit": (adapter(), {"r": 4096}, "limit_exceeded", "r"),
    "rank of the tensors": (adapter(3), {}, "invalid_request", f"base_model.model.{QUERY}.lora_A.weight"),
    "unknown target": (adapter(), {"target_modules": ["q_proj", "query_key_value"]}, "invalid_request", "target_modules"),
    "unknown module": (adapter(module="model.layers.9.self_attn.q_proj"), {}, "invalid_request", "base_model.model.model.layers.9.self_attn.q_proj"),
    "half of it": (dict(list(adapter().items())[:1]), {}, "invalid_request", f"base_model.model.{QUERY}"),
}  # fmt: skip


@pytest.mark.parametrize("fault", ADAPTERS)
def test_A43_adapters_that_are_not_plain_lora_on_this_base(client: Client, fleet: Fleet, fault: str) -> None:
    state, changes, code, field = ADAPTERS[fault]
    with pytest.raises((VersionRefused, InvalidRequest)) as refused:
        client.weights.publish(POLICY, state, adapter_config=CONFIG | changes).wait_live(timeout=60)
    assert isinstance(refused.value, VersionRefused | InvalidRequest)
    assert (refused.value.code, refused.value.field) == (code, field)
    fleet.assert_truthful()


def test_A43_an_adapter_sits_on_a_version_that_is_there(client: Client, fleet: Fleet) -> None:
    with pytest.raises(VersionUnavailable) as refused:
        client.weights.publish(POLICY, adapter(), adapter_config=CONFIG, base_version=10_000)
    assert refused.value.field == "base_version"
    fleet.assert_truthful()


def test_A43_a_good_adapter_is_served_as_its_bytes_say(client: Client, fleet: Fleet, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    folder = tmp_path / "adapter"
    folder.mkdir()
    save_file(adapter(), str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    base = fleet.version
    version = fleet.adapter(folder, step=9)
    fleet.assert_truthful()
    listed = {one.version: one for one in client.weights.versions(POLICY).data}
    assert (listed[version].kind, listed[version].base_version, listed[version].step) == ("lora", base, 9)
    assert (listed[base].kind, listed[base].status) == ("full", "superseded")
