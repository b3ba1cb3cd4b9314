"""A pull consumer read by standing credit.

nats-py's `fetch(n)` blocks for its whole timeout unless n messages come, and credit it leaves
behind is lost to the caller.  Here a request for n messages stays open at the server; whatever
has arrived is handed over at once, and what is still open counts against the next request, so
that a reader is never sent more than it asked for.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, TypeVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from .errors import ConsumerGone

if TYPE_CHECKING:
    from .bus import Bus

T = TypeVar("T")
ACK_PREFIX = "$JS.ACK."
REQUEST_EXPIRES_S = 20.0
"""How long one pull request stays open at the server."""


class Delivery:
    """One message of a durable: headers, stream sequence, and the ack verbs."""

    __slots__ = (
        "_bus", "_msg", "data", "delivered", "headers", "pending", "sequence", "stored_ns", "subject", "timestamp",
    )  # fmt: skip

    def __init__(self, bus: Bus, msg: Msg) -> None:
        # $JS.ACK[.<domain>.<account>].<stream>.<consumer>.<delivered>.<sseq>.<cseq>.<time>.<pending>[.<token>]
        tokens = msg.reply.split(".")
        base = 4 if len(tokens) >= 11 else 2
        self._bus, self._msg = bus, msg
        self.subject, self.data = msg.subject, msg.data
        self.headers: dict[str, str] = msg.headers or {}
        self.delivered = int(tokens[base + 2])
        self.sequence = int(tokens[base + 3])
        self.stored_ns = int(tokens[base + 5])
        self.timestamp = self.stored_ns / 1e9
        self.pending = int(tokens[base + 6])

    @property
    def ack_subject(self) -> str:
        """Where an ack goes: all that must be kept of a message whose ack comes much later."""
        return str(self._msg.reply)

    async def message(self, kind: type[T]) -> T:
        """Decode the payload, fetching it from S3 when it travelled as a claim check.

        Raises msgspec.DecodeError on malformed bytes, StorageError when the blob is out of reach.
        """
        return await self._bus.decoded(self.data, self.headers, kind)

    async def ack(self) -> None:
        """Acknowledge without waiting (a lost ack means a redelivery)."""
        await self._respond(b"+ACK")

    async def ack_sync(self, timeout_s: float = 5.0) -> None:
        """Acknowledge and wait until the server has stored it."""
        await self._bus.request_raw(self._msg.reply, b"+ACK", timeout_s)

    async def nak(self, delay_s: float = 0.0) -> None:
        body = b"-NAK" if delay_s <= 0 else b"-NAK " + json.dumps({"delay": int(delay_s * 1e9)}).encode()
        await self._respond(body)

    async def in_progress(self) -> None:
        await self._respond(b"+WPI")

    async def _respond(self, body: bytes) -> None:
        await self._bus.publish_raw(self._msg.reply, body)


class Puller:
    """Reads one durable.  Create with `Bus.puller`; one reader at a time."""

    def __init__(self, bus: Bus, stream: str, durable: str) -> None:
        self._bus, self.stream, self.durable = bus, stream, durable
        self._queue: asyncio.Queue[Delivery | ConsumerGone] = asyncio.Queue()
        self._subscription: Subscription | None = None
        self._inbox = ""
        self._credit = 0
        self._expires_at = 0.0
        self._epoch = -1
        self._subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{durable}"

    async def fetch(self, limit: int, wait_s: float) -> list[Delivery]:
        """Up to `limit` messages: those at hand, else the first to come within `wait_s`, else none.

        Raises ConsumerGone when the durable does not exist (any more).
        """
        if self._queue.empty():
            await self._top_up(limit)
        first = await self._next(wait_s)
        if first is None:
            return []
        batch = [first]
        while len(batch) < limit and not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, ConsumerGone):
                self._queue.put_nowait(item)
                break
            batch.append(item)
        return batch

    @property
    def held(self) -> int:
        """Messages delivered here and not yet handed over."""
        return self._queue.qsize()

    async def close(self) -> None:
        """Stop reading; what was delivered and not handed over goes back at once."""
        if self._subscription is not None:
            await self._bus.unsubscribe(self._subscription)
            self._subscription = None
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, Delivery):
                await item.nak()

    async def _next(self, wait_s: float) -> Delivery | None:
        try:
            async with asyncio.timeout(wait_s):
                item = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(item, ConsumerGone):
            raise item
        return item

    async def _top_up(self, limit: int) -> None:
        now = time.monotonic()
        if self._epoch != self._bus.connection_epoch or now > self._expires_at + 1.0:
            self._credit, self._epoch = 0, self._bus.connection_epoch
        if self._subscription is None:
            self._inbox = self._bus.new_inbox()
            self._subscription = await self._bus.subscribe_raw(self._inbox, self._on_message)
        wanted = limit - self._credit
        if wanted <= 0:
            return
        request = {"batch": wanted, "expires": int(REQUEST_EXPIRES_S * 1e9)}
        self._credit += wanted
        self._expires_at = now + REQUEST_EXPIRES_S
        await self._bus.publish_raw(self._subject, json.dumps(request).encode(), reply=self._inbox)

    async def _on_message(self, msg: Msg) -> None:
        # told by the reply, not by its headers: a tenant may give a submission a header named Status
        status = msg.headers.get("Status") if msg.headers and not msg.reply.startswith(ACK_PREFIX) else None
        if status is None:
            self._credit = max(0, self._credit - 1)
            self._queue.put_nowait(Delivery(self._bus, msg))
            return
        description = (msg.headers or {}).get("Description", "")
        if status == "503" or (status == "409" and "Deleted" in description):
            self._credit = 0
            self._queue.put_nowait(ConsumerGone(f"{self.stream}/{self.durable}: {status} {description}".strip()))
        elif status in ("404", "408", "409"):
            left = (msg.headers or {}).get("Nats-Pending-Messages")
            self._credit = max(0, self._credit - int(left)) if left else 0
