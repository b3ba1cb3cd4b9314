"""Where a conversation goes on in a session's tree: history is matched on what was returned, never on text re-rendered.

Two messages are the same when nothing differs that their reader could see: role, content (a string and its text parts
are one, as are None and ""), tool calls with their ids (arguments as canonical JSON), and whatever else a caller put
in.  Reasoning that is left out is no edit; reasoning that is sent must be what was returned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.samples import Sample

from .node import Node, answer_of
from .tree import Tree

_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Kinds of content parts that are text → the key it is under."""

_REASONING = ("reasoning", "reasoning_content")
_EMPTY: tuple[Any, ...] = (None, "", [], {}, ())

Answer = Callable[[Sample], Mapping[str, Any]]


class Match(NamedTuple):
    """`turn` is the node to go on behind (None: the root), `new_messages` what comes after its conversation.

    `edited` is None where that node is the branch's head; else it says how the history differs from the head's.
    """

    turn: int | None
    new_messages: tuple[dict[str, Any], ...]
    edited: str | None = None


class IdsMatch(NamedTuple):
    """The same of a prompt given as ids: `new_ids` follow those of `turn`."""

    turn: int | None
    new_ids: TokenIds
    edited: str | None = None


def match(tree: Tree, branch: str, messages: Sequence[Mapping[str, Any]], *, answer: Answer = answer_of) -> Match:
    """The deepest node whose conversation `messages` begin with; of equals the branch's head, then one of its branch.

    `answer` makes a sample the message that was returned for it.  A node below a turn that was given as ids is never
    matched: its conversation is not known.  Raises KeyError for an unknown branch.
    """
    given = [_Given(message) for message in messages]
    head = tree.branches[branch].head
    own = {node.turn for node in tree.path(head)}

    def rank(found: tuple[int, int]) -> tuple[int, bool, bool, bool, int]:
        turn, length = found
        node = tree.nodes[turn]
        return length, turn == head, turn in own, node.node.branch == branch, turn

    best = max(_matching(tree, given, answer), key=rank, default=None)
    turn, length = best if best is not None else (None, 0)
    rest = tuple(dict(message) for message in messages[length:])
    if turn == head:
        return Match(turn, rest)
    return Match(turn, rest, _difference(tree, head, given, answer))


def match_ids(tree: Tree, branch: str, ids: TokenIds) -> IdsMatch:
    """The deepest node whose tokens `ids` begin with; of equals the branch's head.  Raises KeyError likewise."""
    head = tree.branches[branch].head
    own = {node.turn for node in tree.path(head)}
    best: tuple[int, bool, bool, int] | None = None
    open_turns: list[tuple[int | None, int]] = [(None, 0)]
    while open_turns:
        parent, at = open_turns.pop()
        for child in tree.children.get(parent, ()):
            node = tree.nodes[child]
            delta = node.node.observation.packed + node.sample.token_ids.packed
            if ids.packed.startswith(delta, at):
                found = (at + len(delta), child == head, child in own, child)
                best = found if best is None else max(best, found)
                open_turns.append((child, at + len(delta)))
    end, turn = (0, None) if best is None else (best[0], best[3])
    rest = TokenIds(ids.packed[end:])
    if turn == head:
        return IdsMatch(turn, rest)
    same = _common(tree.token_ids(head).packed, ids.packed) // 4
    return IdsMatch(turn, rest, f"ids differ from those of turn {head} from position {same} on")


def _common(one: bytes, other: bytes) -> int:
    """Length of the common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


# -- messages ---------------------------------------------------------------------------------


class _Given:
    """A message as it was sent: what is seen of it, and the reasoning beside it."""

    def __init__(self, message: Mapping[str, Any]) -> None:
        self.seen = _seen(message)
        self.reasoning = [message[name] for name in _REASONING if message.get(name) is not None]

    def repeats(self, returned: Mapping[str, Any]) -> bool:
        """Whether this is the message `returned`."""
        held = next((returned[name] for name in _REASONING if returned.get(name) is not None), None)
        if any(reasoning != held and (reasoning or held) for reasoning in self.reasoning):
            return False
        return self.seen == _seen(returned)


def _matching(tree: Tree, given: Sequence[_Given], answer: Answer) -> Iterable[tuple[int, int]]:
    """Nodes whose conversation `given` begins with, each with the length of that conversation."""
    open_turns: list[tuple[int | None, int]] = [(None, 0)]
    while open_turns:
        parent, at = open_turns.pop()
        for turn in tree.children.get(parent, ()):
            node = tree.nodes[turn]
            delta = _delta(node, answer)
            end = at + len(delta)
            if not _opaque(node) and end <= len(given) and all(map(_Given.repeats, given[at:end], delta)):
                yield turn, end
                open_turns.append((turn, end))


def _delta(node: Node, answer: Answer) -> list[Mapping[str, Any]]:
    return [*node.node.messages, answer(node.sample)]


def _opaque(node: Node) -> bool:
    """It was given ids that no message explains."""
    return not node.node.messages and len(node.node.observation) > node.node.closing


def _difference(tree: Tree, head: int | None, given: Sequence[_Given], answer: Answer) -> str:
    """Where `given` first differs from the conversation of the branch's head."""
    at = 0
    for node in tree.path(head):
        if _opaque(node):
            return f"turn {node.turn} was given as token ids: no messages are known of it"
        delta = _delta(node, answer)
        for i, message in enumerate(delta):
            whose = f"the answer of turn {node.turn}" if i == len(delta) - 1 else f"a message of turn {node.turn}"
            if at == len(given):
                return f"messages end before {whose}"
            if not given[at].repeats(message):
                return f"messages[{at}] differs from {whose}"
            at += 1
    return f"another branch goes on behind turn {head}" if head is not None else "the branch is at its root"


def _seen(message: Mapping[str, Any]) -> str:
    """What a reader sees of a message, in one canonical form.  Reasoning is left to `_Given`."""
    found = {name: value for name, value in message.items() if name not in _REASONING and value not in _EMPTY}
    found["content"] = _text(message.get("content"))
    if calls := found.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in calls]
    return _canonical(found)


def _text(content: Any) -> Any:
    """Content as one text, its parts on lines of their own as templates get them; other content as it is."""
    if content is None:
        return ""
    if not isinstance(content, list):
        return content
    texts = [_part(part) for part in content]
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else content


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return part.get(_TEXT.get(str(part.get("type")), ""))


def _call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    function["arguments"] = _arguments(function.get("arguments"))
    rest = {name: value for name, value in call.items() if name not in ("index", "function") and value is not None}
    return {"type": "function", **rest, "function": function}


def _arguments(arguments: Any) -> str:
    """Canonical JSON of a call's arguments; text that is no JSON stands for itself."""
    if isinstance(arguments, str):
        try:
            return _canonical(json.loads(arguments or "{}"))
        except (ValueError, RecursionError):
            return "text:" + arguments
    return _canonical({} if arguments is None else arguments)


def _canonical(value: Any) -> str:
    """JSON with sorted keys; a whole number is the same with and without its point, true is not 1."""
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), default=repr)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
