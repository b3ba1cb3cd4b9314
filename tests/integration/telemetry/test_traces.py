"""One sample is one trace through all five steps; a redelivery is linked; a collector that is away changes nothing."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import httpx2
import nats
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from rollgrid import Client
from rollgrid_contracts import subjects
from rollgrid_runtime import telemetry
from rollgrid_runtime.telemetry import MAX_SAMPLE_SPANS, MAX_TRACED_GROUPS

from tests.integration.telemetry.collector import Collector, Received
from tests.integration.telemetry.conftest import TOKEN_RATE
from tests.support.stack import POLICY, TENANT, Stack
from tests.support.waiting import wait_until

WHOLE = (
    "POST /v1/rollouts", "render prompts", "publish jobs", "queue jobs", "sample group", "generate sample",
    "publish samples", "queue samples", "score samples", "verify exact_match", "publish scores", "close group",
    "queue trajectories", "archive group",
)  # fmt: skip

PARENTS = {
    "render prompts": "POST /v1/rollouts",
    "publish jobs": "POST /v1/rollouts",
    "queue jobs": "publish jobs",
    "sample group": "publish jobs",
    "generate sample": "sample group",
    "publish samples": "sample group",
    "queue samples": "publish samples",
    "score samples": "publish samples",
    "verify exact_match": "score samples",
    "publish scores": "score samples",
    "close group": "publish scores",
    "queue trajectories": "close group",
    "archive group": "close group",
}
SERVICES = {
    "publish jobs": "rollgrid-ingest",
    "generate sample": "rollgrid-sampler",
    "score samples": "rollgrid-scorer",
    "close group": "rollgrid-trajectory-logger",
    "archive group": "rollgrid-trajectory-logger",
}
SECRET = "the caller's own words"


def submit(pipe: Stack, *, trace: str | None, run: str, flag: str = "01", **sampling: Any) -> dict[str, Any]:
    """A batch of one task and one sample, scored; `trace` is the client's own trace id."""
    body = {
        "policy": POLICY,
        "run": run,
        "n": 1,
        "tasks": [{"prompt": SECRET, "task": {"answer": "x"}, "metadata": {"note": SECRET}}],
        "sampling": {"max_tokens": 8, **sampling},
        "scorers": ["exact_match"],
    }
    headers = {"traceparent": f"00-{trace}-{'c' * 16}-{flag}"} if trace else {}
    answer = httpx2.post(f"{pipe.url}/v1/rollouts", json=body, headers=headers, timeout=60)
    assert answer.status_code == 202, answer.text
    found: dict[str, Any] = answer.json()
    return found


def check_chain(spans: list[Received]) -> dict[str, Received]:
    """Parents, services and times of a whole trace; its spans by name."""
    by_id = {span.span: span for span in spans}
    assert len(by_id) == len(spans)
    for span in spans:
        if span.name in PARENTS:
            assert by_id[span.parent].name == PARENTS[span.name], span
        assert span.start <= span.end
        assert not span.failed
    named = {span.name: span for span in spans}
    assert {name: named[name].service for name in SERVICES} == SERVICES
    steps = ["publish jobs", "sample group", "generate sample", "score samples", "close group", "archive group"]
    starts = [named[name].start for name in steps]
    assert starts == sorted(starts)
    assert named["queue jobs"].end <= named["generate sample"].start
    assert named["generate sample"].end <= named["publish samples"].end
    assert named["publish samples"].start <= named["score samples"].start  # its end, the ack, may come after the score
    first_token = named["generate sample"].events["first_token"]
    assert named["generate sample"].start <= first_token <= named["generate sample"].end
    return named


def test_one_sample_is_one_trace_through_all_services(pipe: Stack, otlp: Collector) -> None:
    trace = secrets.token_hex(16)
    batch = submit(pipe, trace=trace, run="traced")
    spans = otlp.wait_for(trace, *WHOLE)
    assert sorted(span.name for span in spans) == sorted(WHOLE)
    named = check_chain(spans)
    assert named["POST /v1/rollouts"].parent == "c" * 16
    assert named["POST /v1/rollouts"].attributes["http.response.status_code"] == 202
    assert (
        named["generate sample"].attributes.items()
        >= {
            "rollgrid.group_id": batch["group_ids"][0],
            "rollgrid.attempt": 1,
            "rollgrid.version": 0,
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.response.finish_reason": "length",
        }.items()
    )
    assert named["sample group"].attributes["rollgrid.worker"]
    assert SECRET not in repr(spans)


def test_the_record_carries_the_context_of_its_close(pipe: Stack, otlp: Collector, client: Client) -> None:
    trace = secrets.token_hex(16)
    batch = submit(pipe, trace=trace, run="recorded")
    (group,) = client.batch(batch["batch_id"]).groups(timeout=60)
    named = {span.name: span for span in otlp.wait_for(trace, "close group")}
    assert group.closed.traceparent is not None
    assert group.closed.traceparent.startswith(f"00-{trace}-{named['close group'].span}-")


def test_an_sdk_caller_with_a_span_is_the_parent(pipe: Stack, otlp: Collector, client: Client) -> None:
    tracer = TracerProvider().get_tracer("trainer")
    with tracer.start_as_current_span("training step") as span:
        context = span.get_span_context()
        batch = client.submit(["hi"], n=2, sampling={"max_tokens": 4}, run="sdk", policy=POLICY)
    list(batch.groups(timeout=60))
    trace = otel.format_trace_id(context.trace_id)
    spans = otlp.wait_for(trace, "archive group", "publish samples", "generate sample")  # each service sends its own
    named = {span.name: span for span in spans}
    assert named["POST /v1/rollouts"].parent == otel.format_span_id(context.span_id)
    assert [span.name for span in spans].count("generate sample") == 2
    by_id = {span.span: span for span in spans}
    assert by_id[named["close group"].parent].name == "publish samples"  # nothing was scored


def test_what_the_client_does_not_sample_and_what_the_ratio_leaves_out_is_not_exported(
    pipe: Stack, otlp: Collector, client: Client
) -> None:
    unsampled, traced = secrets.token_hex(16), secrets.token_hex(16)
    before = {span.trace for span in otlp.spans}
    quiet = submit(pipe, trace=unsampled, flag="00", run="quiet")
    none = submit(pipe, trace=None, run="quiet")
    for batch in (quiet, none):
        (group,) = client.batch(batch["batch_id"]).groups(timeout=60)
        assert group.counts == {"succeeded": 1}
        known = group.closed.traceparent
        assert known == (f"00-{unsampled}-{'c' * 16}-00" if batch is quiet else None)  # passed on as it came
    submit(pipe, trace=traced, run="quiet")
    otlp.wait_for(traced, *WHOLE)
    assert {span.trace for span in otlp.spans} - before == {traced}


def test_of_a_large_batch_the_first_groups_and_samples_are_traced(pipe: Stack, otlp: Collector, client: Client) -> None:
    trace, groups, n = secrets.token_hex(16), MAX_TRACED_GROUPS + 2, MAX_SAMPLE_SPANS + 1
    tasks = [{"prompt": "hi"}] * groups
    body = {"policy": POLICY, "run": "large", "n": n, "tasks": tasks, "sampling": {"max_tokens": 1}}
    headers = {"traceparent": f"00-{trace}-{'c' * 16}-01"}
    batch = httpx2.post(f"{pipe.url}/v1/rollouts", json=body, headers=headers, timeout=60).json()
    closed = {group.id: group for group in client.batch(batch["batch_id"]).groups(timeout=60)}
    assert len(closed) == groups
    traced, rest = batch["group_ids"][:MAX_TRACED_GROUPS], batch["group_ids"][MAX_TRACED_GROUPS:]
    assert [str(closed[group].closed.traceparent)[-2:] for group in rest] == ["00", "00"]  # known, and not recorded

    def of(name: str) -> list[object]:
        return [span.attributes["rollgrid.group_id"] for span in otlp.of(trace) if span.name == name]

    wait_until(lambda: len(of("archive group")) >= MAX_TRACED_GROUPS, 30, "archived", every_s=0.1)
    wait_until(lambda: len(of("generate sample")) >= MAX_TRACED_GROUPS * MAX_SAMPLE_SPANS, 30, "samples", every_s=0.1)
    later = secrets.token_hex(16)
    submit(pipe, trace=later, run="large")
    otlp.wait_for(later, *WHOLE)
    assert sorted(map(str, of("archive group"))) == sorted(map(str, of("close group"))) == sorted(traced)
    assert len(of("generate sample")) == MAX_TRACED_GROUPS * MAX_SAMPLE_SPANS


def test_an_attempt_after_a_killed_sampler_links_to_it(pipe: Stack, otlp: Collector) -> None:
    trace = secrets.token_hex(16)
    batch = submit(pipe, trace=trace, run="killed", max_tokens=int(4 * TOKEN_RATE))
    found = [span for span in otlp.wait_for(trace, "queue jobs") if span.name == "queue jobs"]
    victim = next(name for name in ("sampler-0", "sampler-1") if pipe[name].readiness()[1].get("busy"))
    pipe[victim].kill()
    pipe[victim].start()
    spans = otlp.wait_for(trace, *WHOLE, timeout_s=60)
    (attempt,) = [span for span in spans if span.name == "sample group"]
    assert attempt.attributes["rollgrid.attempt"] == 2
    assert attempt.attributes["rollgrid.group_id"] == batch["group_ids"][0]
    (link,) = attempt.links
    published = next(span.span for span in spans if span.name == "publish jobs")
    first = telemetry.step_id(f"00-{trace}-{published}-01", batch["group_ids"][0], 0, 1)
    assert link == f"{first:016x}"
    assert link not in {span.span for span in spans}  # the first attempt was killed before its end
    waits = {span.attributes["rollgrid.attempt"]: span for span in spans if span.name == "queue jobs"}
    assert set(waits) == {1, 2}
    assert waits[1].span == found[0].span
    assert waits[2].end >= waits[1].end
    pipe[victim].wait_ready(60)


def test_a_collector_that_is_away_changes_nothing(pipe: Stack, otlp: Collector, client: Client) -> None:
    otlp.stop()
    try:
        for number in range(3):
            batch = submit(pipe, trace=secrets.token_hex(16), run=f"dark-{number}")
            (group,) = client.batch(batch["batch_id"]).groups(timeout=60)
            assert group.counts == {"succeeded": 1}
            assert group.closed.entries[0].reward is not None
        lost = 'rollgrid_trace_spans_total{exporter="otlp",outcome="lost"}'
        wait_until(lambda: lost in pipe["ingest"].metrics(), 30, "ingest says that spans were lost", every_s=0.2)
        assert all(service.is_ready() for service in pipe.services.values())
    finally:
        otlp.start()
    trace = secrets.token_hex(16)
    submit(pipe, trace=trace, run="light")
    check_chain(otlp.wait_for(trace, *WHOLE, timeout_s=60))


async def test_a_submission_through_the_queue_is_one_trace_too(pipe: Stack, otlp: Collector) -> None:
    trace = secrets.token_hex(16)
    body = {
        "policy": POLICY, "run": "queued", "tasks": [{"prompt": SECRET, "task": {"answer": "x"}}],
        "sampling": {"max_tokens": 4}, "scorers": ["exact_match"],
    }  # fmt: skip
    connection = await nats.connect(pipe.nats.url, user=pipe.nats.user, password=pipe.nats.password)
    try:
        headers = {"traceparent": f"00-{trace}-{'c' * 16}-01", "Content-Type": "application/json"}
        await connection.jetstream().publish(subjects.submit(TENANT), json.dumps(body).encode(), headers=headers)
    finally:
        await connection.close()
    whole = ["submit", "queue submissions", *WHOLE[1:]]
    named = {span.name: span for span in await asyncio.to_thread(otlp.wait_for, trace, *whole)}
    assert set(named) == set(whole)
    assert named["submit"].parent == "c" * 16
    by_id = {span.span: span.name for span in named.values()}
    wanted = {**PARENTS, "render prompts": "submit", "publish jobs": "submit", "queue submissions": "submit"}
    assert {name: by_id[span.parent] for name, span in named.items() if name != "submit"} == wanted
    assert SECRET not in repr(named)
