"""What a client reads of a sample: content, reasoning, tool calls; whole, and as additions."""

from __future__ import annotations

from typing import Any, NamedTuple

from rollgrid_contracts.samples import Sample


class Visible(NamedTuple):
    """`tool_calls` are OpenAI's: whole ones, or deltas with an `index` each."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = []  # noqa: RUF012 - never changed

    @property
    def empty(self) -> bool:
        return not (self.content or self.reasoning or self.tool_calls)


def visible_of(sample: Sample) -> Visible:
    """Of a finished sample: as parsed, or its text."""
    parsed = sample.parsed
    if parsed is None:
        return Visible(sample.text or "")
    calls = [{"index": i, **call} for i, call in enumerate(parsed.tool_calls)]
    return Visible(parsed.content or "", parsed.reasoning or "", calls)


class _Call:
    """One tool call as far as it is known."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id, self.name, self.arguments = "", "", ""


class Wording:
    """A visible answer that grows."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []

    def add(self, words: Visible) -> None:
        if words.content:
            self._content.append(words.content)
        if words.reasoning:
            self._reasoning.append(words.reasoning)
        for delta in words.tool_calls:
            self._add_call(delta)

    def whole(self) -> Visible:
        calls = [
            {"index": i, "id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for i, c in enumerate(self._calls)
        ]
        return Visible("".join(self._content), "".join(self._reasoning), calls)

    def missing(self, whole: Visible, *, partial: bool = False) -> Visible | None:
        """What this lacks of `whole`; None when this is no beginning of it.  The ids of calls are those given first.

        `partial`: of what is behind this in `whole`, nothing is lacking.
        """
        mine = self.whole()
        content = _rest(mine.content, whole.content, partial)
        reasoning = _rest(mine.reasoning, whole.reasoning, partial)
        calls = _missing_calls(mine.tool_calls, whole.tool_calls, partial)
        if content is None or reasoning is None or calls is None:
            return None
        return Visible(content, reasoning, calls)

    def _add_call(self, delta: dict[str, Any]) -> None:
        index = int(delta.get("index", 0))
        while len(self._calls) <= index:
            self._calls.append(_Call())
        call, function = self._calls[index], delta.get("function") or {}
        call.id = call.id or delta.get("id") or ""
        call.name += function.get("name") or ""
        call.arguments += function.get("arguments") or ""


def _rest(had: str, has: str, partial: bool) -> str | None:
    if has.startswith(had):
        return has[len(had) :]
    return "" if partial and had.startswith(has) else None


def _missing_calls(had: list[dict[str, Any]], has: list[dict[str, Any]], partial: bool) -> list[dict[str, Any]] | None:
    if len(has) < len(had) and not partial:
        return None
    deltas: list[dict[str, Any]] = []
    for i, call in enumerate(has):
        if i >= len(had):
            deltas.append(call)
            continue
        mine, whole = had[i]["function"], call["function"]
        name = _rest(mine["name"], whole["name"], partial)
        arguments = _rest(mine["arguments"], whole["arguments"], partial)
        if name is None or arguments is None:
            return None
        rest = {key: text for key, text in (("name", name), ("arguments", arguments)) if text}
        if rest:
            deltas.append({"index": i, "function": rest})
    return deltas
