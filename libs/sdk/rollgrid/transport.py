"""HTTP with retries, once for blocking and once for asyncio code.

Every request this SDK makes may be sent twice: reads by nature, uploads and commits because they
name what they write, submissions because they carry an Idempotency-Key.  So whatever fails for a
reason that may pass (no connection, 429, 502, 503, 504) is sent again until the budget is spent.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.metadata
import io
import pathlib
import random
import ssl
import time
from collections.abc import Callable, Generator, Mapping
from typing import IO, Any, Generic, TypeVar

import httpx2
from rollgrid_contracts import codec

from .discovery import Endpoint
from .errors import DeadlineExceeded, Paced, RollgridAPIError, RollgridError, Unreachable, api_error
from .tracing import traceparent

T = TypeVar("T")

_UPLOAD_CHUNK = 1 << 20
_LIMITS = httpx2.Limits(max_connections=1024, max_keepalive_connections=64)
"""Every iterator that waits holds a connection; the default of 100 would let a hundred of them block the rest."""
_RETRIED_STATUSES = frozenset({429, 502, 503, 504})
CLOSED = "the client has been closed"


@dataclasses.dataclass(frozen=True)
class Retries:
    """How long to try.  All in seconds.

    `budget_s` bounds the whole of one call, `outage_budget_s` a stretch without any answer while an
    iterator follows a batch or run (servers may restart in it).  Pauses grow from `first_pause_s` to
    `max_pause_s`, each drawn at random below that; a `Retry-After` is waited for in full.
    """

    budget_s: float = 60.0
    outage_budget_s: float = 300.0
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0


@dataclasses.dataclass(frozen=True)
class Call(Generic[T]):
    """One request, sendable any number of times.  `read_timeout_s` is the longest silence to bear.

    A `pathlib.Path` as body is streamed from the file, opened anew for each attempt.  `sent` is told, in
    the thread that sends, how many bytes of such a body, or of a large one, have gone out in this attempt.
    `also_retried` are codes of refusals that pass for this call, `retried_if_resent` those by which the server may mean
    an earlier attempt of it.
    """

    method: str
    path: str
    parse: Callable[[bytes, str], T]
    params: Mapping[str, str | int | float] = dataclasses.field(default_factory=dict)
    body: bytes | pathlib.Path | None = None
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    read_timeout_s: float = 30.0
    sent: Callable[[int], None] | None = None
    also_retried: frozenset[str] = frozenset()
    retried_if_resent: frozenset[str] = frozenset()


class Attempts:
    """The retry decisions of one call: counts attempts, chooses pauses, knows when to give up."""

    def __init__(self, retries: Retries, *, budget_s: float | None = None, deadline: float | None = None) -> None:
        """`deadline` is the caller's own, on `time.monotonic`; the earlier of it and the budget holds."""
        self._retries = retries
        self._deadline = deadline
        self._budget_s = retries.budget_s if budget_s is None else budget_s
        self._give_up_at = time.monotonic() + self._budget_s
        self.made = 0

    def timeout(self, call: Call[Any]) -> httpx2.Timeout:
        """Timeouts of the next attempt; raises DeadlineExceeded when no time is left."""
        read = call.read_timeout_s
        if self._deadline is not None:
            remaining = self._deadline - time.monotonic()
            if remaining <= 0:
                raise DeadlineExceeded(f"no time left for {call.method} {call.path}")
            read = min(read, remaining)
        return httpx2.Timeout(connect=min(10.0, read), read=read, write=30.0, pool=30.0)

    def pause_after(self, failure: RollgridError, call: Call[Any]) -> float:
        """Seconds to wait before the next attempt; raises `failure` when there shall be none."""
        self.made += 1
        if isinstance(failure, RollgridAPIError):
            codes = call.also_retried | (call.retried_if_resent if self.made > 1 else frozenset())
            if not (failure.status in _RETRIED_STATUSES or failure.code in codes) or not failure.retryable:
                raise failure
            asked = failure.retry_after_s
            if isinstance(failure, Paced):  # no trouble: training takes its time, and only the caller's own ends that
                self._give_up_at = time.monotonic() + self._budget_s
        else:
            asked = None
        ceiling = min(self._retries.max_pause_s, self._retries.first_pause_s * 2.0 ** min(self.made - 1, 16))
        pause = random.uniform(ceiling / 2, ceiling)
        if asked is not None:
            # Everybody was told the same moment: spread out behind it, never before it.
            pause = asked + random.uniform(0, min(1.0, asked / 4))
        resume_at = time.monotonic() + pause
        if self._deadline is not None and resume_at > self._deadline:
            raise DeadlineExceeded(
                f"gave up after {self.made} attempts, the caller's time is over: {failure}"
            ) from failure
        if resume_at > self._give_up_at:
            raise failure
        return pause


def _headers(endpoint: Endpoint) -> dict[str, str]:
    try:
        version = importlib.metadata.version("rollgrid")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown"
    headers = {"user-agent": f"rollgrid-python/{version}", "accept": f"{codec.MSGPACK}, {codec.JSON};q=0.9"}
    if endpoint.api_key:
        headers["authorization"] = f"Bearer {endpoint.api_key}"
    return headers


def _tls(url: str) -> ssl.SSLContext:
    """For `http://` one that trusts nobody: to read the system's certificates takes 25 ms, more than most calls."""
    return _trusting_system() if url.lower().startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@functools.cache
def _trusting_system() -> ssl.SSLContext:
    return httpx2.create_ssl_context()


def _attempt_headers(call: Call[Any], attempts: Attempts) -> dict[str, str]:
    headers = dict(call.headers)
    if attempts.made:
        headers["x-rollgrid-retry-count"] = str(attempts.made)
    if call.method == "POST" and (context := traceparent()) is not None:
        headers["traceparent"] = context
    return headers


def _content_type(response: httpx2.Response) -> str:
    return response.headers.get("content-type", codec.JSON).split(";")[0].strip()


def _refusal(response: httpx2.Response) -> RollgridAPIError:
    return api_error(response.status_code, response.headers, response.content)


def _no_answer(endpoint: Endpoint, error: httpx2.TransportError) -> Unreachable:
    return Unreachable(f"{endpoint.url}: {type(error).__name__} {error}".rstrip())


class SyncTransport:
    """Sends calls from blocking code; safe to share between threads."""

    def __init__(self, endpoint: Endpoint, retries: Retries) -> None:
        self.endpoint = endpoint
        self.retries = retries
        self._http = httpx2.Client(
            base_url=endpoint.url, headers=_headers(endpoint), limits=_LIMITS, verify=_tls(endpoint.url)
        )

    def send(self, call: Call[T], *, budget_s: float | None = None, deadline: float | None = None) -> T:
        """Send until answered.

        Raises:
            RollgridAPIError: the server refused, or was still overloaded when the budget was spent.
            Unreachable: no answer within the budget.
            DeadlineExceeded: `deadline` (on `time.monotonic`) came first.
        """
        attempts = Attempts(self.retries, budget_s=budget_s, deadline=deadline)
        while True:
            if self._http.is_closed:
                raise Unreachable(CLOSED)
            try:
                response = self._http.request(
                    call.method,
                    call.path,
                    params=dict(call.params),
                    content=_chunks(call) if _is_streamed(call) else _whole(call.body),
                    headers=_attempt_headers(call, attempts),
                    timeout=attempts.timeout(call),
                )
            except httpx2.TransportError as error:
                pause = attempts.pause_after(_no_answer(self.endpoint, error), call)
            else:
                if response.status_code < 400:
                    return call.parse(response.content, _content_type(response))
                pause = attempts.pause_after(_refusal(response), call)
            time.sleep(pause)

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    """Sends calls from a running event loop."""

    def __init__(self, endpoint: Endpoint, retries: Retries) -> None:
        self.endpoint = endpoint
        self.retries = retries
        self._http = httpx2.AsyncClient(
            base_url=endpoint.url, headers=_headers(endpoint), limits=_LIMITS, verify=_tls(endpoint.url)
        )

    async def send(self, call: Call[T], *, budget_s: float | None = None, deadline: float | None = None) -> T:
        """As `SyncTransport.send`."""
        attempts = Attempts(self.retries, budget_s=budget_s, deadline=deadline)
        while True:
            if self._http.is_closed:
                raise Unreachable(CLOSED)
            try:
                response = await self._http.request(
                    call.method,
                    call.path,
                    params=dict(call.params),
                    content=_whole(call.body),
                    headers=_attempt_headers(call, attempts),
                    timeout=attempts.timeout(call),
                )
            except httpx2.TransportError as error:
                pause = attempts.pause_after(_no_answer(self.endpoint, error), call)
            else:
                if response.status_code < 400:
                    return call.parse(response.content, _content_type(response))
                pause = attempts.pause_after(_refusal(response), call)
            await asyncio.sleep(pause)

    async def close(self) -> None:
        await self._http.aclose()


def _whole(body: bytes | pathlib.Path | None) -> bytes | None:
    """Files are sent from threads, by the blocking transport."""
    if isinstance(body, pathlib.Path):
        raise TypeError("the asyncio transport sends no files")
    return body


def _is_streamed(call: Call[Any]) -> bool:
    """Files, and bodies whose length is in the headers and that are too large to be written at once."""
    if isinstance(call.body, bytes):
        return len(call.body) > _UPLOAD_CHUNK and "content-length" in call.headers
    return call.body is not None


def _chunks(call: Call[Any]) -> Generator[bytes, None, None]:
    told = 0
    with _opened(call.body) as file:
        while chunk := file.read(_UPLOAD_CHUNK):
            yield chunk
            told += len(chunk)
            if call.sent is not None:
                call.sent(told)


def _opened(body: bytes | pathlib.Path | None) -> IO[bytes]:
    return open(body, "rb") if isinstance(body, pathlib.Path) else io.BytesIO(body or b"")
