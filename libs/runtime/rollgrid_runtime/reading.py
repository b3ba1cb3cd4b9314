"""Reading a stream by cursor: stateless pages, and a wake-up when something new is stored.

A page is one batched direct get (no consumer, no ack, no fsync), so any number of readers cost
nothing while they do not read.  `Tail` tells waiting readers of one subject that it has grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from .bus import Bus
from .errors import BusError
from .logging import get_logger

log = get_logger(__name__)

PAGE_BYTES = 8 * 1024 * 1024
"""The server ends a page early at about this many bytes."""

BATCH_SEQUENCE_HEADER = "Nats-Batch-Sequence"
"""On messages of an atomic batch: 1 for its first; their stream sequences are consecutive."""

FALLBACK_WAKE_S = 2.0
"""A waiting reader looks again after so long even if no wake-up came (one may be lost with a connection)."""


class Stored(NamedTuple):
    """One stored message; the payload may be a claim check (`Bus.resolve`)."""

    sequence: int
    subject: str
    data: bytes
    headers: dict[str, str]


class Page(NamedTuple):
    """Messages in stream order; `pending` more match behind them."""

    messages: list[Stored]
    pending: int


async def read_after(
    bus: Bus,
    stream: str,
    subject: str,
    sequence: int,
    limit: int,
    *,
    max_bytes: int = PAGE_BYTES,
    timeout_s: float = 10.0,
) -> Page:
    """Up to `limit` messages of `subject` (wildcards allowed) behind stream `sequence`.

    Raises BusError when the server does not answer within `timeout_s` or the page was cut short.
    """
    body = {"seq": max(0, sequence) + 1, "next_by_subj": subject, "batch": limit, "max_bytes": max_bytes}
    arrived: asyncio.Queue[Msg] = asyncio.Queue()
    inbox = bus.new_inbox()
    subscription = await bus.subscribe_raw(inbox, arrived.put)
    found: list[Stored] = []
    try:
        async with asyncio.timeout(timeout_s):
            await bus.publish_raw(f"$JS.API.DIRECT.GET.{stream}", json.dumps(body).encode(), reply=inbox)
            while True:
                msg = await arrived.get()
                headers = {str(name): value for name, value in (msg.headers or {}).items()}
                status = headers.get("Status")
                if status == "404":
                    return Page(found, 0)
                if status == "204":
                    return Page(found, int(headers.get("Nats-Num-Pending", "0")))
                if status is not None:
                    raise BusError(f"reading {stream}: {status} {headers.get('Description', '')}")
                found.append(Stored(int(headers["Nats-Sequence"]), headers["Nats-Subject"], msg.data, headers))
    except TimeoutError as error:
        raise BusError(f"reading {stream}: no answer within {timeout_s} s") from error
    finally:
        await bus.unsubscribe(subscription)


class Tail:
    """Wakes readers of one subject when a message has been stored on it.  Use as a context manager.

    One headers-only ephemeral consumer per tail, kept in the server's memory and gone soon after
    its reader; it is made again after a reconnect.
    """

    def __init__(
        self,
        bus: Bus,
        stream: str,
        subject: str,
        on_headers: Callable[[Mapping[str, str]], None] | None = None,
        *,
        after: int | None = None,
    ) -> None:
        """`on_headers` is called with the headers of every message stored while the tail is there.

        With `after` also with those stored before, behind that sequence; `sequence` is that of the message at hand.
        """
        self._bus, self._stream, self._subject, self._on_headers = bus, stream, subject, on_headers
        self._after = after
        self.sequence = 0
        self._subscription: Subscription | None = None
        self._epoch = -1
        self._grown = asyncio.Event()

    async def __aenter__(self) -> Tail:
        await self._ensure()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)
            self._subscription = None

    async def wait(self, timeout_s: float) -> None:
        """Return when the subject may have grown since the last call, or after `timeout_s`.

        Enter the tail, then read, wait, read, …: what is stored between a read and its wait ends
        that wait at once.
        """
        await self._ensure()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout_s, FALLBACK_WAKE_S)):
                await self._grown.wait()
        self._grown.clear()

    async def _ensure(self) -> None:
        """Make the consumer unless this connection has it.  A server that does not answer leaves the fallback."""
        if self._subscription is not None and self._epoch == self._bus.connection_epoch:
            return
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)
        self._epoch = self._bus.connection_epoch
        inbox = self._bus.new_inbox()
        self._subscription = await self._bus.subscribe_raw(inbox, self._on_message)
        config = {
            "deliver_subject": inbox,
            **self._start(),
            "ack_policy": "none",
            "filter_subject": self._subject,
            "headers_only": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": 5_000_000_000,
        }
        request = json.dumps({"stream_name": self._stream, "config": config}).encode()
        try:
            answer = json.loads(await self._bus.request_raw(f"$JS.API.CONSUMER.CREATE.{self._stream}", request, 5))
        except BusError as error:
            log.warning("tail_not_made", stream=self._stream, error=error.message)
            self._epoch = -1
            return
        if "error" in answer:
            log.warning("tail_refused", stream=self._stream, error=answer["error"])
            self._epoch = -1

    def _start(self) -> dict[str, object]:
        if self._after is None:
            return {"deliver_policy": "new"}
        return {"deliver_policy": "by_start_sequence", "opt_start_seq": max(self._after, self.sequence) + 1}

    async def _on_message(self, msg: Msg) -> None:
        if self._on_headers is not None:
            self.sequence = msg.metadata.sequence.stream
            self._on_headers(msg.headers or {})
        self._grown.set()


class ConsumerLag(NamedTuple):
    """How far one durable is behind: not yet delivered, and delivered without an ack."""

    pending: int
    unacked: int


async def consumer_lags(bus: Bus, stream: str) -> dict[str, ConsumerLag]:
    """Lag of every durable of a stream.  Raises BusError."""
    found: dict[str, ConsumerLag] = {}
    offset = 0
    while True:
        body = json.dumps({"offset": offset}).encode()
        answer = json.loads(await bus.request_raw(f"$JS.API.CONSUMER.LIST.{stream}", body, 5))
        if "error" in answer:
            raise BusError(f"consumers of {stream}: {answer['error'].get('description')}")
        listed = answer.get("consumers") or []
        for info in listed:
            if info["config"].get("durable_name"):
                found[info["name"]] = ConsumerLag(int(info["num_pending"]), int(info["num_ack_pending"]))
        offset += len(listed)
        if not listed or offset >= int(answer.get("total", 0)):
            return found
