"""Streams: whatever happens to frames, what was sent is the record, or the stream ends in a typed error (A26, A49)."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.samples import FinishReason, Parsed, Sample, SampleStatus, TokenFrame, TopLogprobs
from rollgrid_ingest.streaming import Piece, SampleStream, StreamBroken
from rollgrid_ingest.visible import Visible, Wording


class Answer(NamedTuple):
    """A whole answer: token t spells `words[t]`, of which an attempt holds the last `held` tokens' words back."""

    ids: tuple[int, ...]
    words: tuple[str, ...]
    held: int = 0

    @property
    def logprobs(self) -> list[float]:
        return [-0.5 * (token + 1) for token in self.ids]

    def frame(self, attempt: int, start: int, end: int) -> TokenFrame:
        shown = self.words[: max(0, end - self.held)] if end < len(self.ids) else self.words
        before = self.words[: max(0, start - self.held)]
        return TokenFrame(
            group_id="g",
            index=0,
            attempt=attempt,
            offset=start,
            token_ids=TokenIds.of(self.ids[start:end]),
            logprobs=Floats.of(self.logprobs[start:end]),
            text="".join(shown[len(before) :]),
            spans=(VersionSpan(version=attempt, start=start, end=end),),
        )

    def record(self, **changes: Any) -> Sample:
        fields: dict[str, Any] = {
            "index": 0,
            "status": SampleStatus.SUCCEEDED,
            "token_ids": TokenIds.of(self.ids),
            "logprobs": Floats.of(self.logprobs),
            "text": "".join(self.words),
            "finish_reason": FinishReason.LENGTH,
            "version_spans": (VersionSpan(version=9, start=0, end=len(self.ids)),),
        }
        return Sample(**{**fields, **changes})


class Client:
    """Puts pieces together as a client does."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.words = Wording()

    def take(self, piece: Piece | None) -> None:
        if piece is None:
            return
        assert piece.start == len(self.ids), "a piece begins where the last one ended"
        assert len(piece.token_ids) == len(piece.logprobs) == len(piece.alternatives)
        self.ids += piece.token_ids
        self.logprobs += piece.logprobs
        self.words.add(piece.added)

    @property
    def text(self) -> str:
        return self.words.whole().content


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    ids = draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    words = [draw(st.sampled_from(("", "a", "b", "ab", "é"))) for _ in ids]
    return Answer(tuple(ids), tuple(words), draw(st.integers(0, 2)))


@st.composite
def troubled(draw: st.DrawFn, *, same: bool) -> tuple[Answer, list[TokenFrame | str], Answer]:
    """An answer, what comes of it in which order, and the answer that the record has."""
    first = draw(answers())
    answer = first
    found: list[TokenFrame | str] = []
    attempt, start = 1, 0
    for _ in range(draw(st.integers(1, 12))):
        match draw(st.sampled_from(("next", "next", "next", "lose", "double", "restart", "over", "old"))):
            case "next":
                end = min(len(answer.ids), start + draw(st.integers(1, 4)))
                if end > start:
                    found.append(answer.frame(attempt, start, end))
                start = end
            case "lose":
                start = min(len(answer.ids), start + 1)
            case "double" if found:
                found.append(draw(st.sampled_from(found)))
            case "restart":
                attempt, start = attempt + 1, 0
                if not same:
                    answer = draw(answers())
            case "over":
                found.append("over")
                attempt += 1
            case "old" if attempt > 1:
                end = draw(st.integers(1, len(first.ids)))
                found.append(first.frame(draw(st.integers(1, attempt - 1)), draw(st.integers(0, end - 1)), end))
    order = draw(st.permutations(found)) if draw(st.booleans()) else found
    return first, list(order), answer


def played(events: list[TokenFrame | str], record: Answer) -> tuple[SampleStream, Client]:
    """Everything that comes, then the record.  Raises StreamBroken."""
    stream, client = SampleStream(0, exact=True), Client()
    for event in events:
        if isinstance(event, TokenFrame):
            client.take(stream.frame(event))
        else:
            sent = stream.taken_over()
            assert client.ids == ([] if sent is None else sent.token_ids.tolist())
            assert client.logprobs == ([] if sent is None else sent.logprobs.tolist())
            assert sent is None or sent.spans[-1].end == len(client.ids)
    client.take(stream.record(record.record()))
    assert stream.finished
    return stream, client


@settings(max_examples=400, deadline=None)
@given(troubled(same=True))
def test_one_answer_arrives_whole_however_its_frames_come(case: tuple[Answer, list[TokenFrame | str], Answer]) -> None:
    answer, events, _ = case
    stream, client = played(events, answer)
    assert client.ids == list(answer.ids)
    assert client.logprobs == answer.logprobs
    assert client.text == "".join(answer.words)
    assert stream.spans == [VersionSpan(version=9, start=0, end=len(answer.ids))]


@settings(max_examples=400, deadline=None)
@given(troubled(same=False))
def test_what_differs_from_the_record_ends_in_a_typed_error(
    case: tuple[Answer, list[TokenFrame | str], Answer],
) -> None:
    _, events, record = case
    try:
        _, client = played(events, record)
    except StreamBroken:
        return
    assert client.ids == list(record.ids)
    assert client.text == "".join(record.words)


ANSWER = Answer((5, 6, 7, 8), ("one ", "two ", "three ", "four"))


def test_frames_flow_and_the_record_adds_the_rest() -> None:
    stream, client = SampleStream(0, exact=True), Client()
    client.take(stream.frame(ANSWER.frame(1, 0, 2)))
    assert client.text == "one two "
    client.take(stream.record(ANSWER.record()))
    assert client.text == "one two three four"
    assert stream.frame(ANSWER.frame(2, 0, 4)) is None, "after the end there is nothing"
    assert stream.record(ANSWER.record()) is None


def test_a_gap_is_filled_by_the_record_or_by_the_next_attempt() -> None:
    stream, client = SampleStream(0, exact=True), Client()
    client.take(stream.frame(ANSWER.frame(1, 0, 1)))
    assert stream.frame(ANSWER.frame(1, 2, 3)) is None
    assert stream.frame(ANSWER.frame(1, 1, 2)) is None, "an attempt with a hole is not followed any more"
    client.take(stream.frame(ANSWER.frame(2, 1, 4)))
    assert client.text == "one two three four"


def test_a_restart_is_skipped_up_to_what_was_sent() -> None:
    stream, client = SampleStream(0, exact=True), Client()
    client.take(stream.frame(ANSWER.frame(1, 0, 2)))
    assert stream.frame(ANSWER.frame(2, 0, 1)) is None
    client.take(stream.frame(ANSWER.frame(2, 1, 3)))
    assert (client.ids, client.text) == ([5, 6, 7], "one two three ")
    assert stream.frame(ANSWER.frame(1, 2, 4)) is None, "of the older attempt nothing counts any more"
    other = Answer((5, 6, 9), ("one ", "two ", "nine"))
    with pytest.raises(StreamBroken, match="restarted and differs") as broken:
        stream.frame(other.frame(3, 0, 3))
    assert broken.value.code is ErrorCode.ENGINE_ERROR


def test_a_take_over_fences_what_the_old_worker_still_sends() -> None:
    stream, client = SampleStream(0, exact=True), Client()
    assert stream.taken_over() is None
    assert stream.frame(ANSWER.frame(1, 0, 2)) is None, "the new worker was told that nothing was sent"
    client.take(stream.frame(ANSWER.frame(2, 0, 2)))
    sent = stream.taken_over()
    assert sent is not None
    assert sent.token_ids.tolist() == [5, 6]
    assert sent.spans == (VersionSpan(version=2, start=0, end=2),)
    assert stream.frame(ANSWER.frame(2, 2, 3)) is None
    client.take(stream.frame(ANSWER.frame(3, 2, 4)))
    assert client.text == "one two three four"


def test_logprobs_count_only_where_the_client_sees_them() -> None:
    for exact in (True, False):
        stream = SampleStream(0, exact=exact)
        stream.frame(ANSWER.frame(1, 0, 2))
        record = ANSWER.record(logprobs=Floats.of([0.0] * 4))
        if exact:
            with pytest.raises(StreamBroken):
                stream.record(record)
        else:
            assert stream.record(record) is not None


def test_tokens_count_even_where_they_spell_the_same() -> None:
    """Two tokens of one text are two answers, whether or not the client sees logprobs."""
    twin = Answer((5, 9, 7, 8), ANSWER.words)
    again = SampleStream(0, exact=False)
    again.frame(ANSWER.frame(1, 0, 2))
    with pytest.raises(StreamBroken):
        again.frame(twin.frame(2, 0, 2))
    recorded = SampleStream(0, exact=False)
    recorded.frame(ANSWER.frame(1, 0, 2))
    with pytest.raises(StreamBroken):
        recorded.record(twin.record())


def test_alternatives_stay_with_their_tokens() -> None:
    stream = SampleStream(0, exact=True)
    stream.frame(ANSWER.frame(1, 0, 1))
    top = TopLogprobs(
        offsets=TokenIds.of([0, 1, 1, 3, 4]), token_ids=TokenIds.of([1, 2, 3, 4]), logprobs=Floats.of([-1, -2, -3, -4])
    )
    piece = stream.record(ANSWER.record(top_logprobs=top))
    assert piece is not None
    assert piece.alternatives == [[], [(2, -2.0), (3, -3.0)], [(4, -4.0)]]


def call(name: str, arguments: str, index: int = 0, ident: str = "c1") -> dict[str, Any]:
    return {"index": index, "id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tool_calls_and_reasoning_grow_and_keep_their_first_ids() -> None:
    stream, client = SampleStream(0, exact=False), Client()

    def frame(attempt: int, offset: int, **words: Any) -> TokenFrame:
        ids = TokenIds.of([offset])
        return TokenFrame(
            group_id="g", index=0, attempt=attempt, offset=offset, token_ids=ids, logprobs=Floats.of([-1.0]), **words
        )

    client.take(stream.frame(frame(1, 0, reasoning="hm")))
    client.take(stream.frame(frame(1, 1, tool_calls=(call("add", '{"a'),))))
    client.take(stream.frame(frame(1, 2, tool_calls=({"index": 0, "function": {"arguments": '": 1'}},))))
    stream.frame(frame(2, 0, reasoning="h"))
    client.take(stream.frame(frame(2, 1, reasoning="m", tool_calls=(call("add", '{"a": 1, ', ident="other"),))))
    parsed = Parsed(reasoning="hm", tool_calls=(call("add", '{"a": 1, "b": 2}', ident="third"),), parse_status="ok")
    record = ANSWER.record(token_ids=TokenIds.of([0, 1, 2]), logprobs=Floats.of([-1.0] * 3), parsed=parsed)
    client.take(stream.record(record))
    found = client.words.whole()
    assert found.reasoning == "hm"
    assert found.tool_calls == [call("add", '{"a": 1, "b": 2}')]


def test_a_wording_that_is_no_beginning_is_told() -> None:
    words = Wording()
    words.add(Visible("ab"))
    assert words.missing(Visible("abc")) == Visible("c")
    assert words.missing(Visible("xbc")) is None
    assert words.missing(Visible("a")) is None
    assert words.missing(Visible("a"), partial=True) == Visible()
