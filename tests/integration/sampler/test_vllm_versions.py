"""Real vLLM: after every refresh, full, delta or LoRA, the answers are those of that version's weights.

One engine per model does it all: two full versions, three deltas, five adapters, prompts that were cached under
the version before.  With a safeguard taken out the same body fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_sampler.cold_check import ColdChecks
from rollgrid_sampler.engines.base import AdapterGone, Generated, RequestFailed, WeightsRefused
from rollgrid_sampler.settings import SamplerSettings

from tests.support.tiny_models import TinyModel, tiny_model

from .flawed_engine import EXTENSION, Forgetful
from .tiny_engine import MIB, request
from .weight_versions import full_version, lora_version, merged, mismatch, model_of, one_tensor_changed, rebuilt_version

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio, pytest.mark.timeout(600)]

SHORT = [5, 6, 7, 8]
LONG = [(17 * place + 3) % 480 + 5 for place in range(70)]
"""Two KV blocks and a bit."""
MODELS = [TinyModel(), TinyModel("qwen2"), TinyModel("qwen3"), TinyModel(tied=False)]
FULLS = 2
"""Versions that are sent whole; those after them are a chain of deltas."""
MODES = [OnRefresh.WAIT, OnRefresh.ABORT, OnRefresh.KEEP]


def settings(base: TinyModel, **other: Any) -> SamplerSettings:
    return SamplerSettings(
        model=tiny_model(base), slots=16, kv_cache_bytes=32 * MIB, block_size=32, max_loras=2, max_lora_rank=8, **other
    )


@asynccontextmanager
async def started(folder: Path, version: int = 0, **other: Any) -> AsyncIterator[Any]:
    from rollgrid_sampler.engines.vllm import VllmEngine

    engine = VllmEngine(settings(other.pop("base"), **other), EXTENSION)
    try:
        await engine.start(version, folder)
        yield engine
    finally:
        await engine.close()


async def ask(engine: Any, prompt: list[int], adapter: int | None = None) -> Generated:
    asked = request(prompt, temperature=0.0, max_tokens=12, ignore_eos=True)
    result: Generated = await engine.generate(msgspec.structs.replace(asked, adapter=adapter))
    return result


async def worst(engine: Any, model: Any, version: int, adapter: int | None = None) -> float:
    """The worst mismatch of a short prompt, a long one, and the long one again from the cache."""
    far = 0.0
    for prompt, cached in ((SHORT, 0), (LONG, 0), (LONG, 64)):
        result = await ask(engine, prompt, adapter)
        assert [(s.version, s.start, s.end) for s in result.version_spans] == [(version, 0, 12)]
        assert result.cached_tokens == cached, "nothing of an older version is reused, and what is new is"
        far = max(far, mismatch(model, prompt, result))
    return far


# One engine start each is most of a test's time: what needs the same engine stays together.


@pytest.mark.parametrize("base", MODELS, ids=lambda m: f"{m.architecture}-{'tied' if m.tied else 'untied'}")
async def test_each_version_answers_with_its_own_weights(base: TinyModel, tmp_path: Path) -> None:
    """A02, A18, A39, A40: full versions, deltas on them, and LoRA, prefixes cached under the version before, <= 1e-4."""
    async with started(tiny_model(base), base=base) as engine:
        prints = {0: engine.loaded.fingerprint}
        model = model_of(tiny_model(base))
        assert await worst(engine, model, 0) <= 1e-4
        folder = tiny_model(base)
        for version in range(1, 6):
            before, whole = folder, full_version(base, version, tmp_path)
            folder = rebuilt_version(before, whole) if version > FULLS else whole
            prints[version] = (await engine.load_version(version, folder, MODES[version % 3])).fingerprint
            model = model_of(whole)
            assert await worst(engine, model, version) <= 1e-4
            if folder != whole:
                again = await engine.load_version(version, whole, OnRefresh.WAIT)
                assert again.fingerprint == prints[version], "a rebuilt state is the one that was sent whole"
        for version in range(6, 11):
            await engine.remove_adapter(version - 2, OnRefresh.WAIT)
            adapter = lora_version(base, version, tmp_path / f"lora-{version}")
            prints[version] = (await engine.add_adapter(version, adapter)).adapters[version]
            assert await worst(engine, merged(model, adapter), version, adapter=version) <= 1e-4
        assert len(set(prints.values())) == 11, "every version has a fingerprint of its own"
        assert sorted(engine.loaded.adapters) == [9, 10]
        mixed = await asyncio.gather(ask(engine, LONG), ask(engine, LONG, 9), ask(engine, LONG, 10))
        assert mismatch(model, LONG, mixed[0]) <= 1e-4, "the weights without an adapter answer as before"
        assert mismatch(merged(model, tmp_path / "lora-9"), LONG, mixed[1]) <= 1e-4
        assert mismatch(merged(model, tmp_path / "lora-10"), LONG, mixed[2]) <= 1e-4
        if base.architecture == "llama":
            await lose_a_safeguard(engine, base, tmp_path)
        if base == TinyModel():
            await new_weights_below_adapters(engine, base, tmp_path)


async def lose_a_safeguard(engine: Any, base: TinyModel, root: Path) -> None:
    """The body above fails without the repair of the tied head, and without salt and clearing."""
    left, right = full_version(base, 11, root), full_version(base, 12, root)
    if base.tied:
        await engine.llm.collective_rpc("t_leave_head", args=(True,))
        broken = await engine.load_version(11, left, OnRefresh.KEEP)
        assert mismatch(model_of(left), SHORT, await ask(engine, SHORT)) > 0.1, "the old head answers"
        await engine.llm.collective_rpc("t_leave_head", args=(False,))
        whole = await engine.load_version(11, left, OnRefresh.KEEP)
        assert whole.fingerprint != broken.fingerprint, "one stale tensor is seen"
    real, engine.llm = engine.llm, Forgetful(engine.llm)
    try:
        await engine.load_version(11, left, OnRefresh.KEEP)
        await ask(engine, LONG)
        await engine.load_version(12, right, OnRefresh.KEEP)
        stale = await ask(engine, LONG)
        assert stale.cached_tokens == 64
        assert mismatch(model_of(right), LONG, stale) > 0.1, "old KV under new weights"
        for version in (13, 14):
            await engine.add_adapter(version, lora_version(base, version, root / f"lora-{version}"))
            stale = await ask(engine, LONG, version)
        newer = merged(model_of(right), root / "lora-14")
        assert mismatch(newer, LONG, stale) > 0.1, "the older adapter's KV"
    finally:
        engine.llm = real


async def new_weights_below_adapters(engine: Any, base: TinyModel, root: Path) -> None:
    """A refresh of the weights drops the adapters for good; the same folder may come back on the new ones."""
    before = engine.loaded.adapters[14]
    folder = full_version(base, 15, root)
    loaded = await engine.load_version(15, folder, OnRefresh.KEEP)
    assert loaded.adapters == {}
    assert not await engine.llm.list_loras()
    with pytest.raises(AdapterGone) as gone:
        await ask(engine, LONG, 14)
    assert gone.value.so_far.token_ids == []
    again = await engine.add_adapter(14, root / "lora-14")
    assert again.adapters[14] != before
    assert await worst(engine, merged(model_of(folder), root / "lora-14"), 14, adapter=14) <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_reloaded_cold_and_second_engines_have_one_fingerprint(dtype: str, tmp_path: Path) -> None:
    """A18, A44: bit-equal where the weights are, different after one changed tensor, in both types."""
    base = TinyModel()
    one, two = full_version(base, 1, tmp_path, dtype=dtype), full_version(base, 2, tmp_path, dtype=dtype)
    changed = one_tensor_changed(two, "model.layers.1.mlp.down_proj.weight", tmp_path / "changed")
    adapter = lora_version(base, 3, tmp_path / "lora")
    async with started(one, 1, base=base, dtype=dtype) as engine:
        first = engine.loaded.fingerprint
        second = (await engine.load_version(2, two, OnRefresh.WAIT)).fingerprint
        assert (await engine.load_version(4, changed, OnRefresh.WAIT)).fingerprint not in (first, second)
        assert (await engine.load_version(5, one, OnRefresh.WAIT)).fingerprint == first
        await engine.load_version(2, two, OnRefresh.WAIT)
        on_two = (await engine.add_adapter(3, adapter)).adapters[3]
        assert on_two not in (first, second)
        await engine.llm.update_weight_version("9")
        assert await engine._fingerprint(None) == second, "a label that moved before the bytes is seen"
        with pytest.raises(RequestFailed, match="labelled with weights"):
            await ask(engine, SHORT)
        await engine.llm.update_weight_version("2")
        checks = ColdChecks(settings(base, dtype=dtype, cold_check_every=1), engine.facts.fingerprint_class)
        assert checks.due()
        busy = asyncio.create_task(ask(engine, LONG))
        assert await checks.cold_fingerprint(3, two, adapter) == on_two
        await busy
        answer = await ask(engine, LONG, 3)
    async with started(two, 2, base=base, dtype=dtype) as other:
        assert other.loaded.fingerprint == second
        assert (await other.add_adapter(3, adapter)).adapters[3] == on_two
        again = await ask(other, LONG, 3)
        assert (again.token_ids, list(again.logprobs)) == (answer.token_ids, list(answer.logprobs))
        with pytest.raises(WeightsRefused) as refused:
            await other.add_adapter(3, tmp_path / "elsewhere")
        assert refused.value.intact
