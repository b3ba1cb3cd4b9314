"""Real vLLM: what is being generated while weights and LoRA versions come and go."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_sampler.engines.base import AdapterGone, Delta, Generated, GenerationRequest, WeightsRefused
from rollgrid_sampler.settings import SamplerSettings

from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import until

from .flawed_engine import EXTENSION
from .tiny_engine import MIB, request
from .weight_versions import full_version, lora_version, merged, mismatch, model_of, one_tensor_changed, seams_mismatch

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

BASE = TinyModel()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Full versions 0 (the base), 1 and 2, LoRA versions 11 and 12 on the base."""
    root = tmp_path_factory.mktemp("versions")
    full = {version: full_version(BASE, version, root) for version in (1, 2)}
    adapters = {version: lora_version(BASE, version, root / f"lora-{version}") for version in (11, 12)}
    return {0: tiny_model(BASE)} | full | adapters


@pytest.fixture(scope="module")
def models(folders: dict[int, Path]) -> dict[int, Any]:
    """What transformers makes of them."""
    full = {version: model_of(folders[version]) for version in (0, 1, 2)}
    return full | {version: merged(full[0], folders[version]) for version in (11, 12)}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folders: dict[int, Path]) -> AsyncIterator[Any]:
    from rollgrid_sampler.engines.vllm import VllmEngine

    settings = SamplerSettings(
        model=folders[0], slots=64, kv_cache_bytes=32 * MIB, block_size=32, max_loras=2, max_lora_rank=8
    )
    made = VllmEngine(settings, EXTENSION)
    await made.start(0, folders[0])
    yield made
    await made.close()


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def base_again(engine: Any, folders: dict[int, Path]) -> AsyncIterator[None]:
    yield
    if engine.loaded.version != 0 or engine.loaded.adapters:
        await engine.load_version(0, folders[0], OnRefresh.ABORT)


async def told(engine: Any, model: Any) -> float:
    return mismatch(model, [5, 6, 7, 8], await engine.generate(request(temperature=0.0, max_tokens=8, ignore_eos=True)))


async def test_what_is_prepared_changes_nothing_before_it_is_loaded(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    """A20: weights are loaded beside generation; the pause only exchanges and proves them."""
    before, listener = engine.loaded, Told()
    running = asyncio.create_task(engine.generate(long(), listener))
    await listener.some()
    await engine.llm.collective_rpc("rg_prepare", args=(str(folders[2]),))
    assert await engine.llm.collective_rpc("rg_prepared", args=(60.0,)) == [""], "a load is helped along by waiting"
    await engine.prepare(1, folders[1])
    assert engine.loaded == before
    assert await told(engine, models[0]) <= 1e-4
    first = await engine.load_version(1, folders[1], OnRefresh.KEEP)
    assert engine.last_refresh.prepared_s > 0
    assert await told(engine, models[1]) <= 1e-4
    assert covers(await running)
    await engine.prepare(1, folders[1])
    assert (await engine.load_version(2, folders[2], OnRefresh.KEEP)).fingerprint != first.fingerprint
    assert await told(engine, models[2]) <= 1e-4, "not what was prepared, but what was asked for"
    assert (await engine.load_version(1, folders[1], OnRefresh.KEEP)).fingerprint == first.fingerprint


async def test_a_preparation_that_fails_or_is_given_up_leaves_the_weights_as_they_are(
    engine: Any, folders: dict[int, Path], models: dict[int, Any], tmp_path: Path
) -> None:
    """A43: refused with the old version whole, and the next one loads."""
    broken = tmp_path / "broken"
    shutil.copytree(folders[1], broken)
    (broken / "model.safetensors.index.json").write_text("{")  # vLLM reads it, the headers are good
    for step in (engine.prepare(1, broken), engine.load_version(1, broken, OnRefresh.KEEP)):
        with pytest.raises(WeightsRefused, match=r"version 1: .*JSONDecodeError") as refused:
            await step
        assert refused.value.intact
        assert await told(engine, models[0]) <= 1e-4
    given_up = asyncio.create_task(engine.prepare(1, folders[1]))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    await engine.load_version(2, folders[2], OnRefresh.KEEP)
    assert engine.last_refresh.prepared_s > 0, "beside generation again"
    assert await told(engine, models[2]) <= 1e-4


def long(
    tokens: int = 300, adapter: int | None = None, mode: OnRefresh | None = None, **sampling: Any
) -> GenerationRequest:
    asked = request(max_tokens=tokens, ignore_eos=True, **sampling)
    return msgspec.structs.replace(asked, adapter=adapter, on_refresh=mode)


def covers(result: Generated) -> bool:
    starts = [0, *(span.end for span in result.version_spans[:-1])]
    return [s.start for s in result.version_spans] == starts and result.version_spans[-1].end == len(result.token_ids)


class Told:
    """A streamed sample's listener; `begun` after the first portions."""

    def __init__(self) -> None:
        self.deltas: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        self.deltas.append(delta)

    async def some(self, tokens: int = 20) -> None:
        await until(lambda: sum(len(d.token_ids) for d in self.deltas) >= tokens, 60, "tokens of a streamed sample")


async def test_200_requests_over_ten_refreshes_all_finish_and_every_span_is_true(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    """A20, I4: each by its own mode; totals within max_tokens, as many logprobs as ids, KV of no other version."""
    modes = [None, OnRefresh.WAIT, OnRefresh.ABORT, OnRefresh.KEEP]
    lengths = [40 + 37 * number % 200 for number in range(200)]

    async def one(number: int) -> Generated:
        asked = long(lengths[number], mode=modes[number % 4], logprobs=2 if number % 5 == 0 else 0)
        listener = Told() if number % 3 == 0 else None
        result: Generated = await engine.generate(asked, listener)
        return result

    running = [asyncio.create_task(one(number)) for number in range(200)]
    for refresh in range(1, 11):
        loaded = await engine.load_version(refresh % 3, folders[refresh % 3], OnRefresh.KEEP)
        assert loaded.version == engine.loaded.version == refresh % 3
        ended = sum(task.done() for task in running)
        await until(partial(more_ended, running, ended), 60, "progress between two refreshes")
    results = await asyncio.gather(*running)
    assert [len(r.token_ids) for r in results] == lengths
    assert all(len(r.logprobs) == len(r.token_ids) and covers(r) for r in results)
    assert max(len(r.version_spans) for r in results) > 2, "some lived through several"
    assert max(seams_mismatch(models, [5, 6, 7, 8], r) for r in results[::3]) <= 1e-4


def more_ended(running: list[asyncio.Task[Generated]], ended: int) -> bool:
    return sum(task.done() for task in running) > ended or all(task.done() for task in running)


async def test_each_request_goes_its_own_way_through_a_refresh(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    """A21: one waits, one is aborted and goes on behind its tokens, one is kept; what comes late waits outside."""
    told = {mode: Told() for mode in OnRefresh}
    lengths = {OnRefresh.WAIT: 120, OnRefresh.ABORT: 400, OnRefresh.KEEP: 400}
    tasks = {
        mode: asyncio.create_task(engine.generate(long(lengths[mode], mode=mode), told[mode])) for mode in OnRefresh
    }
    for listener in told.values():
        await listener.some()
    swap = asyncio.create_task(engine.load_version(1, folders[1], OnRefresh.WAIT))
    await until(lambda: not engine.flights._open.is_set(), 10, "the gate")
    late = asyncio.create_task(engine.generate(long(10)))
    await swap
    assert tasks[OnRefresh.WAIT].done()
    results = {mode: await task for mode, task in tasks.items()}
    versions = {mode: [span.version for span in result.version_spans] for mode, result in results.items()}
    assert versions == {OnRefresh.WAIT: [0], OnRefresh.ABORT: [0, 1], OnRefresh.KEEP: [0, 1]}
    assert [span.version for span in (await late).version_spans] == [1]
    for mode, result in results.items():
        assert len(result.token_ids) == len(result.logprobs) == lengths[mode]
        assert covers(result)
        assert seams_mismatch(models, [5, 6, 7, 8], result) <= 1e-4


async def test_one_that_cannot_go_on_exactly_starts_again(engine: Any, folders: dict[int, Path]) -> None:
    told = Told()
    asked = long(200, mode=OnRefresh.ABORT, repetition_penalty=1.1)
    running = asyncio.create_task(engine.generate(asked, told))
    await told.some()
    await engine.load_version(1, folders[1], OnRefresh.WAIT)
    result = await running
    assert [(s.version, s.start, s.end) for s in result.version_spans] == [(1, 0, 200)]
    assert any(delta.offset == 0 and not delta.token_ids for delta in told.deltas), "its listener is told"


async def test_who_waits_too_long_is_taken_away(
    engine: Any, folders: dict[int, Path], models: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine._settings, "swap_deadline_s", 0.05)
    told = Told()
    running = asyncio.create_task(engine.generate(long(450, mode=OnRefresh.WAIT), told))
    await told.some()
    await engine.load_version(1, folders[1], OnRefresh.WAIT)
    result = await running
    assert [span.version for span in result.version_spans] == [0, 1]
    assert seams_mismatch(models, [5, 6, 7, 8], result) <= 1e-4


async def test_adapters_come_while_generation_goes_on_and_disturb_nobody(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    """The probes of a new adapter run between two steps and give the KV blocks back as they were."""
    prints = [(await engine.add_adapter(v, folders[v])).adapters[v] for v in (11, 12)]
    await engine.remove_adapter(12, OnRefresh.WAIT)
    assert len(await engine.llm.list_loras()) == 1
    told = [Told() for _ in range(24)]
    on = [11 if number % 2 else None for number in range(24)]
    running = [asyncio.create_task(engine.generate(long(300, a), t)) for a, t in zip(on, told, strict=True)]
    for listener in told:
        await listener.some(5)
    busy = (await engine.add_adapter(12, folders[12])).adapters[12]
    assert not any(task.done() for task in running)
    assert busy == prints[1], "the same as on an idle engine"
    newer = await engine.generate(long(40, adapter=12))
    results = [*await asyncio.gather(*running), newer]
    for result, adapter in zip(results, [*on, 12], strict=True):
        version = adapter or 0
        assert [(s.version, s.start, s.end) for s in result.version_spans] == [(version, 0, len(result.token_ids))]
        assert mismatch(models[version], [5, 6, 7, 8], result, greedy=False) <= 1e-4


async def test_an_adapter_that_goes_lets_its_requests_end_or_hands_them_on(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    for version in (11, 12):
        await engine.add_adapter(version, folders[version])
    told = {version: Told() for version in (11, 12)}
    running = {v: asyncio.create_task(engine.generate(long(300, adapter=v), told[v])) for v in told}
    for listener in told.values():
        await listener.some()
    leaving = asyncio.create_task(engine.remove_adapter(11, OnRefresh.WAIT))
    await until(lambda: engine.adapters[11].retiring, 10, "the adapter to retire")
    with pytest.raises(AdapterGone):
        await engine.generate(long(10, adapter=11))
    await engine.remove_adapter(12, OnRefresh.ABORT)
    with pytest.raises(AdapterGone) as gone:
        await running[12]
    assert (await leaving).adapters == {}
    assert [(s.version, s.end) for s in (await running[11]).version_spans] == [(11, 300)]
    sent = gone.value.so_far
    assert sent.token_ids == [token for delta in told[12].deltas for token in delta.token_ids]
    assert [(s.version, s.start, s.end) for s in sent.version_spans] == [(12, 0, len(sent.token_ids))]
    await engine.add_adapter(11, folders[11])
    on = await engine.generate(msgspec.structs.replace(long(300, adapter=11), sent=sent))
    assert [span.version for span in on.version_spans] == [12, 11]
    assert len(on.token_ids) == 300
    assert seams_mismatch(models, [5, 6, 7, 8], on) <= 1e-4


async def test_a_refresh_of_the_weights_takes_the_requests_of_its_adapters(
    engine: Any, folders: dict[int, Path]
) -> None:
    await engine.add_adapter(11, folders[11])
    told = Told()
    kept = asyncio.create_task(engine.generate(long(300, adapter=11, mode=OnRefresh.KEEP), told))
    whole = asyncio.create_task(engine.generate(long(300, adapter=11, mode=OnRefresh.ABORT)))
    await told.some()
    assert (await engine.load_version(1, folders[1], OnRefresh.WAIT)).adapters == {}
    for task in (kept, whole):
        with pytest.raises(AdapterGone) as gone:
            await task
        assert len(gone.value.so_far.token_ids) == len(gone.value.so_far.logprobs) > 0


async def test_what_can_be_refused_from_the_headers_disturbs_nobody(
    engine: Any, folders: dict[int, Path], tmp_path: Path
) -> None:
    """A43: a missing tensor (which vLLM would only warn of), a wrong shape, no file, adapters that do not fit."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folders[1] / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for case, changed in (
        ("missing", {k: v for k, v in tensors.items() if k != name}),
        ("shape", tensors | {name: tensors[name][:-1].clone()}),
        ("strange", tensors | {"model.extra.weight": tensors[name].clone()}),
    ):
        folder = one_tensor_changed(folders[1], name, tmp_path / case)
        save_file(changed, folder / "model.safetensors")
        with pytest.raises(WeightsRefused, match="extra" if case == "strange" else "up_proj") as refused:
            await engine.load_version(3, folder, OnRefresh.WAIT)
        assert refused.value.intact
    with pytest.raises(WeightsRefused) as refused:
        await engine.load_version(3, tmp_path, OnRefresh.WAIT)
    assert refused.value.intact
    for version, folder in ((13, tmp_path), (13, lora_version(TinyModel("llama", seed=5), 13, tmp_path / "cut"))):
        (folder / "adapter_model.safetensors").write_bytes(b"not safetensors")
        with pytest.raises(WeightsRefused) as refused:
            await engine.add_adapter(version, folder)
        assert refused.value.intact
    assert (engine.loaded.version, engine.loaded.adapters) == (0, {})


async def test_while_the_weights_are_in_doubt_nobody_is_answered(
    engine: Any, folders: dict[int, Path], models: dict[int, Any]
) -> None:
    told = Told()
    kept = asyncio.create_task(engine.generate(long(400), told))
    await told.some()
    await engine.llm.collective_rpc("t_tear", args=(True,))
    with pytest.raises(WeightsRefused, match="torn") as refused:
        await engine.load_version(2, folders[2], OnRefresh.KEEP)
    await engine.llm.collective_rpc("t_tear", args=(False,))
    assert not refused.value.intact
    assert engine.loaded.version == -1
    late = asyncio.create_task(engine.generate(long(10)))
    before = len(told.deltas)
    done, _ = await asyncio.wait({kept, late}, timeout=0.5)
    assert not done
    assert len(told.deltas) == before
    with pytest.raises(WeightsRefused):
        await engine.add_adapter(11, folders[11])
    await engine.load_version(1, folders[1], OnRefresh.WAIT)
    assert [span.version for span in (await late).version_spans] == [1]
    result = await kept
    assert [span.version for span in result.version_spans] == [0, 1]
    assert seams_mismatch(models, [5, 6, 7, 8], result) <= 1e-4
