"""Spans: off they are nothing, on they are a chain; a context that is none is never followed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id
from prometheus_client import REGISTRY
from rollgrid_runtime import telemetry
from rollgrid_runtime.settings import TraceSettings
from rollgrid_runtime.tracing import QUEUE_SPANS, Recorder, recorder_of

from tests.support.processes import free_port
from tests.support.waiting import wait_until

TRACE, SPAN = "ab" * 16, "cd" * 8
SAMPLED, UNSAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"


class Recorded:
    """A recorder whose spans stay here."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.recorder = Recorder("test", "test-1", {"memory": self.exporter})

    def spans(self) -> dict[str, ReadableSpan]:
        """By name, once all are exported; nothing is recorded afterwards."""
        telemetry.disable()
        assert self.recorder.close()
        return {span.name: span for span in self.exporter.get_finished_spans()}


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return format_span_id(span.parent.span_id)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    found = Recorded()
    telemetry.enable(found.recorder, 1.0)
    yield found
    telemetry.disable()


def test_off_a_callers_context_is_passed_on_and_nothing_else_happens() -> None:
    with telemetry.root("request", SAMPLED) as span:
        assert span.traceparent == SAMPLED
        with telemetry.child("inside", group="g") as inner:
            assert inner.traceparent == SAMPLED
        assert telemetry.start("queue", None) is telemetry.OFF
        assert not span.recorded
    assert telemetry.root("request", None) is telemetry.OFF
    assert telemetry.current() is telemetry.OFF


def test_off_opentelemetry_is_not_even_imported() -> None:
    code = (
        "import sys; from rollgrid_runtime import service, telemetry;"
        "telemetry.root('x', None); print([m for m in sys.modules if m.startswith('opentelemetry.sdk')])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_a_chain_of_spans_keeps_trace_parents_times_and_links(recorded: Recorded) -> None:
    with telemetry.root("request", SAMPLED, tenant="t") as request:
        with telemetry.child("publish", kind="producer", messages=2) as publish:
            context = publish.traceparent
    assert context is not None
    telemetry.record("queue", context, 10.0, 12.5, kind="consumer", group="g1")
    first = telemetry.step_id(context, "g1", 0, 1)
    attempt = telemetry.start("attempt", context, at=12.5, span_id=telemetry.step_id(context, "g1", 0, 2),
                              links=[telemetry.step_context(context, "g1", 0, 1)])  # fmt: skip
    attempt.event("first_token", 13.0)
    attempt.fail("poison")
    attempt.end(14.0)
    spans = recorded.spans()
    assert {format_trace_id(span.context.trace_id) for span in spans.values()} == {TRACE}
    assert parent_of(spans["request"]) == SPAN
    assert parent_of(spans["publish"]) == format_span_id(spans["request"].context.span_id)
    published = format_span_id(spans["publish"].context.span_id)
    assert parent_of(spans["queue"]) == parent_of(spans["attempt"]) == published
    assert (spans["queue"].start_time, spans["queue"].end_time) == (10_000_000_000, 12_500_000_000)
    assert spans["attempt"].context.span_id == telemetry.step_id(context, "g1", 0, 2)
    assert [link.context.span_id for link in spans["attempt"].links] == [first]
    assert [(event.name, event.timestamp) for event in spans["attempt"].events] == [("first_token", 13_000_000_000)]
    assert spans["attempt"].status.description == "poison"
    assert spans["publish"].attributes == {"messaging.batch.message_count": 2}
    assert request.recorded


def test_an_exception_fails_the_span_by_its_code_and_never_by_its_text(recorded: Recorded) -> None:
    with pytest.raises(ValueError, match="secret"), telemetry.root("request", None):
        raise ValueError("a secret prompt")
    assert recorded.spans()["request"].status.description == "ValueError"
    assert not recorded.spans()["request"].events


def test_what_the_caller_does_not_sample_is_not_recorded(recorded: Recorded) -> None:
    assert telemetry.root("request", UNSAMPLED).traceparent == UNSAMPLED
    assert telemetry.unsampled(SAMPLED) == UNSAMPLED
    telemetry.record("queue", UNSAMPLED, 1.0, 2.0)
    assert recorded.spans() == {}


@pytest.mark.parametrize(("ratio", "traced"), [(0.0, 0), (1.0, 50)])
def test_the_ratio_decides_for_requests_without_a_context(ratio: float, traced: int) -> None:
    found = Recorded()
    telemetry.enable(found.recorder, ratio)
    for _ in range(50):
        telemetry.root("request", None).end()
    telemetry.disable()
    found.recorder.close()
    assert len(found.exporter.get_finished_spans()) == traced


@pytest.mark.parametrize(
    "text",
    ["", "00", SAMPLED[:-1], SAMPLED + "0", SAMPLED.upper(), f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01",
     f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-01\n", None],
)  # fmt: skip
def test_a_header_that_is_no_context_counts_as_none(text: str | None) -> None:
    assert telemetry.valid(text) is None
    assert telemetry.valid(SAMPLED) == SAMPLED


@given(st.text(max_size=80))
def test_no_header_breaks_a_request(text: str) -> None:
    found = telemetry.valid(text)
    assert found is None or telemetry.start("x", found).traceparent == found


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=3, unique=True))
def test_steps_of_different_names_have_different_contexts(numbers: list[int]) -> None:
    contexts = {telemetry.step_context(SAMPLED, "g", number) for number in numbers}
    assert len(contexts) == len(numbers)
    assert all(telemetry.valid(context) == context and context.startswith(SAMPLED[:36]) for context in contexts)


def test_attributes_have_their_conventional_names_and_are_cut() -> None:
    found = telemetry.kept({"group": "g", "tokens": 3, "own": "x" * 500, "left_out": None})
    assert found == {"rollgrid.group_id": "g", "gen_ai.usage.output_tokens": 3, "rollgrid.own": "x" * 200}


async def test_tasks_see_the_span_they_were_started_in(recorded: Recorded) -> None:
    async def child() -> str | None:
        await asyncio.sleep(0)
        return telemetry.current().traceparent

    with telemetry.root("a", None) as first:
        one = asyncio.create_task(child())
    with telemetry.root("b", None) as second:
        two = asyncio.create_task(child())
    assert [*await asyncio.gather(one, two)] == [first.traceparent, second.traceparent]
    assert len(recorded.spans()) == 2


def test_a_file_takes_one_json_object_a_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "spans.jsonl"
    recorder = recorder_of("sampler", "sampler-0", TraceSettings(file=path))
    assert recorder is not None
    telemetry.enable(recorder, 1.0)
    telemetry.root("one", SAMPLED).end()
    telemetry.root("two", SAMPLED).end()
    telemetry.disable()
    assert recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["name"] for line in lines] == ["one", "two"]
    assert {line["context"]["trace_id"] for line in lines} == {f"0x{TRACE}"}
    assert lines[0]["resource"]["attributes"]["service.name"] == "rollgrid-sampler"


def test_without_a_place_for_spans_there_is_no_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.setenv("ROLLGRID_TRACE_FILE", "")
    assert recorder_of("sampler", "sampler-0", TraceSettings()) is None


def test_a_collector_that_is_away_costs_the_spans_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    recorder = recorder_of("sampler", "sampler-0", TraceSettings())
    assert recorder is not None
    telemetry.enable(recorder, 1.0)
    for _ in range(3 * QUEUE_SPANS):  # three times what the queue holds
        telemetry.root("request", SAMPLED).end()
    telemetry.disable()
    labels = {"exporter": "otlp", "outcome": "lost"}
    wait_until(lambda: bool(REGISTRY.get_sample_value("rollgrid_trace_spans_total", labels)), 30, "a batch is given up")
    recorder.close(timeout_s=0.2)
    assert REGISTRY.get_sample_value("rollgrid_trace_spans_total", {**labels, "outcome": "exported"}) is None
