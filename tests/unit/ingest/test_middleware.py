"""The door around the app: bounds, request ids, the last catch (I8)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import Any

import pytest
from rollgrid_ingest.admission import Gate
from rollgrid_ingest.auth import KeyEntry, Keys
from rollgrid_ingest.middleware import Door
from rollgrid_ingest.settings import IngestSettings
from rollgrid_runtime.errors import RollgridError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class Exchange:
    """One request through an ASGI app, by hand."""

    path = "/v1/x"

    def __init__(self, app: Any, chunks: list[bytes], method: str = "POST", **headers: str) -> None:
        self._app, self._chunks = app, list(chunks)
        self._headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self._method = method
        self.sent: list[dict[str, Any]] = []

    async def run(self) -> Exchange:
        scope = {
            "type": "http",
            "method": self._method,
            "path": self.path,
            "headers": self._headers,
            "query_string": b"",
        }
        await self._app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> dict[str, Any]:
        if not self._chunks:
            return {"type": "http.disconnect"}
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self._chunks)}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.sent[1]["body"])["error"]
        return found

    def header(self, name: str) -> str:
        return dict(self.sent[0]["headers"])[name.encode()].decode()


def door(app: Any, **changes: Any) -> Door:
    settings = IngestSettings(max_body_bytes=2048, max_inflight_bytes=2**20, **changes)
    return Door(app, settings, Keys(None))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await Response(str(len(body)))(scope, receive, send)


TWO_TENANTS = Keys(
    tuple(KeyEntry(key_sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name) for name in ("alice", "bob"))
)


async def test_i8_a_tenants_flood_of_held_requests_leaves_room_for_another() -> None:
    leave = asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        await leave.wait()
        await Response("ok")(scope, receive, send)

    app = Door(slow, IngestSettings(max_inflight_requests=8, max_inflight_bytes=2**20), TWO_TENANTS)

    def calls(tenant: str, count: int, body: bytes) -> list[asyncio.Task[Exchange]]:
        exchange = (Exchange(app, [body], authorization=f"Bearer {tenant}") for _ in range(count))
        return [asyncio.create_task(one.run()) for one in exchange]

    flood = calls("alice", 20, b"x")
    await asyncio.sleep(0)  # each has its place, or its refusal, when the loop has turned
    await asyncio.sleep(0)
    other = calls("bob", 2, b"y")
    leave.set()
    assert [(await call).status for call in other] == [200, 200]
    answers = [await call for call in flood]
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) == 16
    assert {answer.error["limit"] for answer in refused} == {"max_inflight_requests=8, tenant_share=0.5"}
    assert {answer.header("retry-after") for answer in refused} == {"1"}


async def test_i8_bodies_are_shared_too() -> None:
    app = Door(echo, IngestSettings(max_body_bytes=2**20, max_inflight_bytes=2**20), TWO_TENANTS)
    big = await Exchange(app, [b"x" * 100_000] * 6, authorization="Bearer alice").run()
    assert (big.status, big.error["limit"]) == (429, "max_inflight_bytes=1048576, tenant_share=0.5")
    assert (await Exchange(app, [b"x" * 100_000] * 5, authorization="Bearer alice").run()).status == 200


async def test_a_body_in_chunks_is_counted_as_it_comes() -> None:
    assert (await Exchange(door(echo), [b"x" * 1000, b"x" * 1048]).run()).sent[1]["body"] == b"2048"
    over = await Exchange(door(echo), [b"x" * 1000, b"x" * 1049]).run()
    assert over.status == 413
    assert over.error["limit"] == "max_body_bytes=2048"


async def test_a_declared_body_over_the_bound_is_never_given_to_the_app() -> None:
    async def untouched(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the app was called")

    refused = await Exchange(door(untouched), [b"x" * 3000], content_length="3000").run()
    assert (refused.status, refused.error["code"]) == (413, "payload_too_large")


async def test_requests_held_at_once_are_bounded_and_given_back() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def slow(scope: Scope, receive: Receive, send: Send) -> None:
        entered.set()
        await leave.wait()
        await Response("ok")(scope, receive, send)

    app = door(slow, max_inflight_requests=1)
    first = asyncio.create_task(Exchange(app, [b""]).run())
    await entered.wait()
    second = await Exchange(app, [b""]).run()
    assert (second.status, second.error["code"], second.header("retry-after")) == (429, "queue_full", "1")
    leave.set()
    assert (await first).status == 200
    assert (await Exchange(app, [b""]).run()).status == 200


class Stalled(Exchange):
    """Sends its chunks, `pause_s` before each, and then nothing more; the last ends the body if `whole`."""

    pause_s = 0.0

    def __init__(self, app: Any, chunks: list[bytes], *, whole: bool = False) -> None:
        super().__init__(app, chunks)
        self._whole = whole

    async def _receive(self) -> dict[str, Any]:
        await asyncio.sleep(self.pause_s if self._chunks else 3600)
        body = self._chunks.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(self._chunks) or not self._whole}


@pytest.mark.parametrize("path", ["/v1/x", "/v1/policies/p/uploads/u/files/a.safetensors"])
async def test_a_body_that_stops_coming_gives_its_place_back(path: str) -> None:
    app = door(echo, max_inflight_requests=1, body_timeout_s=0.1)
    stalled = Stalled(app, [b"x"])
    stalled.path = path
    async with asyncio.timeout(5):
        answer = await stalled.run()
    assert (answer.status, answer.error["code"], answer.error["limit"]) == (504, "expired", "body_timeout_s=0.1")
    assert (await Exchange(app, [b""]).run()).status == 200


async def test_a_trickled_body_has_one_deadline_and_an_upload_one_for_each_piece() -> None:
    async def trickled(path: str, whole: bool) -> Exchange:
        sender = Stalled(door(echo, body_timeout_s=0.2), [b"x"] * 4, whole=whole)
        sender.path, sender.pause_s = path, 0.1
        return await sender.run()

    assert (await trickled("/v1/x", whole=False)).status == 504
    assert (await trickled("/v1/policies/p/uploads/u/files/a.safetensors", whole=True)).sent[1]["body"] == b"4"


async def test_behind_its_body_a_call_may_wait_for_longer() -> None:
    async def waiting(scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        await request.body()
        try:
            async with asyncio.timeout(0.3):
                await receive()
        except TimeoutError:
            await Response("ok")(scope, receive, send)

    sender = Stalled(door(waiting, body_timeout_s=0.1), [b"x"], whole=True)
    assert (await sender.run()).sent[1]["body"] == b"ok"


async def test_a_bug_is_500_in_the_envelope_and_says_nothing_of_itself() -> None:
    async def broken(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("secret")

    answer = await Exchange(door(broken), [b""]).run()
    assert (answer.status, answer.error["code"], answer.error["message"]) == (500, "internal", "internal error")


async def test_a_bug_behind_the_first_byte_ends_the_answer_short() -> None:
    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    answer = await Exchange(door(late), [b""]).run()
    assert [message["type"] for message in answer.sent] == ["http.response.start"]


@pytest.mark.parametrize(("given", "kept"), [("mine-1", True), ("has space", False), ("x" * 129, False), ("", False)])
async def test_the_callers_request_id_is_kept_when_usable(given: str, kept: bool) -> None:
    answer = await Exchange(door(echo), [b""], x_request_id=given).run()
    assert (answer.header("x-request-id") == given) is kept
    assert answer.header("x-request-id")


def test_a_gate_takes_all_or_nothing() -> None:
    gate = Gate("things", 10)
    gate.take("a", 6)
    with pytest.raises(RollgridError) as refused:
        gate.take("a", 5)
    assert refused.value.limit == "things=10"
    assert gate.held == 6
    with gate.holding("b", 4), pytest.raises(RollgridError):
        gate.check("c")
    assert gate.held == 6
