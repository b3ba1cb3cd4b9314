"""One streamed call: frames and replies in by any order, chunks out; bounded while the client is slow.

What a frame says is worked out only when the client takes it: what a worker that takes over is told was sent, was sent.
Frames over the bound are dropped, which is a gap like any other: the record fills it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence

import msgspec
from rollgrid_contracts.samples import Sample, StreamState, TokenFrame
from rollgrid_rendering.renderer import Renderer

from . import metrics
from .chunks import Chunk, Chunks
from .replies import Collected, refuse_failed
from .streaming import SampleStream
from .submission import Submission


class StreamCall:
    """See `replies.Listener`.  `exact` when the client sees logprobs; `whole` when it gets nothing but the record."""

    def __init__(
        self, submission: Submission, chunks: Chunks, renderer: Renderer, *, exact: bool, whole: bool, backlog: int
    ) -> None:
        self._submission, self._chunks, self._renderer = submission, chunks, renderer
        self._whole, self._limit = whole, backlog
        self._streams: list[SampleStream] = []
        self._groups: dict[str, tuple[int, int]] = {}
        self._first = submission.first_index
        for group_id, group in zip(submission.group_ids, submission.groups, strict=True):
            self._groups[group_id] = (len(self._streams), group.n)
            self._streams += [SampleStream(self._first + index, exact=exact) for index in range(group.n)]
        self._inbox: deque[tuple[int, TokenFrame | Sample]] = deque()
        self._waiting_tokens = 0
        self._open = len(self._streams)
        self._begun = False
        self._wake = asyncio.Event()
        self.heard_at = time.monotonic()
        self.answers = False
        """Whether this call tells workers what was sent: not while another call streams the same groups."""

    @property
    def ended(self) -> bool:
        return self._open == 0

    # -- coming in (never waits) ------------------------------------------------------------------

    def on_frame(self, frame: TokenFrame) -> None:
        choice, tokens = self._choice(frame.group_id, frame.index - self._first), len(frame.token_ids)
        if choice is None:
            return
        if self._waiting_tokens + tokens > self._limit:
            metrics.FRAMES_DROPPED.inc()
            return
        self._waiting_tokens += tokens
        self._put(choice, frame)

    def on_sample(self, group_id: str, sample: Sample) -> None:
        choice = self._choice(group_id, sample.index)
        if choice is not None:
            self._put(choice, sample)

    def _put(self, choice: int, item: TokenFrame | Sample) -> None:
        self._inbox.append((choice, item))
        self.heard_at = time.monotonic()
        self._wake.set()

    def sent(self, group_id: str) -> StreamState | None:
        found = self._groups.get(group_id)
        if found is None or not self.answers:
            return None
        first, n = found
        states = [stream.taken_over() for stream in self._streams[first : first + n]]
        return StreamState(group_id=group_id, sent=tuple(state for state in states if state is not None))

    def _choice(self, group_id: str, index: int) -> int | None:
        first, n = self._groups.get(group_id, (0, 0))
        return first + index if 0 <= index < n else None

    # -- going out --------------------------------------------------------------------------------

    async def wait(self, timeout_s: float) -> None:
        """Until something comes in, or not."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._wake.wait()
        self._wake.clear()

    def chunks(self, collected: Collected) -> list[Chunk]:
        """What can be sent now; with the last choice's end, the end of the stream.

        Raises StreamBroken, and the failure of a sample.
        """
        if self._whole and not collected.complete.is_set():
            return []
        found: list[Chunk] = []
        while self._inbox:
            choice, item = self._inbox.popleft()
            stream = self._streams[choice]
            if isinstance(item, TokenFrame):
                self._waiting_tokens -= len(item.token_ids)
                if stream.finished:
                    continue
                piece = stream.frame(item)
                new = [] if piece is None else self._chunks.piece(choice, piece)
            else:
                new = self._finished(choice, item, collected)
            if not self._begun and (new or stream.finished):
                self._begun = True
                found += self._chunks.begin()
            found += new
        if self.ended:
            found += self._chunks.end()
        return found

    def _finished(self, choice: int, sample: Sample, collected: Collected) -> list[Chunk]:
        position, group_id = self._group(choice)
        sampling = self._submission.groups[position].sampling
        self._open -= 1
        refuse_failed([sample], empty=sampling.max_tokens == 0)
        if sample.text is None and sample.parsed is None:
            text = self._renderer.decode(sample.token_ids.tolist(), skip_special_tokens=sampling.skip_special_tokens)
            sample = msgspec.structs.replace(sample, text=text)
        piece = self._streams[choice].record(sample)
        others: Sequence[Sample] = collected.samples(group_id) if self._whole else ()
        of_prompt = next((each.prompt_logprobs for each in others if each.prompt_logprobs is not None), None)
        return self._chunks.finish(choice, piece, sample, of_prompt)

    def _group(self, choice: int) -> tuple[int, str]:
        for position, (group_id, (first, n)) in enumerate(self._groups.items()):
            if first <= choice < first + n:
                return position, group_id
        raise IndexError(choice)
