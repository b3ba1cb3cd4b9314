"""Real vLLM on a tiny model: streams, continuations behind given tokens, prompt logprobs, constraints, parsers."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from typing import Any

import msgspec
import pytest
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import OnRefresh, ParsingSpec, VersionSpan
from rollgrid_contracts.samples import FinishReason
from rollgrid_sampler.engines.base import Delta, Generated, GenerationRequest, RequestFailed, Sent
from rollgrid_sampler.parsing import ParserDesk
from rollgrid_sampler.streaming import joined

from tests.support.tiny_models import EOS_ID, tiny_model

from .stage import make_job
from .tiny_engine import NEW, OLD, engine, loaded, reference, request

__all__ = ["engine"]

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROMPT = [5, 6, 7, 8]


async def stream(engine: Any, asked: GenerationRequest) -> tuple[list[Delta], Generated]:
    told: list[Delta] = []
    result = await engine.generate(asked, told.append)
    return told, result


def check_told(told: list[Delta], result: Generated) -> None:
    """The portions are a beginning of the result, each behind the one before it."""
    if not told:
        return
    whole, end = joined(told), told[-1].offset + len(told[-1].token_ids)
    assert [b.offset - a.offset for a, b in itertools.pairwise(told)] == [len(d.token_ids) for d in told[:-1]]
    assert whole.token_ids == result.token_ids[whole.offset : end]
    assert list(whole.logprobs) == list(result.logprobs)[whole.offset : end]
    assert result.text[result.text_sent :].startswith(whole.text)
    for span in whole.version_spans:
        assert any(
            s.version == span.version and s.start <= span.start <= span.end <= s.end for s in result.version_spans
        )


def sent(result: Generated, tokens: int, version: int = 0) -> Sent:
    return Sent(
        token_ids=result.token_ids[:tokens],
        logprobs=array("f", list(result.logprobs)[:tokens]),
        version_spans=(VersionSpan(version=version, start=0, end=tokens),),
    )


def behind(asked: GenerationRequest, given: Sent, **changes: Any) -> GenerationRequest:
    return msgspec.structs.replace(
        asked, sent=given, request_id=f"{asked.request_id}.again{len(given.token_ids)}", **changes
    )


def worst(got: Generated, expected: list[float], start: int = 0) -> float:
    return max((abs(a - b) for a, b in zip(list(got.logprobs)[start:], expected[start:], strict=True)), default=0.0)


CASES: list[dict[str, Any]] = [
    {"max_tokens": 40, "ignore_eos": True},
    {"max_tokens": 24, "logprobs": 3, "temperature": 0.7},
    {"max_tokens": 60, "stop_token_ids": tuple(range(3, 60))},
    {"max_tokens": 60, "ignore_eos": True, "stop": ("e", "th", " a"), "min_tokens": 3},
    {"max_tokens": 60, "ignore_eos": True, "stop": ("o", "th"), "include_stop_str_in_output": True},
    {"max_tokens": 8, "logit_bias": {str(EOS_ID): 100.0}, "skip_special_tokens": False},
    {"max_tokens": 12, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
]


async def test_a_stream_is_the_sample_that_is_not_streamed(engine: Any) -> None:
    """A14: the same seed gives the same ids, logprobs, alternatives, text and end in both ways (float32)."""
    for seed, case in enumerate(CASES):
        plain = await engine.generate(request(PROMPT, seed=seed, **case))
        told, result = await stream(engine, request(PROMPT, seed=seed, **case))
        check_told(told, result)
        for field in ("token_ids", "logprobs", "top_logprobs", "text", "finish_reason", "stop_reason", "version_spans"):
            assert getattr(result, field) == getattr(plain, field), (case, field)
        if len(result.token_ids) > 8:
            assert len(told) > 3, "the tokens came in portions"


async def test_resumed_at_every_cut_the_rest_is_as_over_the_whole_context(engine: Any) -> None:
    """I2, C03: the sent part stays, the new part's logprobs are those of a forward, a character may be cut anywhere."""
    tokens = 24
    base = request(PROMPT, seed=3, max_tokens=tokens, ignore_eos=True)
    base = msgspec.structs.replace(base, group_seed=77)
    first = await engine.generate(base)
    cuts = range(1, tokens + 1)
    results = await asyncio.gather(*(stream(engine, behind(base, sent(first, cut))) for cut in cuts))
    for cut, (told, result) in zip(cuts, results, strict=True):
        assert (result.resumed_from, len(result.token_ids)) == (cut, tokens)
        assert result.finish_reason is FinishReason.LENGTH
        assert result.token_ids[:cut] == first.token_ids[:cut]
        assert list(result.logprobs)[:cut] == list(first.logprobs)[:cut]
        assert [(s.version, s.start, s.end) for s in result.version_spans] == [(0, 0, tokens)]
        assert result.text == engine.tokenizer.decode(result.token_ids, skip_special_tokens=True)
        assert not told or told[0].offset == cut
        check_told(told, result)
        assert worst(result, reference(OLD, PROMPT, result.token_ids, 1.0), cut) <= 1e-4
    assert len({tuple(result.token_ids) for _, result in results}) > tokens // 2, "each offset has a seed of its own"


async def test_greedy_continuations_are_the_uninterrupted_sample_and_stops_are_found_over_the_join(engine: Any) -> None:
    base = request(PROMPT, max_tokens=32, temperature=0.0, ignore_eos=True)
    first = await engine.generate(base)
    for cut in (1, 9, 20):
        _, result = await stream(engine, behind(base, sent(first, cut)))
        assert (result.token_ids, result.text) == (first.token_ids, first.text)
    ends = [len(engine.tokenizer.decode(first.token_ids[:n], skip_special_tokens=True)) for n in range(33)]
    cut = next(n for n in range(6, 30) if ends[n - 2] < ends[n - 1] < ends[n] < ends[n + 1])
    stop = first.text[ends[cut] - 1 : ends[cut] + 1]
    at = first.text.find(stop)
    asked = msgspec.structs.replace(base, sampling=msgspec.structs.replace(base.sampling, stop=(stop,)))
    plain = await engine.generate(msgspec.structs.replace(asked, request_id=f"{asked.request_id}.plain"))
    _, result = await stream(engine, behind(asked, sent(plain, len(plain.token_ids) - 1)))
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, stop)
    assert (result.text, result.token_ids) == (first.text[:at], plain.token_ids)
    told, complete = await stream(engine, behind(asked, sent(plain, len(plain.token_ids))))
    assert (told, complete.text, complete.stop_reason) == ([], result.text, stop)


async def test_tokens_that_are_a_whole_sample_end_it_at_once(engine: Any) -> None:
    eos = await engine.generate(request(PROMPT, logit_bias={str(EOS_ID): 100.0}))
    told, result = await stream(engine, behind(request(PROMPT), sent(eos, 1)))
    assert (told, result.token_ids, result.finish_reason, result.stop_reason) == ([], [EOS_ID], FinishReason.STOP, None)
    word = await engine.generate(request(PROMPT, seed=4, max_tokens=5, ignore_eos=True))
    asked = request(PROMPT, max_tokens=50, stop_token_ids=(word.token_ids[-1],), ignore_eos=True, prompt_logprobs=0)
    told, result = await stream(engine, behind(asked, sent(word, 5)))
    assert (result.token_ids, result.stop_reason) == (word.token_ids, word.token_ids[-1])
    assert result.prompt_logprobs is not None, "what was asked of the prompt is answered nevertheless"


async def test_a_swap_by_abort_continues_streams_where_that_is_exact(engine: Any) -> None:
    """I4: spans of both versions, each token by the weights it names; a penalised stream starts again."""
    exact = [request(PROMPT, max_tokens=300, ignore_eos=True) for _ in range(2)]
    penalised = request(PROMPT, max_tokens=300, ignore_eos=True, presence_penalty=0.1)
    told: list[list[Delta]] = [[], [], []]
    tasks = [
        asyncio.create_task(engine.generate(asked, portions.append))
        for asked, portions in zip([*exact, penalised], told, strict=True)
    ]
    async with asyncio.timeout(60):
        while any(len(portions) < 5 for portions in told):
            await asyncio.sleep(0.005)
    await engine.load_version(1, tiny_model(NEW), OnRefresh.ABORT)
    *continued, restarted = await asyncio.gather(*tasks)
    for result, portions in zip(continued, told, strict=False):
        check_told(portions, result)
        assert [s.version for s in result.version_spans] == [0, 1]
        seam = result.version_spans[0].end
        assert result.resumed_from == seam >= 5
        assert len(result.token_ids) == 300
        old, new = (reference(spec, PROMPT, result.token_ids, 1.0) for spec in (OLD, NEW))
        assert max(abs(a - b) for a, b in zip(list(result.logprobs)[:seam], old[:seam], strict=True)) <= 1e-4
        assert worst(result, new, seam) <= 1e-4
    assert [(s.version, s.start, s.end) for s in restarted.version_spans] == [(1, 0, 300)]
    assert restarted.resumed_from == 0
    again = next(at for at in range(1, len(told[2])) if told[2][at].offset == 0)
    check_told([delta for delta in told[2][again:] if delta.token_ids], restarted)
    await engine.load_version(0, tiny_model(OLD), OnRefresh.WAIT)


@pytest.mark.parametrize("streamed", [False, True])
async def test_prompt_logprobs_are_those_of_a_forward(engine: Any, streamed: bool) -> None:
    """C39: raw, whatever the temperature; ranks and alternatives; not out of the prefix cache."""
    import torch

    prompt = [(7 * i) % 500 + 3 for i in range(200)]
    with torch.no_grad():
        table = loaded(OLD)(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    expected = table.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    for tokens, temperature in ((5, 0.5), (0, 1.0)):
        asked = request(prompt, max_tokens=tokens, temperature=temperature, prompt_logprobs=3, ignore_eos=True)
        result = (await stream(engine, asked))[1] if streamed else await engine.generate(asked)
        found = result.prompt_logprobs
        assert found is not None
        assert found.top is not None
        assert max(abs(a - float(b)) for a, b in zip(found.logprobs, expected, strict=True)) <= 1e-4
        ranks = (table > expected[:, None]).sum(-1) + 1
        assert sum(a != int(b) for a, b in zip(found.ranks, ranks, strict=True)) <= 2, "ties apart"
        assert found.top.offsets.tolist() == list(range(0, 3 * len(prompt), 3))
        best = table.topk(3).values.flatten().tolist()
        assert max(abs(a - b) for a, b in zip(found.top.logprobs, best, strict=True)) <= 1e-4
        assert len(result.token_ids) == len(result.logprobs) == tokens
        assert result.finish_reason is FinishReason.LENGTH


async def test_a_json_schema_is_obeyed_and_a_bad_one_refused(engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    asked = [
        request(PROMPT, seed=seed, max_tokens=200, structured_output={"json": schema, "disable_any_whitespace": True})
        for seed in range(4)
    ]
    results = [result for _, result in await asyncio.gather(*(stream(engine, one) for one in asked))]
    for result in results:
        found = json.loads(result.text)
        assert isinstance(found["ok"], bool)
        assert isinstance(found["n"], int)
        assert 0 <= found["n"] <= 99
        assert set(found) == {"ok", "n"}
    for bad in ({"json": {"type": "no such type"}}, {"json": "{"}, {"regex": "("}, {"nonsense": 1}):
        with pytest.raises(RequestFailed) as refused:
            await engine.generate(request(structured_output=bad))
        assert refused.value.code is ErrorCode.INVALID_REQUEST
        assert refused.value.field == "structured_output"
    await engine.health()
    assert (await engine.generate(request(seed=1, max_tokens=3, ignore_eos=True))).token_ids


async def test_every_constraint_has_its_effect(engine: Any) -> None:
    greedy: dict[str, Any] = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    free = await engine.generate(request(PROMPT, **greedy))
    for penalty, value in (("presence_penalty", 2.0), ("frequency_penalty", 2.0), ("repetition_penalty", 5.0)):
        varied = await engine.generate(request(PROMPT, **(greedy | {penalty: value})))
        assert len(set(varied.token_ids)) > len(set(free.token_ids)), penalty
    only = await engine.generate(request(PROMPT, **greedy, allowed_token_ids=(40, 41, 42)))
    assert set(only.token_ids) <= {40, 41, 42}
    biased = await engine.generate(request(PROMPT, **greedy, logit_bias={"99": 100.0}))
    assert set(biased.token_ids) == {99}
    sampled: dict[str, Any] = {"max_tokens": 60, "seed": 5, "ignore_eos": True}
    before = await engine.generate(request(PROMPT, **sampled))
    spelled = {token: engine.tokenizer.decode([token]).strip() for token in before.token_ids}
    bad = next(t for t, word in spelled.items() if engine.tokenizer.encode(word, add_special_tokens=False) == [t])
    after = await engine.generate(request(PROMPT, **sampled, bad_words=(spelled[bad],)))
    assert bad in before.token_ids
    assert bad not in after.token_ids


@pytest.mark.parametrize("call", ['<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', "<tool_call>{"])
async def test_what_the_engine_wrote_is_parsed(engine: Any, call: str) -> None:
    """The text is forced by a grammar; hermes reads it, streamed and whole."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    asked = request(PROMPT, max_tokens=200, structured_output={"choice": [f"so: {call}"]})
    job = make_job(
        "parsed",
        n=1,
        prompt=PROMPT,
        sampling=asked.sampling,
        parsing=ParsingSpec(tool_parser="hermes", tools=(tool,)),
    )
    reading = await ParserDesk(lambda: engine.tokenizer, None, optional=False).open(job)
    assert reading is not None
    told, result = await stream(engine, asked)
    parsed = await reading.parsed(0, result)
    assert parsed.parse_status == ("ok" if call.endswith("</tool_call>") else "malformed")
    assert [c["function"] for c in parsed.tool_calls] == (
        [{"name": "add", "arguments": '{"x": 1}'}] if parsed.parse_status == "ok" else []
    )
    reader, shown = reading.reader(), ""
    for delta in told:
        shown += (await reader.push(delta.token_ids)).content
    assert shown == "so:"
    rest, recorded = reader.settle(parsed)
    assert (shown + rest.content, rest.tool_calls) == (recorded.content, recorded.tool_calls)
    assert recorded == parsed
