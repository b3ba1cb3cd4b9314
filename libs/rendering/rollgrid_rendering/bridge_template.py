"""The chat template's own continuation behind an answer, found by rendering and proven before it is used.

Every sampled answer is rendered as a mark, so that what stands between the marks is what the template itself says: it
must be the text of the ids that were observed there (else the template, or whoever changed tools or variables,
rewrites history), and what follows the last mark is the continuation.  Reasoning that a template strips or adds
around an answer is no difference.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.samples import FinishReason

from .bridge_header import Headers, common_prefix
from .bridge_turns import Bridged, NoBridge, PastTurn, Request, ids_of, rewritten, unavailable
from .renderer import Renderer


class Continuation(NamedTuple):
    """Text behind an answer: `behind` its end-of-turn token `end` (None: the template has none), and `whole`."""

    end: int | None
    behind: str
    whole: str


class TemplateBridge:
    """Works for any chat template; of those it cannot see through, it says so."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._headers = Headers(renderer)

    def extend(self, turns: Sequence[PastTurn], request: Request) -> Bridged | NoBridge:
        """Tokens so far kept as they are, whatever the template would make of their reasoning."""
        marks = _marks(turns, request)
        found = self._marked(turns, marks, request)
        if isinstance(found, NoBridge):
            return found
        probes, shown = found
        alone = self._text(probes, request, add_generation_prompt=False)
        if alone.count(marks[-1]) != 1:
            return unavailable("the template does not show a last answer as it is")
        last = turns[-1]
        after = shown[shown.index(marks[-1]) + len(marks[-1]) :]
        continuation = self._continuation(_behind(alone, marks[-1]), after, calls=bool(last.answer.get("tool_calls")))
        if isinstance(continuation, NoBridge):
            return continuation
        differs = self._history_differs(turns, marks, shown, continuation.end, request)
        if differs is not None:
            return rewritten(differs)
        if self._has_ended(last, continuation.end):
            return self._go_on(last, continuation, request)
        return self._close(last, continuation, request)

    def rendered(self, turns: Sequence[PastTurn], request: Request) -> Bridged | NoBridge:
        """The whole conversation as the template has it, where that begins with the tokens so far."""
        messages = _conversation(turns)
        text = self._text([*messages, *request.messages], request)
        so_far = ids_of(turns)
        ids = self._renderer.encode(text, add_special_tokens=False, at_most=request.at_most)
        if ids[: len(so_far)] == so_far:
            return self._rendered(turns, ids[len(so_far) :], request)
        # the same text in other tokens, as models sample it, is no rewriting: the ids stay
        own = self._renderer.exact_text(so_far)
        whole = self._renderer.exact_text(ids)
        if whole.startswith(own):
            rest = self._after(turns[-1], whole[len(own) :], request)
            if rest is not None and self._renderer.exact_text(so_far + rest) == whole:
                return self._rendered(turns, rest, request)
        same = next((i for i, pair in enumerate(zip(ids, so_far, strict=False)) if pair[0] != pair[1]), 0)
        return rewritten(f"the template's rendering differs from the tokens so far at position {same}")

    # -- ids ----------------------------------------------------------------------------------

    def _has_ended(self, turn: PastTurn, end: int | None) -> bool:
        """Whether its last id ended it: the template's own end of a turn, or a special token it stopped at."""
        last = _last(turn)
        if last is None or last not in self._renderer.special_tokens:
            return False
        stopped = turn.finish_reason is FinishReason.STOP and not isinstance(turn.stop_reason, str)
        return stopped or last == end

    def _go_on(self, turn: PastTurn, continuation: Continuation, request: Request) -> Bridged | NoBridge:
        ids = self._after(turn, continuation.behind, request)
        if ids is None:
            return unavailable("the tokenizer does not keep the token that ended the turn")
        if continuation.end is None and ids[:1] == turn.sampled.tolist()[-1:]:
            ids = ids[1:]  # the token a model stops at is the next message's own first one
        return Bridged(TokenIds.of(ids), 0, "template")

    def _after(self, turn: PastTurn, text: str, request: Request) -> list[int] | None:
        """Ids of `text` behind the turn's last id: that one is encoded with it, as spaces may depend on it."""
        last = _last(turn)
        name = None if last is None else self._renderer.special_tokens.get(last)
        ids = self._renderer.encode((name or "") + text, add_special_tokens=False, at_most=request.at_most)
        if name is None:
            return ids
        return ids[1:] if ids[:1] == [last] else None

    def _close(self, turn: PastTurn, continuation: Continuation, request: Request) -> Bridged | NoBridge:
        ids = self._renderer.encode(continuation.whole, add_special_tokens=False, at_most=request.at_most)
        if continuation.end is not None:
            if continuation.end not in ids:
                return unavailable("the tokenizer does not keep the template's end of a turn")
            return Bridged(TokenIds.of(ids), ids.index(continuation.end) + 1, "template")
        sampled = turn.sampled.tolist()
        text = self._renderer.exact_text
        if text(sampled + ids) != text(sampled) + continuation.whole:
            return unavailable("the template has no token that ends a turn which was cut off")
        return Bridged(TokenIds.of(ids), 0, "template")

    def _rendered(self, turns: Sequence[PastTurn], ids: list[int], request: Request) -> Bridged:
        closing = 0
        if not self._has_ended(turns[-1], self._renderer.eos_id):
            alone = self._text(_conversation(turns), request, add_generation_prompt=False).rstrip()
            closing = int(bool(ids) and alone.endswith(self._renderer.special_tokens.get(ids[0], " ")))
        return Bridged(TokenIds.of(ids), closing, "rendered")

    # -- text ---------------------------------------------------------------------------------

    def _text(self, messages: Sequence[Mapping[str, Any]], request: Request, **how: bool) -> str:
        return self._renderer.chat_text(
            messages, tools=request.tools, documents=request.documents, options=request.options, **how
        )

    def _marked(
        self, turns: Sequence[PastTurn], marks: Sequence[str], request: Request
    ) -> tuple[list[Mapping[str, Any]], str] | NoBridge:
        """The conversation with a mark for each answer, and its text.  Where a template shows calls only, in a call."""
        inside: set[int] = set()
        hidden: set[int] = set()
        for _ in range(2):
            probes: list[Mapping[str, Any]] = []
            for i, (turn, mark) in enumerate(zip(turns, marks, strict=True)):
                probes += [*turn.messages, _probe(turn.answer, mark, inside_call=i in inside)]
            shown = self._text([*probes, *request.messages], request)
            hidden = {i for i, mark in enumerate(marks) if shown.count(mark) != 1}
            if not hidden:
                return probes, shown
            inside |= {i for i in hidden if turns[i].answer.get("tool_calls")}
        return unavailable(f"the template does not show the answer of step {min(hidden)} once, as it is")

    def _continuation(self, alone: str, after: str, *, calls: bool) -> Continuation | NoBridge:
        """From the text behind the last answer, `alone` where nothing follows it, `after` where the new messages do."""
        special = self._renderer.special_tokens
        head = alone.rstrip()
        if not after.startswith(head):  # some add a token of their own where nothing follows
            head = self._renderer.to_special_token(common_prefix(alone, after))
            if not head or alone[len(head) :].strip() not in special.values():
                return unavailable("the template ends an answer otherwise when messages follow it")
        names = ((name, token) for token, name in special.items() if head.endswith(name))
        name, end = max(names, key=lambda found: len(found[0]), default=("", None))
        if not calls and head[: len(head) - len(name)].strip():
            return unavailable("the template adds text of its own behind an answer")
        eos = self._renderer.eos_id
        if end is None and eos is not None:  # some end an answer only where something follows it
            name, rest = special[eos], after[len(head) :].lstrip()
            if rest.startswith(name):
                head, end = after[: len(after) - len(rest) + len(name)], eos
        whole = after[len(head) - len(name) if end is not None else len(head) :] if calls else after
        return Continuation(end, after[len(head) :], whole)

    def _history_differs(
        self, turns: Sequence[PastTurn], marks: Sequence[str], shown: str, end: int | None, request: Request
    ) -> str | None:
        """Where the template's text between the answers is not that of the observed ids."""
        text = self._renderer.exact_text
        seen = [text(turn.observation.tolist()[turn.closing :]) for turn in turns]
        names = self._renderer.special_tokens
        ends = [{"", names.get(end or -1, ""), names.get(_last(turn) or -1, "")} for turn in turns]
        closings = [{""}, *(_closings(turn, allowed) for turn, allowed in zip(turns[:-1], ends[:-1], strict=True))]
        differs = "the tokenizer rewrites the conversation"
        for retold in (False, True):
            header = self._headers.of(request.options, retold=retold)
            if header is None:
                return "where an answer begins cannot be told from the template"
            parts = _between(self._renderer.retold(shown) if retold else shown, marks)
            checks = enumerate(zip(parts or (), seen, closings, strict=parts is not None))
            wrong = next((i for i, check in checks if not header.precedes(*check)), None)
            if parts is not None and wrong is None:
                return None
            if parts is not None:
                differs = f"what stands before the answer of step {wrong} is not what the template says now"
        return differs


def _conversation(turns: Sequence[PastTurn]) -> list[Mapping[str, Any]]:
    return [message for turn in turns for message in (*turn.messages, turn.answer)]


def _closings(before: PastTurn, allowed: set[str]) -> set[str] | None:
    """What may stand between an answer and what was observed behind it; None: anything (the calls it made)."""
    return None if before.answer.get("tool_calls") else allowed


def _between(shown: str, marks: Sequence[str]) -> list[str] | None:
    parts: list[str] = []
    for mark in marks:
        before, found, shown = shown.partition(mark)
        if not found:
            return None
        parts.append(before)
    return parts


def _behind(text: str, mark: str) -> str:
    return text[text.index(mark) + len(mark) :]


def _last(turn: PastTurn) -> int | None:
    return turn.sampled.tolist()[-1] if len(turn.sampled) else None


def _marks(turns: Sequence[PastTurn], request: Request) -> list[str]:
    """A word for each answer that occurs nowhere else."""
    parts = [[turn.messages, turn.answer] for turn in turns]
    text = json.dumps([parts, *request[:4]], default=repr)
    salt = 0
    while (word := "z" + hashlib.sha256(str(salt).encode()).hexdigest()[:12]) in text:
        salt += 1
    return [f"{word}x{i}z" for i in range(len(turns))]


def _probe(answer: Mapping[str, Any], mark: str, *, inside_call: bool) -> dict[str, Any]:
    """The answer with its text replaced by `mark`, without reasoning; its calls stay, they decide how a turn ends."""
    found = {name: answer[name] for name in ("role", "name", "tool_calls") if answer.get(name)}
    found["content"] = answer.get("content") if inside_call else mark
    if inside_call:
        *calls, last = answer["tool_calls"]
        function = dict(last["function"])
        try:
            given = function.get("arguments") or {}
            given = json.loads(given) if isinstance(given, str) else given
        except ValueError:
            given = {}
        given = given if isinstance(given, dict) else {}
        key = "z"
        while key in given:
            key += "z"
        function["arguments"] = {**given, key: mark}
        found["tool_calls"] = [*calls, {**last, "function": function}]
    return found
