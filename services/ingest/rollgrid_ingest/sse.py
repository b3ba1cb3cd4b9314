"""A streamed answer over HTTP: server-sent events, silence filled with comments, an honest end.

The answer begins with the first token (or after `keep_alive_s` of silence): a failure before that is an ordinary
HTTP error, a later one an `error` event without `[DONE]`.  `[DONE]` follows the durable record of every sample.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import Reply
from rollgrid_rendering.renderer import Renderer
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from . import metrics
from .chunks import Chunk, Chunks
from .door import Call, ClientGone, GroupsCall, Parts, ending, request_id, until_disconnect
from .envelope import error_answer
from .replies import Collected, expired
from .stream_call import StreamCall
from .submission import Accepted, Submission

log = get_logger(__name__)
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_encode = msgspec.json.Encoder().encode


def events(chunks: list[Chunk]) -> bytes:
    return b"".join(b"data: %b\n\n" % _encode(chunk) for chunk in chunks)


class _Sender:
    """The client's end: started by the first bytes; who takes nothing for `stall_s` is gone."""

    def __init__(self, send: Send, stall_s: float) -> None:
        self._send, self._stall_s = send, stall_s
        self.started = False
        self.last = time.monotonic()

    async def send(self, data: bytes, *, more: bool = True) -> None:
        """Raises ClientGone."""
        try:
            async with asyncio.timeout(self._stall_s):
                if not self.started:
                    self.started = True
                    await self._send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
                await self._send({"type": "http.response.body", "body": data, "more_body": more})
        except (TimeoutError, OSError) as error:
            raise ClientGone from error
        self.last = time.monotonic()


class StreamAnswer:
    """An ASGI response.  Raises RollgridError while nothing was sent."""

    def __init__(
        self,
        door: Parts,
        request: Request,
        submission: Submission,
        chunks: Chunks,
        renderer: Renderer,
        *,
        exact: bool,
        asked: Call | None = None,
    ) -> None:
        self._door, self._request, self._submission = door, request, submission
        self._asked = GroupsCall(door, submission) if asked is None else asked
        self._call = StreamCall(
            submission,
            chunks,
            renderer,
            exact=exact,
            whole=submission.reply is not Reply.STREAM,
            backlog=door.settings.stream_backlog_tokens,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door, call = self._door, self._call
        sender = _Sender(send, door.settings.stream_stall_s)
        groups = self._submission.groups
        sizes = {group_id: group.n for group_id, group in zip(self._submission.group_ids, groups, strict=True)}
        call.answers = not self._submission.idempotent
        listening = door.replies.listening(sizes, call, self._asked.record)
        async with door.held(), ending(self._asked), listening as collected:
            accepted = await self._asked.submit()
            call.answers = accepted.fresh
            try:
                await until_disconnect(self._request, self._serve(collected, accepted, sender))
            except ClientGone:
                if call.ended:  # the server tells a disconnect as soon as the last byte is out
                    return
                await self._asked.give_up(accepted, "the client disconnected")
                if not sender.started:
                    gone = "the client disconnected"
                    raise RollgridError(ErrorCode.CANCELLED, gone, boundary=Boundary.CLIENT) from None
            except RollgridError as error:
                if sender.started:
                    log.info("stream_ended_early", code=error.code, error=error.message)
                    last = b"data: %b\n\n" % _encode(error_answer(error, request_id(self._request)))
                    with contextlib.suppress(ClientGone):
                        await sender.send(last, more=False)
                if not call.ended:
                    await self._asked.give_up(accepted, "another sample of its call failed")
                if not sender.started:
                    raise

    async def _serve(self, collected: Collected, accepted: Accepted, sender: _Sender) -> None:
        """Until the last choice has ended.  Raises RollgridError, ClientGone."""
        looking = asyncio.create_task(self._look_up(collected, first_s=0.0 if not accepted.fresh else None))
        metrics.STREAMS.inc()
        try:
            await self._send_all(collected, accepted, sender)
        finally:
            metrics.STREAMS.dec()
            looking.cancel()
            await asyncio.gather(looking, return_exceptions=True)

    async def _look_up(self, collected: Collected, *, first_s: float | None) -> None:
        """Whatever a lost reply leaves open is read from the record: after each silence."""
        every_s = self._door.settings.reply_poll_s
        pause_s = every_s if first_s is None else first_s
        while True:
            await asyncio.sleep(pause_s)
            silent_s = time.monotonic() - self._call.heard_at
            pause_s = max(every_s - silent_s, 0.0) or every_s
            if first_s is not None or silent_s >= every_s:
                first_s = None
                await self._door.replies.read_records(collected, self._submission.tenant)

    async def _send_all(self, collected: Collected, accepted: Accepted, sender: _Sender) -> None:
        settings, call = self._door.settings, self._call
        left_s = accepted.deadline - time.time() + settings.reply_grace_s
        if not accepted.fresh:  # what ended long ago must still be looked up
            left_s = max(left_s, settings.reply_grace_s, settings.reply_poll_s)
        give_up = time.monotonic() + left_s
        while True:
            due = min(sender.last + settings.keep_alive_s, give_up)
            await call.wait(due - time.monotonic())
            data = events(call.chunks(collected))
            if call.ended:
                await self._asked.answered(collected)
                await sender.send(data + DONE, more=False)
                return
            if data:
                await sender.send(data)
            elif time.monotonic() >= give_up:
                raise expired()
            elif time.monotonic() - sender.last >= settings.keep_alive_s:
                await sender.send(KEEP_ALIVE)
