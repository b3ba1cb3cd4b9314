"""The queue door on a whole stack: what is published is sampled, refused in its run, or told in `_rejected`."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest
from rollgrid_contracts import codec, ids, subjects, topology
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.trajectories import CloseReason

from tests.support.stack import TENANT, Stack

from .queue import PROMPT, Queue, body


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("named", [True, False], ids=["by-header", "sniffed"])
async def test_a29_a_published_batch_closes_in_the_form_it_came_in(queue: Queue, form: str, named: bool) -> None:
    run = f"form-{form}-{named}"
    request = body(run, tasks=3)
    raw = msgspec.json.encode(request) if form == "json" else msgspec.msgpack.encode(request)
    await queue.submit(raw, **({"Content_Type": f"application/{form}"} if named else {}))
    closes = await queue.closed(run, 3)
    await queue.drained()
    assert [close.content_type for close in closes] == [f"application/{form}"] * 3
    for close in closes:
        assert close.record.tenant == TENANT
        assert close.record.reason is CloseReason.COMPLETE, close.record.error
        assert close.record.prompt_token_ids.tolist() == PROMPT
        assert [entry.sample.status for entry in close.record.entries] == [SampleStatus.SUCCEEDED] * 2
        assert all(len(entry.sample.token_ids) == 4 for entry in close.record.entries)


async def test_a29_the_record_format_asked_for_wins_over_the_form_of_the_message(queue: Queue) -> None:
    await queue.submit(body("asked", record_format="msgpack"))
    (close,) = await queue.closed("asked", 1)
    assert close.content_type == codec.MSGPACK


async def test_i2_a_key_names_the_batch_whoever_sends_it_and_how_often(queue: Queue, http: httpx2.Client) -> None:
    """By header, by a body field, again, and by the other door: one visible result."""
    raw = msgspec.json.encode(body("keyed", tasks=2))
    await queue.submit(raw, Idempotency_Key="step-7")
    await queue.submit(raw, Idempotency_Key="step-7")
    await queue.closed("keyed", 2)
    answer = http.post("/v1/rollouts", content=raw, headers={"Idempotency-Key": "step-7"})
    assert answer.status_code == 202, answer.text
    assert answer.json()["batch_id"] == ids.batch_id(TENANT, "keyed", "step-7")
    await queue.drained()
    assert {c.record.group_id for c in await queue.closes("keyed")} == {
        ids.group_id(TENANT, "keyed", "step-7", position) for position in range(2)
    }
    assert len(await queue.closes("keyed")) == 2

    inside = body("keyed-inside", idempotency_key="step-8")
    await queue.submit(inside)
    await queue.submit(inside)
    await queue.drained()
    (close,) = await queue.closed("keyed-inside", 1)
    assert close.record.group_id == ids.group_id(TENANT, "keyed-inside", "step-8", 0)


async def test_i2_a_key_with_another_body_harms_nobody(queue: Queue) -> None:
    await queue.submit(body("first", tasks=2), Idempotency_Key="once")
    await queue.submit(body("first", tasks=3), Idempotency_Key="once")
    closes = await queue.closed("first", 5)
    await queue.drained()
    first = {ids.group_id(TENANT, "first", "once", position) for position in range(2)}
    won = [close for close in closes if close.record.group_id in first]
    lost = [close for close in closes if close.record.group_id not in first]
    assert [close.record.reason for close in won] == [CloseReason.COMPLETE] * 2
    assert [close.record.reason for close in lost] == [CloseReason.REJECTED] * 3
    assert {close.record.error.code for close in lost if close.record.error} == {ErrorCode.IDEMPOTENCY_CONFLICT}


async def test_messages_without_a_key_are_requests_of_their_own(queue: Queue) -> None:
    await queue.submit(body("unkeyed"))
    await queue.submit(body("unkeyed"))
    assert len({close.record.group_id for close in await queue.closed("unkeyed", 2)}) == 2


REFUSED: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "unknown-model": ({"model": "nobody"}, ErrorCode.MODEL_NOT_FOUND, "model"),
    "unknown-field": ({"temprature": 1}, ErrorCode.UNKNOWN_FIELD, "temprature"),
    "no-max-tokens": ({"sampling": {}}, ErrorCode.INVALID_REQUEST, "sampling.max_tokens"),
    "wrong-type": ({"sampling": {"max_tokens": "4"}}, ErrorCode.INVALID_REQUEST, "sampling.max_tokens"),
    "version": ({"weights": {"exact_version": 99}}, ErrorCode.VERSION_UNAVAILABLE, "weights"),
    "form": ({"record_format": "xml"}, ErrorCode.INVALID_REQUEST, "record_format"),
    "two-keys": ({"idempotency_key": "a\nb"}, ErrorCode.INVALID_REQUEST, "idempotency_key"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_i5_a_refused_submission_closes_in_its_run_with_n_failed_entries_a_task(queue: Queue, case: str) -> None:
    changes, code, field = REFUSED[case]
    run = f"refused-{case}"
    request = body(run, tasks=2, n=3, metadata={"step": 4}) | changes
    request["tasks"] = [{"prompt_token_ids": PROMPT, "metadata": {"at": 0}}, {"prompt_token_ids": PROMPT, "n": 1}]
    sequence = await queue.submit(request)
    closes = await queue.closed(run, 2)
    await queue.drained()
    assert sorted(len(close.record.entries) for close in closes) == [1, 3]
    for close in closes:
        record = close.record
        assert (record.reason, record.run, record.tenant) == (CloseReason.REJECTED, run, TENANT)
        assert close.content_type == codec.JSON
        told = record.metadata["rollgrid_submit"]
        assert record.metadata["step"] == 4
        assert told["sequence"] == sequence
        assert ("at" in record.metadata) == (told["position"] == 0)
        for entry in record.entries:
            assert entry.sample.status is SampleStatus.FAILED
            assert entry.sample.error is not None
            assert (entry.sample.error.code, entry.sample.error.field) == (code, field)


UNREADABLE: dict[str, bytes] = {
    "empty": b"",
    "text": b"hello",
    "truncated": b'{"run": "unreadable", "tasks": [{',
    "truncated-msgpack": msgspec.msgpack.encode(body("unreadable"))[:-5],
    "list": b"[1, 2, 3]",
    "no-run": msgspec.json.encode({"tasks": [{}]}),
    "bad-run": msgspec.json.encode(body("../etc")),
    "no-tasks": msgspec.json.encode(body("unreadable") | {"tasks": []}),
    "huge-n": msgspec.json.encode(body("unreadable") | {"n": 10**12}),
    "negative-n": msgspec.json.encode(body("unreadable") | {"n": -1}),
    "n-is-true": msgspec.json.encode(body("unreadable") | {"n": True}),
    "deep": b'{"run": "unreadable", "tasks": ' + b"[" * 50_000,
    "deep-msgpack": b"\x81\xa4user" + b"\x91" * 50_000,
    "huge-array": b"\x82\xa3run\xa1r\xa5tasks\xdd\xff\xff\xff\xff",
    "not-utf8": b'{"run": "\xff\xfe", "tasks": [{}]}',
}


@pytest.mark.parametrize("case", UNREADABLE)
async def test_what_names_no_run_ends_in_the_rejected_run_with_one_entry(queue: Queue, case: str) -> None:
    raw = UNREADABLE[case]
    sequence = await queue.submit(raw, Idempotency_Key=f"unreadable-{case}")
    close = await queue.rejected(sequence)
    await queue.drained()
    told = close.record.metadata["rollgrid_submit"]
    assert (close.record.n, len(close.record.entries)) == (1, 1)
    assert close.record.entries[0].sample.error is not None
    assert told["key"] == f"unreadable-{case}"
    assert told["bytes"] == len(raw)
    assert told["head"] == raw[:512].decode("utf-8", "replace")
    assert not await queue.closes("unreadable")


async def test_i7_the_tenant_comes_from_the_subject_never_from_the_body(queue: Queue) -> None:
    sequence = await queue.submit(body("theirs") | {"tenant": "acme"}, tenant="bolt")
    (close,) = await queue.closed("theirs", 1, tenant="bolt")
    assert close.record.metadata["rollgrid_submit"]["sequence"] == sequence
    assert not await queue.closes("theirs", tenant="acme")


@pytest.mark.parametrize("tenant", ["nobody", "Not_a_Name", "a" * 80])
async def test_a56_a_subject_of_no_tenant_is_rejected(queue: Queue, tenant: str) -> None:
    sequence = await queue.submit(body("stray"), tenant=tenant)
    named = tenant if ids.is_name(tenant) else "_unknown"
    close = await queue.rejected(sequence, tenant=named)
    await queue.drained()
    assert close.record.entries[0].sample.error is not None
    assert close.record.entries[0].sample.error.code is ErrorCode.FORBIDDEN
    assert close.record.metadata["rollgrid_submit"]["subject"] == subjects.submit(tenant)
    assert not await queue.closes("stray", tenant=named)


async def test_a_claim_check_of_a_client_is_a_body_like_any_other(queue: Queue) -> None:
    """The header by which our services say "the payload is in S3" opens nothing from outside."""
    await queue.submit(body("claimed"), Rg_Claim="0" * 64, Status="503", Description="Consumer Deleted")
    (close,) = await queue.closed("claimed", 1)
    assert close.record.reason is CloseReason.COMPLETE


async def test_headers_that_are_no_text_do_not_stop_ingest(queue: Queue, pipe: Stack) -> None:
    """nats-py ends its reading on such a message: the next one must still be served, on the same connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", pipe.nats.port)
    hello = msgspec.json.encode(
        {"user": pipe.nats.user, "pass": pipe.nats.password, "verbose": False, "headers": True, "pedantic": False}
    )
    payload = msgspec.json.encode(body("raw-headers"))
    for block in (b"NATS/1.0 \xff\xfe\xfd\r\n\r\n", b"NATS/1.0 404 \xff\r\n\r\n", b"NATS/1.0\r\nA:\xff\r\n\r\n"):
        sizes = b"%d %d" % (len(block), len(block) + len(payload))
        hello_line = b"CONNECT " + hello + b"\r\n" if block.startswith(b"NATS/1.0 \xff") else b""
        writer.write(hello_line + b"HPUB rg.0.submit.local " + sizes + b"\r\n" + block + payload + b"\r\n")
    writer.write(b"PING\r\n")
    await writer.drain()
    while b"PONG" not in await asyncio.wait_for(reader.readline(), 10):
        pass
    writer.close()
    before = pipe["ingest"].starts
    await queue.submit(body("raw-headers"))
    closes = await queue.closed("raw-headers", 4)
    await queue.drained()
    assert [close.record.reason for close in closes] == [CloseReason.COMPLETE] * 4
    assert pipe["ingest"].starts == before


async def test_deadlines_count_from_the_submission(queue: Queue, pipe: Stack) -> None:
    """An ingest that was away for longer than the deadline gives expired entries, not late samples."""
    pipe["ingest"].kill()
    try:
        sequence = await queue.submit(body("late", deadline_s=0.05))
        stored = await queue.bus.stored(topology.SUBMIT.name, sequence)
    finally:
        pipe["ingest"].start().wait_ready(60)
    (close,) = await queue.closed("late", 1)
    assert stored is not None
    assert stored.time is not None
    assert close.record.created_at == pytest.approx(stored.time.timestamp(), abs=1e-3)
    assert close.record.deadline == pytest.approx(close.record.created_at + 0.05, abs=1e-3)
    assert close.record.reason is CloseReason.EXPIRED


async def test_json_closes_flow_through_pages_events_archive_and_groups(queue: Queue, http: httpx2.Client) -> None:
    await queue.submit(body("flows", tasks=2, record_format="json", metadata={"text": "½"}))
    closes = await queue.closed("flows", 2)
    page = http.get("/v1/runs/flows/trajectories").json()
    stored = [msgspec.json.decode(close.stored.data) for close in closes]
    assert [item["group"] for item in page["groups"]] == stored
    packed = http.get("/v1/runs/flows/trajectories", headers={"Accept": codec.MSGPACK}).content
    items = msgspec.msgpack.decode(packed)["groups"]
    assert [item["group"]["group_id"] for item in items] == [close.record.group_id for close in closes]
    one = http.get(f"/v1/groups/{closes[0].record.group_id}").json()
    assert one["group"] == stored[0]
    with http.stream("GET", "/v1/runs/flows/trajectories", headers={"Accept": "text/event-stream"}) as answer:
        data = [line.removeprefix("data: ") for line in _lines(answer, 2)]
    assert [msgspec.json.decode(text) for text in data] == stored


def _lines(answer: httpx2.Response, wanted: int) -> list[str]:
    found: list[str] = []
    for line in answer.iter_lines():
        if line.startswith("data: "):
            found.append(line)
            if len(found) == wanted:
                return found
    raise AssertionError("the event stream ended early")
