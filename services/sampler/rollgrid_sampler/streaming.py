"""Frames of one streamed sample: what the engine tells, put together for the wire.

The first token goes out at once, later ones together, every few tens of milliseconds.  A frame's
text is what its tokens release, so that whoever has the tokens knows the text.  All frames, joined,
are the sample as it is recorded; the last one goes out before the record is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from types import TracebackType
from typing import NamedTuple, Protocol, Self

from rollgrid_contracts import subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import SampleGroup, VersionSpan
from rollgrid_contracts.samples import Parsed, TokenFrame
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from . import alternatives
from .engines.base import Delta, Generated, Sent
from .engines.progress import clipped

log = get_logger(__name__)
LARGEST_FRAME = 2048
"""Tokens in one frame: with twenty alternatives each it stays below the server's payload limit."""


class Read(NamedTuple):
    """What parsers make of some tokens."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[dict[str, object], ...] = ()


class Reader(Protocol):
    """The parsers' view of one sample under way."""

    async def push(self, token_ids: list[int]) -> Read:
        """What these tokens release."""

    def settle(self, parsed: Parsed) -> tuple[Read, Parsed]:
        """The rest; and the result, changed where it contradicts what was released."""

    def fresh(self) -> Reader:
        """One that has read nothing."""


class Pace(NamedTuple):
    interval_s: float
    tokens: int


class SampleStream:
    """`async with` it around the generation; `take` is the engine's `on_delta`.

    `sent` is what the engine was asked to continue behind.
    """

    def __init__(
        self, bus: Bus, job: SampleGroup, index: int, attempt: int, sent: Sent, reader: Reader | None, pace: Pace
    ) -> None:
        self._bus, self._job, self._index, self._attempt = bus, job, index, attempt
        self._sent, self._reader, self._pace = sent, reader, pace
        self._pending: list[Delta] = []
        self._waiting = 0
        self._wake, self._enough = asyncio.Event(), asyncio.Event()
        self._ending = False
        self._offset: int | None = None
        self._text = 0
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._pump = asyncio.create_task(self._publish_deltas())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pump is not None and not self._pump.done():
            self._pump.cancel()
            await asyncio.wait([self._pump])

    def take(self, delta: Delta) -> None:
        self._pending.append(delta)
        self._waiting += len(delta.token_ids)
        self._wake.set()
        if self._waiting >= self._pace.tokens:
            self._enough.set()

    async def finish(self, result: Generated, parsed: Parsed | None) -> Parsed | None:
        """Send what is left of the sample; its parse as it must be recorded."""
        await self._end_pump()
        if self._offset is None:  # nothing was told
            await self._begin(len(self._sent.token_ids) if result.resumed_from else 0)
        offset, end = self._offset or 0, len(result.token_ids)
        rest = Delta(
            offset=offset,
            token_ids=result.token_ids[offset:],
            logprobs=result.logprobs[offset:],
            top_logprobs=alternatives.rows(result.top_logprobs, offset, end),
            text=result.text[result.text_sent + self._text :],
            version_spans=clipped(result.version_spans, offset, end),
        )
        read = Read(content=rest.text)
        if self._reader is not None and parsed is not None:
            read, parsed = self._reader.settle(parsed)
        await self._send(rest, read)
        return parsed

    async def _end_pump(self) -> None:
        self._ending = True
        self._wake.set()
        self._enough.set()
        if self._pump is not None:
            await self._pump

    async def _publish_deltas(self) -> None:
        while not self._ending:
            await self._wake.wait()
            self._wake.clear()
            self._enough.clear()
            await self._flush()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pace.interval_s):
                    await self._enough.wait()
        await self._flush()

    async def _flush(self) -> None:
        pending, self._pending, self._waiting = self._pending, [], 0
        run: list[Delta] = []
        for delta in pending:
            if run and delta.offset != run[-1].offset + len(run[-1].token_ids):
                await self._tell(run)
                run = []
            run.append(delta)
        if run:
            await self._tell(run)

    async def _tell(self, run: list[Delta]) -> None:
        """Portions that follow one another, as frames."""
        whole = joined(run)
        if self._offset != whole.offset:
            await self._begin(whole.offset)
        for start in range(0, len(whole.token_ids), LARGEST_FRAME):
            part = section(whole, start, start + LARGEST_FRAME)
            read = Read(content=part.text) if self._reader is None else await self._reader.push(part.token_ids)
            await self._send(part, read)
        self._text += len(whole.text)

    async def _begin(self, offset: int) -> None:
        """The stream starts here, or again: behind what was sent, or from zero."""
        self._text = 0
        if self._reader is not None:
            self._reader = self._reader.fresh()
            if offset:
                await self._reader.push(self._sent.token_ids[:offset])
        self._offset = offset

    async def _send(self, part: Delta, read: Read) -> None:
        self._offset = part.offset + len(part.token_ids)
        if not part.token_ids and not any(read):
            return
        frame = TokenFrame(
            group_id=self._job.call_id,
            index=self._index,
            attempt=self._attempt,
            offset=part.offset,
            token_ids=TokenIds.of(part.token_ids),
            logprobs=Floats(part.logprobs.tobytes()),
            text=read.content,
            spans=part.version_spans,
            top_logprobs=part.top_logprobs,
            reasoning=read.reasoning,
            tool_calls=read.tool_calls,
        )
        try:
            await self._bus.publish_core(subjects.reply(self._job.call_id), frame)
        except BusError as error:  # whoever reads the stream sees the gap, and the record has everything
            log.warning("frame_lost", group=self._job.group_id, index=self._index, error=error.message)


def joined(run: list[Delta]) -> Delta:
    if len(run) == 1:
        return run[0]
    logprobs = array("f")
    spans: list[VersionSpan] = []
    for delta in run:
        logprobs.extend(delta.logprobs)
        for span in delta.version_spans:
            if spans and spans[-1].version == span.version:
                span = VersionSpan(version=span.version, start=spans.pop().start, end=span.end)
            spans.append(span)
    tops = [delta.top_logprobs for delta in run if delta.top_logprobs is not None]
    return Delta(
        offset=run[0].offset,
        token_ids=[token for delta in run for token in delta.token_ids],
        logprobs=logprobs,
        top_logprobs=alternatives.joined(tops) if len(tops) == len(run) else None,
        text="".join(delta.text for delta in run),
        version_spans=tuple(spans),
    )


def section(whole: Delta, start: int, end: int) -> Delta:
    """Tokens [start, end) of a portion; its text goes with the last ones."""
    tokens = len(whole.token_ids)
    if start == 0 and end >= tokens:
        return whole
    first, last = whole.offset + start, min(end, tokens)
    return Delta(
        offset=first,
        token_ids=whole.token_ids[start:last],
        logprobs=whole.logprobs[start:last],
        top_logprobs=alternatives.rows(whole.top_logprobs, start, last),
        text=whole.text if last == tokens else "",
        version_spans=clipped(whole.version_spans, first, whole.offset + last),
    )
