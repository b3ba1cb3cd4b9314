"""What one client has of one streamed sample: frames and the record in, pieces to send out.

Pure.  Invariants, whatever is lost, doubled, late or begun again:
- what was sent is always a prefix of the record, or the stream ends in `StreamBroken`;
- frames of an older attempt than the newest are dropped, and so are those a worker sent that was taken over;
- an attempt goes on exactly behind what was sent, or begins again at 0: then what was sent already is compared
  and skipped; everything else is a gap, and what lies behind a gap comes from the record alone.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import NamedTuple

from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import Resume, VersionSpan
from rollgrid_contracts.samples import Sample, TokenFrame, TopLogprobs
from rollgrid_runtime.errors import RollgridError

from .visible import Visible, Wording, visible_of

Alternatives = list[list[tuple[int, float]]]
"""Per token, the alternatives beside it in rank order."""


class StreamBroken(RollgridError):
    """The rest of this sample does not fit what was sent: the stream must end without its end."""

    def __init__(self, why: str) -> None:
        super().__init__(
            ErrorCode.ENGINE_ERROR,
            f"generation was restarted and differs from what was streamed ({why})",
            boundary=Boundary.ENGINE,
            retry_after_s=1.0,
        )


class Piece(NamedTuple):
    """New for the client: tokens from `start` on, and what they add to the visible answer."""

    start: int
    token_ids: list[int]
    logprobs: list[float]
    alternatives: Alternatives
    added: Visible


class SampleStream:
    """One sample's stream.  `exact` when the client sees logprobs, so that they must equal the record's, too."""

    def __init__(self, index: int, *, exact: bool) -> None:
        self.index, self._exact = index, exact
        self.token_ids: array[int] = array("I")
        self.logprobs: array[float] = array("f")
        self.spans: list[VersionSpan] = []
        self.finished = False
        self._sent = Wording()
        self._attempt = 0
        self._oldest = 0
        self._position = 0
        self._lost = False
        self._again: Wording | None = None

    def frame(self, frame: TokenFrame) -> Piece | None:
        """What this frame adds, if anything.  Raises StreamBroken."""
        if self.finished or frame.attempt < max(self._attempt, self._oldest) or not self._on_course(frame):
            return None
        ids = frame.token_ids.tolist()
        start = frame.offset
        known = min(len(self.token_ids) - start, len(ids))
        if known > 0 and self.token_ids[start : start + known].tolist() != ids[:known]:
            raise StreamBroken(f"token {start} or later")
        self._position = start + len(ids)
        new_ids, new_logprobs = ids[known:], frame.logprobs.tolist()[known:]
        if len(new_logprobs) != len(new_ids):
            self._lost = True
            return None
        added = self._reworded(frame)
        sent = len(self.token_ids)
        self._take(new_ids, new_logprobs, frame.spans)
        if not new_ids and added.empty:
            return None
        others = alternatives_of(frame.top_logprobs, len(ids))[known:]
        return Piece(sent, new_ids, new_logprobs, others, added)

    def record(self, sample: Sample) -> Piece | None:
        """The finished sample: what the client has not got of it.  Raises StreamBroken."""
        if self.finished:
            return None
        sent = len(self.token_ids)
        ids, logprobs = sample.token_ids.tolist(), sample.logprobs.tolist()
        if ids[:sent] != self.token_ids.tolist():
            raise StreamBroken("the record has other tokens")
        if self._exact and logprobs[:sent] != self.logprobs.tolist():
            raise StreamBroken("the record has other logprobs")
        added = self._sent.missing(visible_of(sample))
        if added is None:
            raise StreamBroken("the record has another text")
        self.finished = True
        self._sent.add(added)
        self._take(ids[sent:], logprobs[sent:], ())
        self.spans = list(sample.version_spans)
        if sent == len(ids) and added.empty:
            return None
        return Piece(sent, ids[sent:], logprobs[sent:], alternatives_of(sample.top_logprobs, len(ids))[sent:], added)

    def taken_over(self) -> Resume | None:
        """Another worker asks where to go on: what was sent.  Nothing of earlier attempts is sent any more."""
        self._oldest = max(self._attempt + 1, 2)
        if not self.token_ids:
            return None
        return Resume(
            index=self.index,
            token_ids=TokenIds.of(self.token_ids),
            logprobs=Floats.of(self.logprobs),
            spans=tuple(self.spans),
        )

    # -- one frame ------------------------------------------------------------------------------

    def _on_course(self, frame: TokenFrame) -> bool:
        """Whether the frame begins where its attempt stands; follows a new attempt."""
        sent = len(self.token_ids)
        if frame.attempt > self._attempt:
            self._attempt, self._position = frame.attempt, frame.offset
            self._lost = frame.offset not in (0, sent)
            self._again = None if frame.offset == sent else Wording()
            return not self._lost
        if self._lost or frame.offset < self._position:
            return False
        if frame.offset > self._position:
            self._lost = True
        return not self._lost

    def _reworded(self, frame: TokenFrame) -> Visible:
        """What the frame adds to what the client reads.  Raises StreamBroken."""
        words = Visible(frame.text, frame.reasoning, [{"index": i, **call} for i, call in enumerate(frame.tool_calls)])
        if self._again is None:
            self._sent.add(words)
            return words
        self._again.add(words)
        whole = self._again.whole()
        added = self._sent.missing(whole)
        if added is not None:  # caught up
            self._again = None
        else:
            added = self._sent.missing(whole, partial=True)
            if added is None:
                raise StreamBroken("another text")
        self._sent.add(added)
        return added

    def _take(self, ids: list[int], logprobs: list[float], spans: tuple[VersionSpan, ...]) -> None:
        start = len(self.token_ids)
        self.token_ids.extend(ids)
        self.logprobs.extend(logprobs)
        end = len(self.token_ids)
        for span in spans:
            first, last = max(span.start, start), min(span.end, end)
            if first >= last:
                continue
            if self.spans and self.spans[-1].version == span.version and self.spans[-1].end == first:
                first = self.spans.pop().start
            self.spans.append(VersionSpan(version=span.version, start=first, end=last))


def alternatives_of(top: TopLogprobs | None, tokens: int) -> Alternatives:
    if top is None:
        return [[] for _ in range(tokens)]
    ids, values = top.token_ids.tolist(), top.logprobs.tolist()
    return [list(zip(ids[a:b], values[a:b], strict=True)) for a, b in pairwise(top.offsets.tolist())]
