"""What a client makes of a stream: frames taken up, and joined as ingest joins them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from rollgrid_contracts import subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import Resume, VersionSpan
from rollgrid_contracts.samples import Sample, SampleReply, StreamQuery, StreamState, TokenFrame
from rollgrid_runtime.bus import Bus
from rollgrid_sampler import alternatives

ANY = cast(type[TokenFrame | SampleReply], TokenFrame | SampleReply)


class Stream:
    """Everything published on one group's reply subject; answers `StreamQuery` when told to."""

    def __init__(self, group: str) -> None:
        self.group = group
        self.frames: dict[int, list[TokenFrame]] = defaultdict(list)
        self.replies: dict[int, Sample] = {}
        self.asked = 0
        self.order: list[str] = []

    def tokens(self, index: int) -> int:
        return sum(len(frame.token_ids) for frame in self.frames[index])

    async def replied(self, samples: int, timeout_s: float = 20.0) -> None:
        await until(lambda: len(self.replies) >= samples, timeout_s)

    def sent(self) -> StreamState:
        entries = []
        for index, frames in self.frames.items():
            whole = joined(frames)
            entries.append(Resume(index=index, token_ids=whole.token_ids, logprobs=whole.logprobs, spans=whole.spans))
        return StreamState(group_id=self.group, sent=tuple(entries))


@contextlib.asynccontextmanager
async def listening(bus: Bus, group: str, *, answer: bool = True) -> AsyncIterator[Stream]:
    stream = Stream(group)

    async def on_message(message: TokenFrame | SampleReply, _: str) -> None:
        if isinstance(message, TokenFrame):
            stream.frames[message.index].append(message)
            stream.order.append(f"frame {message.index}")
        else:
            stream.replies |= {sample.index: sample for sample in message.samples}
            stream.order += [f"reply {sample.index}" for sample in message.samples]

    async def on_query(_: StreamQuery, reply: str) -> None:
        stream.asked += 1
        await bus.respond(reply, stream.sent())

    subscriptions = [await bus.subscribe(subjects.reply(group), ANY, on_message)]
    if answer:
        subscriptions.append(await bus.subscribe(subjects.resume(group), StreamQuery, on_query))
    try:
        yield stream
    finally:
        for subscription in subscriptions:
            await bus.unsubscribe(subscription)


def joined(frames: list[TokenFrame]) -> TokenFrame:
    """One frame out of all; each must begin where the one before it ended."""
    spans: list[VersionSpan] = []
    for before, after in itertools.pairwise(frames):
        assert after.offset == before.offset + len(before.token_ids), "a gap or an overlap"
    for span in (span for frame in frames for span in frame.spans):
        if spans and spans[-1].version == span.version:
            assert spans[-1].end == span.start
            span = VersionSpan(version=span.version, start=spans.pop().start, end=span.end)
        spans.append(span)
    tops = [frame.top_logprobs for frame in frames if frame.top_logprobs is not None]
    return TokenFrame(
        group_id=frames[0].group_id,
        index=frames[0].index,
        attempt=frames[-1].attempt,
        offset=frames[0].offset,
        token_ids=TokenIds(b"".join(frame.token_ids.packed for frame in frames)),
        logprobs=Floats(b"".join(frame.logprobs.packed for frame in frames)),
        text="".join(frame.text for frame in frames),
        reasoning="".join(frame.reasoning for frame in frames),
        tool_calls=tuple(call for frame in frames for call in frame.tool_calls),
        spans=tuple(spans),
        top_logprobs=alternatives.joined(tops) if tops else None,
    )


def check_same(frames: list[TokenFrame], sample: Sample) -> None:
    """The frames, joined, are the recorded sample."""
    whole = joined(frames)
    assert whole.offset == 0
    assert whole.token_ids == sample.token_ids
    assert whole.logprobs == sample.logprobs
    assert whole.spans == sample.version_spans
    if sample.parsed is None:
        assert whole.text == sample.text
    else:
        assert whole.text == (sample.parsed.content or "")
        assert whole.reasoning == (sample.parsed.reasoning or "")
        assert whole.tool_calls == sample.parsed.tool_calls
    if not sample.resumed_from:
        assert whole.top_logprobs == sample.top_logprobs


async def until(condition: Callable[[], Any], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
