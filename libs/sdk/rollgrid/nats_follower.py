"""Reads one durable over NATS: a few messages ahead, each kept alive until it is acknowledged.

Only three subjects are used, those a tenant's account imports.  Messages that come again while they
are in hand, or although they were acknowledged a moment ago, are recognised by their sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import msgspec
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.failures import ErrorInfo
from rollgrid_contracts.topology import Consumer, Header
from rollgrid_contracts.trajectories import CloseReason, GroupClosed

from .async_client import AsyncClient
from .errors import ConfigurationError, DeadlineExceeded, NotFound, ServerError
from .results import Group

if TYPE_CHECKING:
    from nats.aio.msg import Msg

    from .nats_client import NatsClient

AHEAD = 32
NO_MESSAGES, EXPIRED, NOBODY = "404", "408", "503"
"""Statuses of a pull request that gave nothing."""

REQUEST_S = 20.0
LOOK_S = 2.0
"""How often a waiting reader sees whether the connection is another one, or the user was refused."""

KEEP_S = 10.0
"""The ack-wait is 30 s unless the deployment says otherwise."""

ACK_ATTEMPTS_S = (1.0, 2.0)
REMEMBERED = 10_000
SUBMISSION = "rollgrid_submit"
"""In the metadata of a refused submission's record: where the message was stored, and its key."""

ABSENT_S = 10.0
"""How long a durable may be missing: nats-server and the operator may just have started."""


class NeedsHTTP(ConfigurationError):
    """The group is larger than the stream carries, and this client has no HTTP client to fetch it with."""


class Message:
    """One delivery of a closed group."""

    def __init__(self, raw: Msg) -> None:
        tokens = raw.reply.split(".")
        base = 4 if len(tokens) >= 11 else 2  # $JS.ACK[.<domain>.<account>].<stream>.<durable>.<n>.<sequence>…
        self.reply, self._data = raw.reply, raw.data
        self._headers: dict[str, str] = raw.headers or {}
        self.sequence = int(tokens[base + 3])
        self.is_close = not subjects.is_rewards(raw.subject)
        self.run = subjects.run_of_trajectory(raw.subject)[1]
        self.group_id = self._headers.get(Header.GROUP, "")

    async def group(self, http: AsyncClient | None) -> Group:
        """Raises NeedsHTTP, ServerError for what this SDK cannot read."""
        if Header.CLAIM in self._headers:
            if http is None:
                raise NeedsHTTP(
                    f"group {self.group_id} is over the stream's inline limit: give NatsClient an http client"
                )
            return await http.group(self.group_id)
        try:
            kind = self._headers.get(Header.CONTENT_TYPE, codec.MSGPACK)
            return Group(codec.decode(self._data, GroupClosed, kind), self.sequence)
        except msgspec.MsgspecError as error:
            raise ServerError(
                f"trajectory {self.sequence} cannot be read ({error}): is this SDK too old?",
                code="internal",
                status=200,
            ) from error

    def refusal(self, sequence: int) -> ErrorInfo | None:
        """Why the submission stored at `sequence` was refused, if this is the record of that."""
        if Header.CLAIM in self._headers:
            return None  # records of refusals are small
        kind = self._headers.get(Header.CONTENT_TYPE, codec.MSGPACK)
        with contextlib.suppress(msgspec.MsgspecError):
            closed = codec.decode(self._data, GroupClosed, kind)
            told = closed.metadata.get(SUBMISSION)
            if closed.reason is CloseReason.REJECTED and isinstance(told, dict) and told.get("sequence") == sequence:
                return closed.entries[0].sample.error
        return None


class Follower:
    """One reader of `consumer`; close it, so that what it holds goes to the next one at once."""

    def __init__(self, client: NatsClient, consumer: Consumer) -> None:
        self._client, self._consumer = client, consumer
        self._ready: deque[Message] = deque()
        self._held: dict[int, Message] = {}
        self._done: OrderedDict[int, None] = OrderedDict()
        self._arrived = asyncio.Event()
        self._subscription: Any = None
        self._inbox = ""
        self._asked_at = float("-inf")
        self._open, self._reconnects = 0, 0
        self._absent_since: float | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def next(self, deadline: float | None) -> Message:
        """Raises DeadlineExceeded, Forbidden, NotFound when there is no such durable."""
        while True:
            self._client.check()
            while self._ready:
                message = self._ready.popleft()
                if message.is_close:
                    return message
                await self.acknowledge(message)
            await self._ask()
            left = LOOK_S if deadline is None else min(LOOK_S, deadline - time.monotonic())
            if left <= 0:
                raise DeadlineExceeded("no further group came in time; nothing is lost")
            self._arrived.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._arrived.wait()

    async def acknowledge(self, message: Message, *, confirmed: bool = False) -> None:
        """Tell the server; with `confirmed` wait a moment until it has said so.

        If it has not heard (or was killed, and does not know the delivery any more) the message comes
        again and is recognised by its sequence.
        """
        from nats.errors import Error

        for seconds in ACK_ATTEMPTS_S:
            reply = self._held.get(message.sequence, message).reply
            with contextlib.suppress(Error, TimeoutError, OSError):
                if confirmed:
                    await self._client.request(reply, b"+ACK", seconds)
                else:
                    await self._client.connection.publish(reply, b"+ACK")
                break
        self._held.pop(message.sequence, None)
        self._done[message.sequence] = None
        while len(self._done) > REMEMBERED:
            self._done.popitem(last=False)

    async def close(self) -> None:
        from nats.errors import Error

        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
        with contextlib.suppress(Error, TimeoutError, OSError, ConfigurationError):
            if self._subscription is not None:
                await self._subscription.unsubscribe()
            given_back = [message.reply for _, message in sorted(self._held.items())]
            for reply in given_back[:-1]:
                await self._client.connection.publish(reply, b"-NAK")
            for reply in given_back[-1:]:  # the answer to the last says that the server has taken all
                await self._client.connection.request(reply, b"-NAK", timeout=2)

    async def _ask(self) -> None:
        """Keep a request for what is not in hand open at the server."""
        from nats.errors import Error

        connection = self._client.connection
        reconnects = connection.stats["reconnects"]
        expired = time.monotonic() - self._asked_at > REQUEST_S
        if self._open > 0 and not expired and reconnects == self._reconnects:
            return
        try:
            if self._subscription is None:
                self._inbox = connection.new_inbox()
                self._subscription = await connection.subscribe(
                    self._inbox, cb=self._on_message, pending_msgs_limit=-1, pending_bytes_limit=-1
                )
                self._keeper = asyncio.create_task(self._keep())
            body = {"batch": AHEAD, "expires": int(REQUEST_S * 1e9)}
            place = f"{self._consumer.stream}.{self._consumer.durable}"
            await connection.publish(f"$JS.API.CONSUMER.MSG.NEXT.{place}", json.dumps(body).encode(), reply=self._inbox)
            self._open, self._asked_at, self._reconnects = AHEAD, time.monotonic(), reconnects
        except (Error, OSError):  # away: asked again when it is back
            self._open = 0

    async def _on_message(self, raw: Msg) -> None:
        status = None if raw.reply.startswith("$JS.ACK.") else (raw.headers or {}).get("Status")
        if status is not None:
            self._open = 0
            self._note(status)
            if status in (EXPIRED, NO_MESSAGES):
                self._arrived.set()  # ask again at once; whatever else it is, in a while
            return
        self._absent_since = None
        self._open = max(0, self._open - 1)
        message = Message(raw)
        if message.sequence in self._done:
            await self._client.connection.publish(raw.reply, b"+ACK")
            return
        if message.sequence not in self._held:
            self._ready.append(message)
        self._held[message.sequence] = message  # the newest delivery is the one to acknowledge
        self._arrived.set()

    def _note(self, status: str) -> None:
        if status != NOBODY:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = time.monotonic()
        elif time.monotonic() - self._absent_since > min(ABSENT_S, self._client.budget_s):
            self._client.refuse(
                NotFound(f"no durable {self._consumer.durable} serves this user", code="not_found", status=404)
            )

    async def _keep(self) -> None:
        """What is in hand is being worked on: the server need not send it again."""
        from nats.errors import Error

        while True:
            await asyncio.sleep(KEEP_S)
            for message in list(self._held.values()):
                with contextlib.suppress(Error, OSError):
                    await self._client.connection.publish(message.reply, b"+WPI")
