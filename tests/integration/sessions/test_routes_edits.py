"""A32, I6: whatever a client does to its history, ids that were sampled once are never tokenized again in silence."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.stack import Stack

from .door import Session, Turn, open_session

TURNS = 3
Edit = tuple[str, int]
HARMLESS = ("none", "parts", "extra_nulls")
EDITS = st.tuples(
    st.sampled_from([*HARMLESS, "change", "drop", "insert", "swap_role", "truncate", "space"]),
    st.integers(0, 2 * TURNS - 1),
)


def applied(messages: list[Any], edit: Edit) -> list[Any]:
    """The history as a client sends it back; `harmless` edits change nothing that a reader sees."""
    kind, at = edit
    found = copy.deepcopy(messages)
    match kind:
        case "parts":
            found[at]["content"] = [{"type": "text", "text": found[at]["content"]}]
        case "extra_nulls":
            found[at]["name"] = None
        case "change":
            found[at]["content"] = found[at]["content"] + "!"
        case "space":
            found[at]["content"] = " " + found[at]["content"]
        case "drop":
            del found[at]
        case "insert":
            found.insert(at, {"role": "user", "content": "by the way"})
        case "swap_role":
            found[at]["role"] = "user" if found[at]["role"] == "assistant" else "assistant"
        case "truncate":
            found = found[:at]
    return found


def played(session: Session) -> tuple[list[Any], list[Turn]]:
    messages: list[Any] = []
    turns: list[Turn] = []
    for number in range(TURNS):
        messages.append({"role": "user", "content": f"question {number}"})
        turns.append(session.chat(messages))
        messages.append({"role": "assistant", "content": turns[-1].message.get("content") or ""})
    return messages, turns


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edit=EDITS)
def test_an_edit_forks_and_says_so_and_what_is_no_edit_goes_on(pipe: Stack, edit: Edit) -> None:
    session = open_session(pipe)
    messages, turns = played(session)
    sent = [*applied(messages, edit), {"role": "user", "content": "and now?"}]
    turn = session.chat(sent)
    parent = turn.place["parent"]
    if edit[0] in HARMLESS:
        assert (parent, turn.fork) == (TURNS - 1, None)
    else:
        assert turn.fork == "edited_history", edit
        assert turn.place["fork_detail"]
        assert parent is None or parent < TURNS - 1
    kept = [] if parent is None else turns[parent].prompt + turns[parent].tokens
    assert turn.prompt[: len(kept)] == kept, "it begins with the very ids of the turn it goes on behind"
    whole = 0 if parent is None else 2 * (parent + 1)
    assert [_seen(one) for one in sent[:whole]] == [_seen(one) for one in messages[:whole]]
    if whole + 2 <= len(sent) - 1 and parent != TURNS - 1:
        unmatched = [_seen(one) for one in sent[whole : whole + 2]]
        assert unmatched != [_seen(one) for one in messages[whole : whole + 2]], "no deeper turn would have matched"
    node = next(one for one in session.state(token_ids=True)["nodes"] if one["turn"] == turn.number)
    assert kept + node["observation_ids"] == turn.prompt


def _seen(message: dict[str, Any]) -> tuple[str, str]:
    content = message["content"]
    return message["role"], content if isinstance(content, str) else content[0]["text"]
