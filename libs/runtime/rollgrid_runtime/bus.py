"""NATS JetStream: the only module that talks to it, beside `kv` and `pulling`.

Publishing is idempotent or compare-and-set; payloads over the inline limit go to S3 as claim
checks.  A durable publish has one deadline, inside which it is retried when that is safe.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from . import plain_nats  # noqa: F401 - before nats itself

# isort: split
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RawStreamMsg, StreamInfo
from nats.js.errors import APIError, NotFoundError
from rollgrid_contracts import SCHEMA_VERSION, codec, ids
from rollgrid_contracts.samples import BlobRef
from rollgrid_contracts.topology import (
    DEDUPE_HEADER,
    EXPECTED_SEQUENCE_HEADER,
    INLINE_LIMIT,
    Consumer,
    Header,
)

from . import bus_metrics as metrics
from .blobs import Blobs
from .errors import BusError, Conflict, QueueFull, RollgridError
from .logging import get_logger
from .pulling import Puller
from .settings import NatsSettings

T = TypeVar("T")
log = get_logger(__name__)

ATOMIC_BATCH_MIN = 5
"""Below this many messages single publishes cost fewer fsyncs than an atomic batch (4, measured)."""
ATOMIC_BATCH_MAX = 500

WRONG_LAST_SEQUENCE = 10071
STREAM_FULL = (10077, 10122)
CONSUMER_NOT_FOUND = 10014
_TRANSIENT = (NatsError, TimeoutError, OSError)


class PubAck(NamedTuple):
    sequence: int
    duplicate: bool


class Outgoing(NamedTuple):
    """One message of `publish_batch`."""

    subject: str
    message: Any
    headers: Mapping[str, str]


class _SturdyClient(Client):
    """A NATS client whose requests honour cancellation, and which no message can stop.

    `asyncio.wait_for` of Python 3.11, under every nats-py request, drops a cancellation that
    arrives together with the answer (two in five in a tight loop, measured): a loop of requests
    then outlives its task group's cancel, and the process never stops.
    """

    async def request(self, *args: Any, **kwargs: Any) -> Msg:
        task = asyncio.current_task()
        before = task.cancelling() if task is not None else 0  # not 0 for ever behind a task group that failed
        answer: Msg = await super().request(*args, **kwargs)
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError
        return answer

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        """Headers that nats-py cannot read (a status line that is no text) would end its reading for good."""
        try:
            found: dict[str, str] | None = await super()._process_headers(headers)
        except (UnicodeDecodeError, IndexError):
            return None
        return found


class Bus:
    """A connection to NATS with typed messages.  Made by `connect`, closed by `close`."""

    def __init__(self, client: Client, settings: NatsSettings, blobs: Blobs | None) -> None:
        self.client = client
        self.settings = settings
        self.js: JetStreamContext = client.jetstream(timeout=5)
        self.connection_epoch = 0
        self._blobs = blobs
        self._permission_errors: list[str] = []

    @classmethod
    async def connect(cls, settings: NatsSettings, name: str, blobs: Blobs | None = None) -> Bus:
        """Connect, retrying for ever afterwards; raises BusError if no server answers within 10 s."""
        bus: Bus | None = None

        async def on_error(error: Exception) -> None:
            level = log.debug if isinstance(error, OSError) else log.warning
            level("nats_error", error=repr(error))

        async def on_reconnected() -> None:
            if bus is not None:
                bus.connection_epoch += 1
            metrics.RECONNECTS.inc()
            log.info("nats_reconnected")

        client = _SturdyClient()
        options: dict[str, Any] = {"reconnect_time_wait": 0.25}
        if settings.user is not None:
            options["user"] = settings.user
            options["password"] = settings.password.get_secret_value() if settings.password else ""
        try:
            async with asyncio.timeout(10):
                await client.connect(
                    settings.url,
                    name=name,
                    error_cb=on_error,
                    reconnected_cb=on_reconnected,
                    max_reconnect_attempts=-1,
                    connect_timeout=2,
                    ping_interval=10,
                    max_outstanding_pings=2,
                    pending_size=32 * 1024 * 1024,
                    **options,
                )
        except (*_TRANSIENT, ValueError) as error:
            raise BusError(f"cannot reach NATS at {settings.url}: {error!r}") from error
        bus = cls(client, settings, blobs)
        return bus

    async def close(self) -> None:
        try:
            async with asyncio.timeout(3):
                await self.client.flush()
        except _TRANSIENT:
            log.warning("nats_flush_failed_at_close")
        await self.client.close()

    @property
    def connected(self) -> bool:
        return bool(self.client.is_connected)

    # -- durable publishing -------------------------------------------------------------------

    async def publish(
        self,
        subject: str,
        message: Any,
        *,
        msg_id: str | None = None,
        expected_last: int | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 20.0,
    ) -> PubAck:
        """Publish durably and wait for the ack, with one deadline.

        Retried until the deadline unless `expected_last` is given (an ambiguous failure of a
        compare-and-set must be re-read by the caller).  Without `msg_id` a retry may store the
        message twice: readers of such subjects fold duplicates.

        Raises:
            QueueFull: the stream is at its bound; nothing stored.
            Conflict: `expected_last` is not the subject's last sequence.
            BusError: no ack within `timeout_s` (the message may or may not be stored).
        """
        payload, head = await self._prepare(message, headers)
        if msg_id is not None:
            head[DEDUPE_HEADER] = msg_id
        if expected_last is not None:
            head[EXPECTED_SEQUENCE_HEADER] = str(expected_last)
        problem, begun = "no answer", time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        ack = _ack(
                            await self.client.request(subject, payload, headers=head, timeout=min(5.0, timeout_s))
                        )
                        if not ack.duplicate:
                            metrics.published(time.perf_counter() - begun)
                        return ack
                    except _TRANSIENT as error:
                        problem = repr(error)
                        if expected_last is not None:
                            break
                    await asyncio.sleep(0.1)
        except TimeoutError:
            pass
        raise BusError(f"publish to {subject} not acknowledged within {timeout_s} s: {problem}")

    async def publish_batch(
        self, items: Sequence[Outgoing], *, expected_last: int | None = None, timeout_s: float = 20.0
    ) -> list[int]:
        """Publish to one stream as atomic batches where that saves fsyncs; stream sequences in order.

        `expected_last` guards the first message (all items must then share its subject).  Nothing
        is retried: on any error the caller re-reads what was stored.

        Raises as `publish`.
        """
        sequences: list[int] = []
        last = expected_last
        for start in range(0, len(items), ATOMIC_BATCH_MAX):
            chunk = items[start : start + ATOMIC_BATCH_MAX]
            if len(chunk) < ATOMIC_BATCH_MIN:
                stored = await self._publish_singly(chunk, last, timeout_s)
            else:
                stored = await self._publish_atomic(chunk, last, timeout_s)
            sequences += stored
            if last is not None:
                last = stored[-1]
        return sequences

    async def _publish_singly(self, items: Sequence[Outgoing], last: int | None, timeout_s: float) -> list[int]:
        sequences: list[int] = []
        for item in items:
            ack = await self.publish(
                item.subject, item.message, headers=item.headers, expected_last=last, timeout_s=timeout_s
            )
            sequences.append(ack.sequence)
            if last is not None:
                last = ack.sequence
        return sequences

    async def _publish_atomic(self, items: Sequence[Outgoing], last: int | None, timeout_s: float) -> list[int]:
        """An atomic batch (ADR-50): all or nothing, about 4 fsyncs whatever its size."""
        batch, begun = ids.new_key(), time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                for position, item in enumerate(items, 1):
                    payload, head = await self._prepare(item.message, item.headers)
                    head |= {"Nats-Batch-Id": batch, "Nats-Batch-Sequence": str(position)}
                    if position == 1 and last is not None:
                        head[EXPECTED_SEQUENCE_HEADER] = str(last)
                    if position == len(items):
                        head["Nats-Batch-Commit"] = "1"
                        ack = _ack(await self.client.request(item.subject, payload, headers=head, timeout=timeout_s))
                        metrics.published_batch(len(items), time.perf_counter() - begun)
                        return list(range(ack.sequence - len(items) + 1, ack.sequence + 1))
                    if position == 1:
                        _refuse_error(await self.client.request(item.subject, payload, headers=head, timeout=timeout_s))
                    else:
                        await self.client.publish(item.subject, payload, headers=head)
        except _TRANSIENT as error:
            raise BusError(f"batch of {len(items)} to {items[0].subject} not acknowledged: {error!r}") from error
        raise AssertionError("an atomic batch always ends in its commit")

    # -- core NATS ----------------------------------------------------------------------------

    async def publish_core(self, subject: str, message: Any) -> None:
        """Fire a core message (no durability); payloads over the server's limit raise BusError."""
        try:
            await self.client.publish(subject, codec.encode(message))
        except NatsError as error:
            raise BusError(f"core publish to {subject}: {error!r}") from error

    async def request(self, subject: str, message: Any, kind: type[T], timeout_s: float) -> T:
        """One core request.  Raises BusError when nobody answers in time."""
        try:
            answer = await self.client.request(subject, codec.encode(message), timeout=timeout_s)
        except _TRANSIENT as error:
            raise BusError(f"no answer on {subject} within {timeout_s} s: {error!r}") from error
        return codec.decode(answer.data, kind)

    async def subscribe(
        self, subject: str, kind: type[T], handler: Callable[[T, str], Awaitable[None]], queue: str = ""
    ) -> Subscription:
        """Call `handler(message, reply_subject)` for each core message; undecodable ones are logged."""

        async def on_message(msg: Msg) -> None:
            try:
                message = codec.decode(msg.data, kind)
            except Exception as error:  # noqa: BLE001 - a foreign message must not end the subscription
                log.warning("undecodable_core_message", subject=msg.subject, error=repr(error))
                return
            await handler(message, msg.reply)

        return await self.client.subscribe(subject, queue=queue, cb=on_message)

    async def respond(self, reply: str, message: Any) -> None:
        if reply:
            await self.publish_core(reply, message)

    async def publish_raw(self, subject: str, data: bytes, reply: str = "") -> None:
        if data == metrics.ACK:
            metrics.acknowledged(subject)
        try:
            await self.client.publish(subject, data, reply=reply)
        except NatsError as error:
            raise BusError(f"publish to {subject}: {error!r}") from error

    async def request_raw(self, subject: str, data: bytes, timeout_s: float) -> bytes:
        if data == metrics.ACK:
            metrics.acknowledged(subject)
        try:
            return bytes((await self.client.request(subject, data, timeout=timeout_s)).data)
        except _TRANSIENT as error:
            raise BusError(f"no answer on {subject} within {timeout_s} s: {error!r}") from error

    async def subscribe_raw(self, subject: str, handler: Callable[[Msg], Awaitable[None]]) -> Subscription:
        return await self.client.subscribe(subject, cb=handler, pending_msgs_limit=-1, pending_bytes_limit=-1)

    async def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription; one whose connection is closed has ended with it."""
        try:
            await subscription.unsubscribe()
        except NatsError as error:
            log.debug("not_unsubscribed", error=repr(error))

    def new_inbox(self) -> str:
        return str(self.client.new_inbox())

    # -- consumers and stored messages --------------------------------------------------------

    def puller(self, consumer: Consumer) -> Puller:
        return Puller(self, consumer.stream, consumer.durable)

    async def delete_consumer(self, stream: str, durable: str) -> None:
        """Delete a durable; deleting one that is gone is not an error."""
        try:
            await self.js.delete_consumer(stream, durable)
        except NotFoundError:
            return
        except _TRANSIENT as error:
            raise BusError(f"deleting {stream}/{durable}: {error!r}") from error

    async def consumer_names(self, stream: str) -> list[str]:
        """Names of all durables of a stream (paged)."""
        names: list[str] = []
        while True:
            body = json.dumps({"offset": len(names)}).encode()
            answer = json.loads(await self.request_raw(f"$JS.API.CONSUMER.NAMES.{stream}", body, 5))
            if "error" in answer:
                raise _classified(answer["error"])
            names += answer.get("consumers") or []
            if len(names) >= int(answer.get("total", 0)) or not answer.get("consumers"):
                return names

    async def stream_info(self, stream: str) -> StreamInfo:
        try:
            return await self.js.stream_info(stream)
        except (APIError, *_TRANSIENT) as error:
            raise BusError(f"info of {stream}: {error!r}") from error

    async def subjects(self, stream: str, subject: str) -> dict[str, int]:
        """How many messages the stream holds, by each of the subjects that match (wildcards allowed)."""
        try:
            info = await self.js.stream_info(stream, subject)
        except (APIError, *_TRANSIENT) as error:
            raise BusError(f"counting {subject} in {stream}: {error!r}") from error
        return dict(info.state.subjects or {})

    async def count(self, stream: str, subject: str) -> int:
        """How many messages of a subject (wildcards allowed) the stream holds."""
        return sum((await self.subjects(stream, subject)).values())

    async def consumer_info(self, stream: str, durable: str) -> ConsumerInfo | None:
        """What the server says of a consumer, None when there is none."""
        try:
            info: ConsumerInfo = await self.js.consumer_info(stream, durable)
            return info
        except NotFoundError:
            return None
        except (APIError, *_TRANSIENT) as error:
            raise BusError(f"info of {stream}/{durable}: {error!r}") from error

    async def stored(self, stream: str, sequence: int) -> RawStreamMsg | None:
        """The stored message at a stream sequence, None when it is gone."""
        return await self._stored(self.js.get_msg(stream, sequence), f"{stream}@{sequence}")

    async def last_stored(self, stream: str, subject: str) -> RawStreamMsg | None:
        """The last stored message of a subject, None when there is none."""
        return await self._stored(self.js.get_last_msg(stream, subject), f"{stream} {subject}")

    async def _stored(self, call: Awaitable[RawStreamMsg], what: str) -> RawStreamMsg | None:
        try:
            return await call
        except NotFoundError:
            return None
        except (APIError, *_TRANSIENT) as error:
            raise BusError(f"reading {what}: {error!r}") from error

    async def delete_message(self, stream: str, sequence: int) -> bool:
        """Delete one message from a stream and so from every consumer; False when it was gone."""
        try:
            return bool(await self.js.delete_msg(stream, sequence))
        except APIError:
            return False
        except _TRANSIENT as error:
            raise BusError(f"deleting {stream}@{sequence}: {error!r}") from error

    async def purge_below(self, stream: str, sequence: int, subject: str | None = None) -> None:
        """Drop every message (of `subject`, if given) with a sequence lower than `sequence`."""
        try:
            await self.js.purge_stream(stream, seq=sequence, subject=subject)
        except (APIError, *_TRANSIENT) as error:
            raise BusError(f"purging {stream}: {error!r}") from error

    # -- payloads -----------------------------------------------------------------------------

    async def _prepare(self, message: Any, headers: Mapping[str, str] | None) -> tuple[bytes, dict[str, str]]:
        payload = message if isinstance(message, bytes) else codec.encode(message)
        head = {Header.SCHEMA.value: str(SCHEMA_VERSION), Header.CONTENT_TYPE.value: codec.MSGPACK}
        if headers:
            head.update(headers)
        if len(payload) > INLINE_LIMIT:
            if self._blobs is None:
                raise BusError(f"payload of {len(payload)} bytes needs S3, which this client has not")
            ref = await self._blobs.put_payload(payload)
            payload = codec.encode(ref)
            head[Header.CLAIM.value] = ref.sha256
        return payload, head

    async def resolve(self, data: bytes, headers: Mapping[str, str] | None) -> bytes:
        """The payload itself, from S3 when `data` is a claim check; raises StorageError."""
        if not headers or Header.CLAIM.value not in headers:
            return data
        if self._blobs is None:
            raise BusError("a claim check needs S3, which this client has not")
        return await self._blobs.get_payload(codec.decode(data, BlobRef))

    async def decoded(self, data: bytes | None, headers: Mapping[str, str] | None, kind: type[T]) -> T:
        """The message of a payload as it is stored or delivered, in the content type it says it has.

        Raises msgspec.DecodeError and RecursionError on malformed bytes, StorageError and PayloadGone as `resolve`.
        """
        payload = await self.resolve(data or b"", headers)
        return codec.decode(payload, kind, (headers or {}).get(Header.CONTENT_TYPE.value, codec.MSGPACK))


def _classified(error: Mapping[str, Any]) -> RollgridError:
    code, text = int(error.get("err_code", 0)), str(error.get("description", error))
    if code == WRONG_LAST_SEQUENCE:
        return Conflict(text)
    if code in STREAM_FULL or (error.get("code") == 503 and "exceed" in text):
        return QueueFull(text)
    return BusError(f"{text} (err_code {code})")


def _refuse_error(msg: Msg) -> None:
    if msg.headers and msg.headers.get("Status") == "503":
        raise NoRespondersError
    if msg.data:
        body = json.loads(msg.data)
        if "error" in body:
            raise _classified(body["error"])


def _ack(msg: Msg) -> PubAck:
    _refuse_error(msg)
    body = json.loads(msg.data)
    return PubAck(int(body["seq"]), bool(body.get("duplicate", False)))
