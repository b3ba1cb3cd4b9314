"""The text of a sample while its token ids arrive one by one.

What is released never changes afterwards, never ends inside a UTF-8 character and never shows a
part of a stop string.  It is a function of the ids alone, not of how they were cut into portions:
another worker that is given the same ids knows exactly which text they have released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rollgrid_contracts.jobs import SamplingParams

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
LONGEST_TAIL = 4
"""A character has at most four bytes: no longer run of replacement characters can still become one."""
LONGEST_WINDOW = 64


class Transcript:
    """`decode` turns ids into text.  `stopped` is the stop string found, `count` the ids up to its last one."""

    def __init__(self, decode: Decode, sampling: SamplingParams) -> None:
        self._decode = decode
        self._stops = tuple(stop for stop in sampling.stop if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._min_tokens = sampling.min_tokens
        self._include = sampling.include_stop_str_in_output
        self._window: list[int] = []
        self._read = 0
        self._done = 0
        self._held = ""
        self._pieces: list[str] = []
        self.length = 0
        self.count = 0
        self.stopped: str | None = None

    @property
    def text(self) -> str:
        """Everything released so far."""
        return "".join(self._pieces)

    def push(self, token_ids: Iterable[int]) -> str:
        """What these ids release; ids behind a completed stop string are ignored."""
        before = len(self._pieces)
        for token in token_ids:
            if self.stopped is not None:
                break
            self.count += 1
            self._judge(self._spell(token))
        return "".join(self._pieces[before:])

    def finish(self) -> str:
        """The sample has ended: release what was held back."""
        if self.stopped is not None:
            return ""
        rest = self._held + self._decode(self._window)[self._done :]
        self._held = ""
        self._window, self._read, self._done = [], 0, 0
        return self._release(rest)

    def _spell(self, token: int) -> str:
        """Text that this token completes; an unfinished character waits for its last byte."""
        window = self._window
        window.append(token)
        text = self._decode(window)
        end = len(text) - _unfinished(text)
        new = text[self._done : end]
        self._done = max(self._done, end)
        if (new and end == len(text)) or len(window) - self._read > LONGEST_WINDOW:
            # decode on from the last portion: what it spells may depend on what stands before it
            del window[: self._read]
            self._read = len(window)
            rest = self._decode(window)
            self._done = len(rest) - _unfinished(rest)
        return new

    def _judge(self, new: str) -> None:
        if not self._stops:
            self._release(new)
            return
        held = self._held + new
        if new and self.count > self._min_tokens:
            found = self._find(held, len(held) - len(new))
            if found is not None:
                start, self.stopped = found
                self._held = ""
                self._release(held[: start + len(self.stopped) if self._include else start])
                return
        keep = self._kept(held)
        self._held = held[len(held) - keep :]
        self._release(held[: len(held) - keep])

    def _find(self, held: str, old: int) -> tuple[int, str] | None:
        """The stop string that ends first behind `old`, as (start, stop)."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            at = held.find(stop, max(0, old - len(stop) + 1))
            if at >= 0 and (best is None or at + len(stop) < best[0]):
                best = (at + len(stop), at, stop)
        return best[1:] if best is not None else None

    def _kept(self, held: str) -> int:
        """Length of the longest end that may be the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(held)), 0, -1):
            end = held[-size:]
            if any(len(stop) > size and stop.startswith(end) for stop in self._stops):
                return size
        return 0

    def _release(self, text: str) -> str:
        if text:
            self._pieces.append(text)
            self.length += len(text)
        return text


def whole_text(decode: Decode, ids: list[int], stop: str | None, *, include: bool) -> str:
    """What a transcript of all ids releases, decoded at once; the last id completed the string `stop`."""
    text = decode(ids)
    if stop is None:
        return text
    before = decode(ids[:-1])
    at = text.find(stop, max(0, len(before) - _unfinished(before) - len(stop) + 1))
    if at < 0:
        return text
    return text[: at + len(stop) if include else at]


def _unfinished(text: str) -> int:
    """How many characters at the end may still change with the next token."""
    size = 0
    while size < min(LONGEST_TAIL, len(text)) and text[-1 - size] == UNFINISHED:
        size += 1
    return size
