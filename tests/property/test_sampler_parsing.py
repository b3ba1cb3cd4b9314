"""Streamed parses, joined, are the final parse: vLLM's own parsers on random outputs, cut anywhere."""

from __future__ import annotations

import asyncio
import itertools
import json
from array import array
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import ParsingSpec, SampleGroup, SamplingParams
from rollgrid_contracts.samples import FinishReason, Parsed
from rollgrid_sampler.engines.base import Generated, RequestFailed
from rollgrid_sampler.parsing import ParserDesk, Reading

pytestmark = pytest.mark.vllm
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "ü": "✓"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=add>\n<parameter=x>\n7\n</parameter>\n</function>\n</tool_call>"


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from tests.support.tiny_models import tiny_model

    made = AutoTokenizer.from_pretrained(tiny_model())
    made.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<tool_call>", "</tool_call>"]})
    return made


def job(spec: ParsingSpec | None, **sampling: Any) -> SampleGroup:
    return SampleGroup(
        tenant="acme",
        run="r",
        batch_id="b",
        group_id="g",
        n=1,
        indexes=(0,),
        policy="p",
        pool="q",
        prompt_token_ids=TokenIds.of([5, 6]),
        sampling=SamplingParams(**{"max_tokens": 100, **sampling}),
        parsing=spec,
        created_at=0.0,
        deadline=0.0,
    )


def opened(tool: str | None, reasoning: str | None = None, choice: str | None = None, **sampling: Any) -> Reading:
    spec = ParsingSpec(
        tool_parser=tool, reasoning_parser=reasoning, tools=(TOOL,) if tool or choice else (), tool_choice=choice
    )
    desk = ParserDesk(tokenizer, None, optional=False)
    reading = asyncio.run(desk.open(job(spec, **sampling)))
    assert reading is not None
    return reading


def result(token_ids: list[int], reason: FinishReason = FinishReason.LENGTH) -> Generated:
    return Generated(token_ids=token_ids, logprobs=array("f", [0.0] * len(token_ids)), finish_reason=reason)


def encode(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def final(reading: Reading, text: str) -> Parsed:
    return asyncio.run(reading.parsed(0, result(encode(text))))


def streamed(reading: Reading, token_ids: list[int], cuts: list[int]) -> tuple[Parsed, Parsed]:
    """The joined deltas, and the parse as it is recorded."""

    async def run() -> tuple[Parsed, Parsed]:
        reader, content, reasoning = reading.reader(), "", ""
        edges = sorted({0, *(cut % (len(token_ids) + 1) for cut in cuts)})
        for start, end in itertools.pairwise(edges):
            read = await reader.push(token_ids[start:end])
            content, reasoning = content + read.content, reasoning + read.reasoning
        whole = await reading.parsed(0, result(token_ids))
        rest, recorded = reader.settle(whole)
        twice = reading.spec.reasoning_parser is not None
        assert recorded == whole or twice, "only a second beginning of reasoning changes what was shown before"
        joined = Parsed(
            content=(content + rest.content) or None,
            reasoning=(reasoning + rest.reasoning) or None,
            tool_calls=rest.tool_calls,
            parse_status=recorded.parse_status,
        )
        return joined, recorded

    return asyncio.run(run())


pieces = st.lists(
    st.one_of(
        st.sampled_from(["<think>", "</think>", "<tool_call>", "</tool_call>", CALL, XML_CALL, "\n\n", " ", "[", "{"]),
        st.sampled_from(
            ['{"name": "add", "arguments": {"x": ', "[add(x=1)]", "<function=add>", "<tool", "_call>", "✓"]
        ),
        st.text(alphabet='abc <>/{}\n"ü€', max_size=8),
    ),
    max_size=8,
).map("".join)
PARSERS = [("hermes", None), ("hermes", "qwen3"), ("hermes", "deepseek_r1"), ("qwen3_xml", "qwen3"), ("pythonic", None)]


@pytest.mark.parametrize(("tool", "reasoning"), PARSERS)
@settings(max_examples=120, deadline=None)
@given(text=pieces, cuts=st.lists(st.integers(0, 200), max_size=5))
@example(text=f"<think>why</think>\n\nfine {CALL}", cuts=list(range(60)))
@example(text=f"a {CALL}\n{CALL}", cuts=list(range(99)))
@example(text="\n\n<think>\n\n</think> \n x", cuts=list(range(30)))
def test_joined_deltas_are_the_recorded_parse(tool: str, reasoning: str | None, text: str, cuts: list[int]) -> None:
    joined, whole = streamed(reading_of(tool, reasoning), encode(text), cuts)
    assert joined.tool_calls == whole.tool_calls
    assert (joined.content or "") == (whole.content or "")
    assert (joined.reasoning or "") == (whole.reasoning or "")


@pytest.mark.parametrize(("tool", "reasoning"), PARSERS[:4])
@settings(max_examples=60, deadline=None)
@given(
    parts=st.tuples(*[st.text(alphabet='abc <>/{}\n"ü€', max_size=12)] * 3),
    calls=st.lists(st.sampled_from([CALL, XML_CALL, '<tool_call>{"name'])),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_in_ordinary_outputs_the_record_is_the_final_parse(
    tool: str, reasoning: str | None, parts: tuple[str, str, str], calls: list[str], cuts: list[int]
) -> None:
    why, before, after = parts
    text = f"<think>{why}</think>{before}{''.join(calls)}{after}"
    reading = reading_of(tool, reasoning)
    _, recorded = streamed(reading, encode(text), cuts)
    assert recorded == final(reading, text)


@cache
def reading_of(tool: str, reasoning: str | None) -> Reading:
    return opened(tool, reasoning)


@settings(max_examples=60, deadline=None)
@given(text=pieces, cut=st.integers(0, 200))
def test_another_worker_knows_from_the_ids_what_was_shown(text: str, cut: int) -> None:
    """A resumed stream: the first part read at once shows what it shows read one by one."""
    token_ids = encode(text)
    cut %= len(token_ids) + 1

    async def shown(portions: list[list[int]]) -> tuple[str, str]:
        reader = reading_of("hermes", "qwen3").reader()
        reads = [await reader.push(portion) for portion in portions]
        return "".join(r.content for r in reads), "".join(r.reasoning for r in reads)

    at_once = asyncio.run(shown([token_ids[:cut]]))
    assert asyncio.run(shown([[token] for token in token_ids[:cut]])) == at_once


def test_calls_reasoning_and_content_in_openais_shape() -> None:
    parsed = final(opened("hermes", "qwen3"), f"<think>why</think>\n\nfine {CALL}")
    assert (parsed.reasoning, parsed.content, parsed.parse_status) == ("why", "\n\nfine ", "ok")
    (call,) = parsed.tool_calls
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"x": 1, "ü": "✓"}
    assert call["id"].startswith("call_")
    again = final(opened("hermes", "qwen3"), f"<think>why</think>\n\nfine {CALL}")
    assert again == parsed, "every worker gives the same ids"


@pytest.mark.parametrize(
    ("tool", "text"),
    [
        ("hermes", 'go <tool_call>\n{"name": "add", "arg'),
        ("hermes", f"{CALL}<tool_call>oops"),
        ("qwen3_xml", "<tool_call>\n<func"),
    ],
)
def test_a_start_marker_without_a_call_is_malformed(tool: str, text: str) -> None:
    assert final(opened(tool), text).parse_status == "malformed"


def test_plain_text_is_content() -> None:
    parsed = final(opened("hermes"), "just text")
    assert (parsed.content, parsed.tool_calls, parsed.parse_status) == ("just text", (), "none")


def test_the_token_that_ended_the_sample_is_no_content() -> None:
    reading = opened("hermes")
    ids = [*encode("fine"), tokenizer().eos_token_id]
    assert asyncio.run(reading.parsed(0, result(ids, FinishReason.STOP))).content == "fine"


@pytest.mark.parametrize(
    ("choice", "text", "calls", "status"),
    [
        ("add", ' {"x": 3} ', [("add", {"x": 3})], "ok"),
        ("add", '{"x": 3', [], "malformed"),
        (
            "required",
            '[{"name": "add", "parameters": {"x": 3}}, {"name": "add"}]',
            [("add", {"x": 3}), ("add", None)],
            "ok",
        ),
        ("required", '[{"name": "add"', [], "malformed"),
        ("required", "[]", [], "malformed"),
    ],
)
@pytest.mark.parametrize("reasoning", [None, "qwen3"])
def test_a_forced_call_is_the_json_that_the_grammar_made(
    choice: str, text: str, calls: list[Any], status: str, reasoning: str | None
) -> None:
    reading = opened("hermes", reasoning, choice)
    parsed = final(reading, text)
    found = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in parsed.tool_calls]
    assert (found, parsed.parse_status) == (calls, status)
    joined, whole = streamed(reading, encode(text), [1, 3])
    assert (joined.content, joined.tool_calls) == (whole.content, whole.tool_calls)


def test_a_grammar_leaves_no_room_for_reasoning() -> None:
    reading = opened(None, "qwen3", structured_output={"json": {"type": "object"}})
    assert final(reading, '{"a": 1}') == Parsed(content='{"a": 1}')


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (ParsingSpec(tool_parser="nobody", tools=(TOOL,)), "parsing.tool_parser"),
        (ParsingSpec(reasoning_parser="nobody"), "parsing.reasoning_parser"),
        (ParsingSpec(tool_parser="llama3_json", tools=(TOOL,)), "parsing"),
        (ParsingSpec(tool_parser="hermes", tools=({"type": "function"},)), "tools"),
    ],
)
def test_what_cannot_parse_is_refused_by_name(spec: ParsingSpec, field: str) -> None:
    with pytest.raises(RequestFailed) as refused:
        asyncio.run(ParserDesk(tokenizer, None, optional=False).open(job(spec)))
    assert (refused.value.code, refused.value.field) == (ErrorCode.INVALID_REQUEST, field)


def test_a_job_without_parsers_is_not_parsed() -> None:
    desk = ParserDesk(tokenizer, None, optional=False)
    for spec in (None, ParsingSpec(), ParsingSpec(tool_parser="hermes")):
        assert asyncio.run(desk.open(job(spec))) is None
