"""Real vLLM on a tiny model: what comes out, against transformers; weights swapped in place."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_contracts.samples import FinishReason
from rollgrid_runtime.errors import RollgridError
from rollgrid_sampler.engines.base import Generated, RequestFailed, WeightsRefused

from tests.support.tiny_models import EOS_ID, tiny_model

from .tiny_engine import NEW, OLD, difference, engine, reference, request

__all__ = ["engine"]

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


def check_whole(result: Generated, version: int = 0) -> None:
    assert len(result.token_ids) == len(result.logprobs) > 0
    assert [(s.version, s.start, s.end) for s in result.version_spans] == [(version, 0, len(result.token_ids))]
    assert result.first_token_at > 0


async def test_every_end_gives_its_reason_with_ids_and_logprobs_of_equal_length(engine: Any) -> None:
    length = await engine.generate(request(max_tokens=7, ignore_eos=True))
    assert (length.finish_reason, length.stop_reason, len(length.token_ids)) == (FinishReason.LENGTH, None, 7)

    eos = await engine.generate(request(logit_bias={str(EOS_ID): 100.0}))
    assert (eos.finish_reason, eos.stop_reason, eos.token_ids) == (FinishReason.STOP, None, [EOS_ID])

    stop_id = await engine.generate(request(seed=11, stop_token_ids=tuple(range(3, 256)), max_tokens=64))
    assert stop_id.finish_reason is FinishReason.STOP
    assert stop_id.stop_reason == stop_id.token_ids[-1]

    free = await engine.generate(request(seed=12, max_tokens=40, ignore_eos=True))
    word = next(c for c in free.text[5:] if c.isascii() and c.isprintable() and c not in free.text[:3])
    stopped = await engine.generate(request(seed=12, max_tokens=40, ignore_eos=True, stop=(word,)))
    assert (stopped.finish_reason, stopped.stop_reason) == (FinishReason.STOP, word)
    assert word not in stopped.text
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]

    for result in (length, eos, stop_id, free, stopped):
        check_whole(result)


async def test_text_is_the_ids_decoded(engine: Any) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_model(OLD))
    plain = await engine.generate(request(seed=3, max_tokens=24))
    assert plain.text == tokenizer.decode(plain.token_ids, skip_special_tokens=True)
    ended = await engine.generate(request(logit_bias={str(EOS_ID): 100.0}, skip_special_tokens=False))
    assert ended.text == "<|im_end|>"


async def test_seeds_repeat_and_neighbours_never_share_one(engine: Any) -> None:
    """C03: the same seed gives the same tokens; n=8 gives eight samples no neighbouring group repeats."""

    async def group(seed: int) -> list[Generated]:
        return await asyncio.gather(
            *(engine.generate(request(seed=ids.sample_seed(seed, index), ignore_eos=True)) for index in range(8))
        )

    first, again, neighbour = await group(10), await group(10), await group(11)
    assert [r.token_ids for r in first] == [r.token_ids for r in again]
    assert [list(r.logprobs) for r in first] == [list(r.logprobs) for r in again]
    everything = {tuple(r.token_ids) for r in (*first, *neighbour)}
    assert len(everything) == 16


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_logprobs_match_transformers(engine: Any, temperature: float) -> None:
    prompts = [[5 + i, 9, 200 - i, 3] for i in range(10)]
    results = await asyncio.gather(
        *(engine.generate(request(p, seed=i, temperature=temperature, max_tokens=32)) for i, p in enumerate(prompts))
    )
    assert max(difference(OLD, p, r, temperature) for p, r in zip(prompts, results, strict=True)) <= 1e-4


async def test_top_logprobs_drop_what_is_not_finite(engine: Any) -> None:
    result = await engine.generate(request(seed=4, logprobs=5, top_k=2, max_tokens=6, ignore_eos=True))
    top = result.top_logprobs
    assert top is not None
    offsets = top.offsets.tolist()
    assert offsets == [0, 2, 4, 6, 8, 10, 12], "of five asked for two are finite under top_k=2"
    for position, token in enumerate(result.token_ids):
        row = dict(zip(top.token_ids.tolist(), top.logprobs.tolist(), strict=True))
        assert token in top.token_ids.tolist()[offsets[position] : offsets[position + 1]]
        assert row


async def test_128_seeded_requests_with_256_token_prompts_at_once(engine: Any) -> None:
    prompts = [[(7 * i + 3 * j) % 500 + 3 for j in range(256)] for i in range(128)]
    results = await asyncio.gather(
        *(engine.generate(request(p, seed=i + 1, max_tokens=12, ignore_eos=True)) for i, p in enumerate(prompts))
    )
    assert [len(r.token_ids) for r in results] == [12] * 128
    await engine.health()


async def test_a_refused_request_is_typed_and_harms_nobody(engine: Any) -> None:
    good = asyncio.create_task(engine.generate(request(seed=5, max_tokens=200, ignore_eos=True)))
    for changes, field in (({"temperature": -1.0}, "temperature"), ({"prompt_logprobs": 21}, "prompt_logprobs")):
        with pytest.raises(RequestFailed) as refused:
            await engine.generate(request(**changes))
        assert refused.value.code in (ErrorCode.INVALID_REQUEST, ErrorCode.UNSUPPORTED)
        assert refused.value.field == field
    for prompt in ([100_000], [5] * 600):
        with pytest.raises(RollgridError):
            await engine.generate(request(prompt))
    with pytest.raises(RequestFailed):
        await engine.generate(request(structured_output={"json": "no schema"}))
    check_whole(await good)


async def test_cancelling_frees_the_engine(engine: Any) -> None:
    tasks = [asyncio.create_task(engine.generate(request(max_tokens=400, ignore_eos=True))) for _ in range(64)]
    await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert all(task.cancelled() for task in tasks)
    assert engine.llm.get_num_unfinished_requests() == 0
    check_whole(await engine.generate(request(seed=1)))


async def test_reload_repairs_the_tied_head_and_the_fingerprint_tells(engine: Any) -> None:
    """C07, design section 8: new weights to 1e-4; vLLM alone keeps the old head; equal bytes, equal fingerprint."""
    prompt = [5, 6, 7, 8]
    first = engine.loaded.fingerprint
    loaded = await engine.load_version(1, tiny_model(NEW), OnRefresh.WAIT)
    assert loaded.version == 1
    assert loaded.fingerprint not in (None, first)
    result = await engine.generate(request(prompt, seed=6, max_tokens=32, ignore_eos=True))
    check_whole(result, version=1)
    assert difference(NEW, prompt, result) <= 1e-4

    back = await engine.load_version(2, tiny_model(OLD), OnRefresh.WAIT)
    assert back.fingerprint == first, "reloaded in place = loaded cold"

    await engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tiny_model(NEW))})
    await engine.llm.reset_prefix_cache()
    broken = await engine.generate(request(prompt, seed=6, max_tokens=32, ignore_eos=True))
    assert difference(NEW, prompt, broken) > 0.1, "without the repair the old head answers"
    probes = [[5, 6, 7, 8, 9]]
    stale = (await engine.llm.collective_rpc("rg_probe", args=(probes,)))[0]
    await engine.llm.collective_rpc("rg_repair_tied_head")
    fixed = (await engine.llm.collective_rpc("rg_probe", args=(probes,)))[0]
    assert stale != fixed, "the fingerprint sees one stale tensor"
    await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)


async def test_a_load_in_place_that_fails_leaves_the_weights_in_doubt(engine: Any, tmp_path: Path) -> None:
    first = engine.loaded.fingerprint
    torn = tmp_path / "torn"
    shutil.copytree(tiny_model(NEW), torn)
    (torn / "model.safetensors.index.json").write_text("{")  # vLLM reads it, the headers are good
    with pytest.raises(WeightsRefused) as refused:
        await engine.load_version(1, torn, OnRefresh.WAIT)
    assert not refused.value.intact
    assert engine.loaded.version == -1
    assert (await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)).fingerprint == first
    check_whole(await engine.generate(request(seed=2)))


async def test_the_probe_equals_a_prompt_logprobs_request(engine: Any) -> None:
    from vllm import SamplingParams as VllmParams
    from vllm.inputs.engine import tokens_input

    probe = [17, 300, 45, 6, 99, 410, 23]
    queued: list[float] = []
    rows = (await engine.llm.collective_rpc("rg_probe", args=([probe],)))[0][0]
    direct = [row[0] for row in rows]
    params = VllmParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    async for output in engine.llm.generate(tokens_input(probe), params, "probe"):
        queued = [row[token].logprob for token, row in zip(probe[1:], output.prompt_logprobs[1:], strict=True)]
    assert direct == queued


async def test_wait_lets_running_samples_end_under_the_old_weights(engine: Any) -> None:
    running = [asyncio.create_task(engine.generate(request(max_tokens=300, ignore_eos=True))) for _ in range(4)]
    await asyncio.sleep(0.1)
    swap = asyncio.create_task(engine.load_version(1, tiny_model(NEW), OnRefresh.WAIT))
    await asyncio.sleep(0.02)
    late = asyncio.create_task(engine.generate(request(seed=8)))
    for result in await asyncio.gather(*running):
        check_whole(result, version=0)
        assert difference(OLD, [5, 6, 7, 8], result) <= 1e-4
    await swap
    result = await late
    check_whole(result, version=1)
    assert difference(NEW, [5, 6, 7, 8], result) <= 1e-4
    await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)


async def test_abort_goes_on_behind_what_there_is_under_the_new_weights(engine: Any) -> None:
    """Not streamed ones too: the seam is where the swap found them, and each side is its own weights'."""
    prompt = [5, 6, 7, 8]
    running = [asyncio.create_task(engine.generate(request(prompt, max_tokens=300, ignore_eos=True))) for _ in range(4)]
    await asyncio.sleep(0.1)
    await engine.load_version(1, tiny_model(NEW), OnRefresh.ABORT)
    for result in await asyncio.gather(*running):
        check_seam(result, prompt, 300)
    await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)


def check_seam(result: Generated, prompt: list[int], tokens: int) -> None:
    """OLD made the first tokens and NEW the others, on the full context."""
    assert len(result.token_ids) == tokens
    seam = sum(span.end - span.start for span in result.version_spans if span.version == 0)
    wanted = [(0, 0, seam), (1, seam, tokens)] if seam else [(1, 0, tokens)]
    assert [(s.version, s.start, s.end) for s in result.version_spans] == wanted
    old = reference(OLD, prompt, result.token_ids, 1.0)
    new = reference(NEW, prompt, result.token_ids, 1.0)
    expected = old[:seam] + new[seam:]
    assert max(abs(a - b) for a, b in zip(result.logprobs, expected, strict=True)) <= 1e-4


async def test_keep_goes_on_under_the_new_weights_and_spans_show_the_seam(engine: Any) -> None:
    """I4: the version stamped on each token is the one whose bytes computed it."""
    prompt = [5, 6, 7, 8]
    running = [asyncio.create_task(engine.generate(request(prompt, max_tokens=400, ignore_eos=True))) for _ in range(4)]
    await asyncio.sleep(0.2)
    loaded = await engine.load_version(1, tiny_model(NEW), OnRefresh.KEEP)
    assert loaded.version == 1
    for result in await asyncio.gather(*running):
        assert len(result.version_spans) == 2
        check_seam(result, prompt, 400)
    await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)


async def test_a_version_that_cannot_be_read_is_refused_and_the_old_one_answers_on(engine: Any, tmp_path: Any) -> None:
    from rollgrid_sampler.engines.base import WeightsRefused

    before = engine.loaded
    with pytest.raises(WeightsRefused) as refused:
        await engine.load_version(5, tmp_path, OnRefresh.WAIT)
    assert refused.value.intact is True
    assert engine.loaded == before, "a failed apply never advances the label"
    result = await engine.generate(request(seed=9))
    assert difference(OLD, [5, 6, 7, 8], result) <= 1e-4
