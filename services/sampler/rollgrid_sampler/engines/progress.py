"""One streamed sample as it grows: the tokens sent before, those that came since, and their text.

Engines feed it what they get; it tells the caller, finds stop strings (over the join with what was
sent, too) and is the sample in the end.  The portion that ends a sample is not told: the result has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import NamedTuple, Protocol

from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, PromptLogprobs, TopLogprobs

from rollgrid_sampler import alternatives
from rollgrid_sampler.resume import continuable

from .base import Delta, Generated, GenerationRequest, OnDelta, Sent


class End(NamedTuple):
    reason: FinishReason
    stop_reason: int | str | None = None


class Text(Protocol):
    """The sample's text as its ids come; see `transcript.Transcript`."""

    length: int
    count: int
    stopped: str | None

    @property
    def text(self) -> str: ...

    def push(self, token_ids: list[int]) -> str: ...

    def finish(self) -> str: ...


class Progress:
    """`room` is how many tokens the sample may have; `transcript` makes an empty one."""

    def __init__(
        self, request: GenerationRequest, room: int, transcript: Callable[[], Text], on_delta: OnDelta
    ) -> None:
        self._request, self._room, self._transcript, self._on_delta = request, room, transcript, on_delta
        self.cached_tokens = 0
        self.first_token_at = 0.0
        self.prompt_logprobs: PromptLogprobs | None = None
        self._begin(request.sent)

    def _begin(self, sent: Sent) -> None:
        self.token_ids = list(sent.token_ids)
        self.logprobs = array("f", sent.logprobs)
        self.spans = list(sent.version_spans)
        self.resumed_from = len(sent.token_ids)
        self._tops = [alternatives.empty(len(sent.token_ids))]
        self.text = self._transcript()
        self.text.push(self.token_ids)
        self._text_sent = self.text.length

    @property
    def left(self) -> int:
        """Tokens that may still come."""
        return self._room - len(self.token_ids)

    def end(self, eos_id: int | None) -> End | None:
        """Why the tokens so far are the whole sample; None when they are not."""
        sampling, last = self._request.sampling, self.token_ids[-1] if self.token_ids else None
        if self.text.stopped is not None:
            return End(FinishReason.STOP, self.text.stopped)
        if last is not None and last == eos_id and not sampling.ignore_eos:
            return End(FinishReason.STOP)
        if last in sampling.stop_token_ids:
            return End(FinishReason.STOP, last)
        return End(FinishReason.LENGTH) if self.left <= 0 else None

    def interrupted(self) -> None:
        """The engine gave the request up: go on behind what there is if that is exact, else from zero."""
        if not self.token_ids or not continuable(self._request.sampling):
            self._begin(Sent())
            self._on_delta(Delta(offset=0, token_ids=[], logprobs=array("f")))
        else:
            self.resumed_from = len(self.token_ids)

    def so_far(self) -> Sent:
        """What another may continue behind."""
        return Sent(token_ids=list(self.token_ids), logprobs=self.logprobs[:], version_spans=tuple(self.spans))

    def take(
        self,
        token_ids: list[int],
        logprobs: array[float],
        top: TopLogprobs | None,
        spans: tuple[VersionSpan, ...],
        *,
        last: bool = False,
    ) -> None:
        """More tokens, with spans that count from the sample's start; those behind a stop string are dropped."""
        offset = len(self.token_ids)
        text = self.text.push(token_ids)
        kept = len(token_ids)
        if self.text.stopped is not None:
            kept = max(0, self.text.count - offset)
            token_ids, logprobs, top = token_ids[:kept], logprobs[:kept], alternatives.rows(top, 0, kept)
        self.token_ids += token_ids
        self.logprobs.extend(logprobs)
        if top is not None:
            self._tops.append(top)
        self._extend(clipped(spans, offset, offset + kept))
        if kept and not last and self.text.stopped is None:
            delta = Delta(
                offset=offset,
                token_ids=token_ids,
                logprobs=logprobs,
                top_logprobs=top,
                text=text,
                version_spans=clipped(spans, offset, offset + kept),
            )
            self._on_delta(delta)

    def _extend(self, spans: tuple[VersionSpan, ...]) -> None:
        for span in spans:
            if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == span.start:
                span = VersionSpan(version=span.version, start=self.spans.pop().start, end=span.end)
            self.spans.append(span)

    def generated(self, end: End) -> Generated:
        self.text.finish()
        return Generated(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            top_logprobs=alternatives.joined(self._tops) if self._request.sampling.logprobs else None,
            text=self.text.text,
            finish_reason=end.reason,
            stop_reason=end.stop_reason,
            version_spans=tuple(self.spans),
            cached_tokens=self.cached_tokens,
            first_token_at=self.first_token_at,
            prompt_logprobs=self.prompt_logprobs,
            resumed_from=self.resumed_from,
            text_sent=self._text_sent,
        )


def clipped(spans: tuple[VersionSpan, ...], start: int, end: int) -> tuple[VersionSpan, ...]:
    """The spans' part in [start, end)."""
    cut = ((s.version, max(s.start, start), min(s.end, end)) for s in spans)
    return tuple(VersionSpan(version=version, start=a, end=b) for version, a, b in cut if a < b)
