"""Pure ASGI around the app: request ids, keys, body bounds, counts, and the last catch for bugs."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import secrets
import time
from typing import Any

from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime import telemetry
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import bound, get_logger
from rollgrid_runtime.telemetry import OFF, Span
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import metrics
from .admission import Gate
from .auth import Keys, serving
from .envelope import error_response, internal_error
from .settings import IngestSettings

log = get_logger(__name__)

PUBLIC = frozenset({"/livez", "/readyz", "/health", "/healthz", "/openapi.json", "/docs"})
_UPLOAD = re.compile(r"/v1/policies/[^/]+/uploads/[^/]+/files/[^/]+")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_PROCESS, _COUNT = secrets.token_hex(6), itertools.count(1)
DRAIN_FACTOR = 4
"""A body that is refused for its size is still read up to so many times the bound, unseen, so that
the client gets to read the refusal."""
DRAIN_S = 10.0


class Door:
    """The outermost layer.  Leaves `principal` and `request_id` in the scope's state."""

    def __init__(self, app: ASGIApp, settings: IngestSettings, keys: Keys) -> None:
        self._app, self._keys = app, keys
        self._max_body = settings.max_body_bytes
        self._patience_s = settings.body_timeout_s

        def share() -> float:
            return keys.share(settings.tenant_share)

        self._requests = Gate("max_inflight_requests", settings.max_inflight_requests, share)
        self._bytes = Gate("max_inflight_bytes", settings.max_inflight_bytes, share)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        answer = _Answer(send, request_id)
        span = _span(scope, headers, request_id)
        with bound(request_id=request_id, trace_id=telemetry.trace_id(span.traceparent)), span:
            await self._answer(scope, headers, receive, answer, span)

    async def _answer(
        self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Answer, span: Span
    ) -> None:
        started = time.perf_counter()
        try:
            await self._admit(scope, headers, receive, answer)
        except RollgridError as error:
            await answer.fail(error)
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("request_failed", path=scope["path"])
            await answer.fail(internal_error())
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            metrics.REQUESTS.labels(route, str(answer.status)).inc()
            metrics.SECONDS.labels(route).observe(time.perf_counter() - started)
            if span.recorded:
                span.rename(f"{scope['method']} {route}")
                span.set(route=route, http_status=answer.status)
                if answer.status >= 500:
                    span.fail(f"HTTP {answer.status}")

    async def _admit(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Answer) -> None:
        if scope["path"] in PUBLIC:
            await self._bounded("", scope, headers, receive, answer)
            return
        authorization = headers.get(b"authorization")
        who = self._keys.authenticate(authorization.decode("latin-1") if authorization is not None else None)
        scope["state"]["principal"] = who
        telemetry.current().set(tenant=who.tenant)
        with bound(tenant=who.tenant), serving(who.tenant):
            await self._bounded(who.tenant, scope, headers, receive, answer)

    async def _bounded(
        self, tenant: str, scope: Scope, headers: dict[bytes, bytes], receive: Receive, answer: _Answer
    ) -> None:
        path = scope["path"]
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, answer.send)
            return
        if _UPLOAD.fullmatch(path):  # streamed to disk under a bound of its own
            with self._requests.holding(tenant):
                await self._app(scope, _PatientBody(receive, self._patience_s, whole=False).receive, answer.send)
            return
        size = _content_length(headers)
        if size is not None and size > self._max_body:
            await _drain(receive, self._max_body * DRAIN_FACTOR)
            raise too_large(size, self._max_body)
        with self._requests.holding(tenant):
            patient = _PatientBody(receive, self._patience_s, whole=True)
            body = _BoundedBody(patient.receive, self._max_body, self._bytes, tenant)
            try:
                await self._app(scope, body.receive, answer.send)
            finally:
                body.close()


def _span(scope: Scope, headers: dict[bytes, bytes], request_id: str) -> Span:
    """Requests that bring a trace context, and some of those that bring work, are traced."""
    given = headers.get(b"traceparent")
    caller = telemetry.valid(given.decode("latin-1").strip()) if given is not None else None
    if scope["path"] in PUBLIC or (caller is None and scope["method"] != "POST"):
        return OFF
    return telemetry.root(scope["method"], caller, method=scope["method"], request_id=request_id)


class _PatientBody:
    """Waits `patience_s` for the `whole` body, or for each piece: who sends nothing holds no place for ever.

    Behind its end nothing is bounded: the app waits there for the client to leave.
    """

    def __init__(self, receive: Receive, patience_s: float, *, whole: bool) -> None:
        self._receive, self._patience_s, self._whole = receive, patience_s, whole
        self._due = time.monotonic() + patience_s
        self._ended = False

    async def receive(self) -> Message:
        if self._ended:
            return await self._receive()
        left = self._due - time.monotonic() if self._whole else self._patience_s
        try:
            async with asyncio.timeout(left):
                message = await self._receive()
        except TimeoutError as error:
            raise too_slow(self._patience_s) from error
        self._ended = not message.get("more_body", False)
        return message


class _BoundedBody:
    """Counts a body as it comes, against the bound of one request, of its tenant and of the whole process."""

    def __init__(self, receive: Receive, limit: int, held: Gate, tenant: str) -> None:
        self._receive, self._limit, self._gate, self._tenant = receive, limit, held, tenant
        self._size = 0

    async def receive(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            chunk = len(message.get("body", b""))
            if self._size + chunk > self._limit:
                await _drain(self._receive, self._limit * DRAIN_FACTOR)
                raise too_large(self._size + chunk, self._limit)
            self._gate.take(self._tenant, chunk)
            self._size += chunk
        return message

    def close(self) -> None:
        self._gate.give(self._tenant, self._size)
        self._size = 0


class _Answer:
    """Sends, remembering the status, and adds the request id."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self._request_id = send, request_id
        self.status = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._request_id.encode())]
        await self._send(message)

    async def fail(self, error: RollgridError) -> None:
        """Answer with the envelope, unless an answer has begun: then the connection just ends short."""
        if self.status:
            return
        response = error_response(error, self._request_id)
        await self.send(
            {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        )
        await self._send({"type": "http.response.body", "body": response.body})


def too_large(size: int, limit: int) -> RollgridError:
    return RollgridError(
        ErrorCode.PAYLOAD_TOO_LARGE,
        f"the body has {size} bytes or more, the limit is max_body_bytes={limit}",
        boundary=Boundary.CLIENT,
        field="body",
        limit=f"max_body_bytes={limit}",
    )


def too_slow(patience_s: float) -> RollgridError:
    limit = f"body_timeout_s={patience_s:g}"
    message = f"the body did not come in time, the limit is {limit}"
    return RollgridError(ErrorCode.EXPIRED, message, boundary=Boundary.CLIENT, field="body", limit=limit)


async def _drain(receive: Receive, limit: int) -> None:
    """Read and forget the rest of a body, at most `limit` bytes."""
    seen = 0
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while seen < limit:
                message: dict[str, Any] = dict(await receive())
                seen += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return


def _content_length(headers: dict[bytes, bytes]) -> int | None:
    value = headers.get(b"content-length", b"")
    return int(value) if value.isdigit() and len(value) < 20 else None


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{_PROCESS}-{next(_COUNT):x}"
