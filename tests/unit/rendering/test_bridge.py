"""A50, C36: what was sampled is never tokenized again: the next prompt is those ids and what the template puts behind."""

from __future__ import annotations

import inspect
import random
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import ForkReason, ReasoningHistory
from rollgrid_contracts.samples import FinishReason
from rollgrid_rendering.bridge import Bridge, Bridged, NoBridge, PastTurn
from rollgrid_rendering.bridge_typed import HINTS
from rollgrid_rendering.renderer import Renderer, TooManyTokens

from .templates import kind, renderer_of

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1,"b":2}'}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
BRIDGED = ["strips", "keeps", "llama", "inst", "roles", "tidies", "tails"]
"""Kinds whose answers end with a token."""


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


class Played:
    """A session of one kind of template: each turn's ids as a sampler would leave them."""

    def __init__(
        self, name: str, *, typed: bool = False, normalizes: bool = False, spaces: bool = False, **how: Any
    ) -> None:
        self.kind = kind(name)
        self.renderer: Renderer = renderer_of(name, normalizes=normalizes, spaces=spaces)
        self.bridge = Bridge(self.renderer, typed=typed)
        self.how = how
        self.turns: list[PastTurn] = []

    def ids(self) -> list[int]:
        return [token for turn in self.turns for token in (*turn.observation, *turn.sampled)]

    def begin(self, *messages: Mapping[str, Any]) -> list[int]:
        how = {name: value for name, value in self.how.items() if name != "history"}
        return self.renderer.render(messages, **how)[1]

    def ask(self, *messages: Mapping[str, Any]) -> Bridged | NoBridge:
        return self.bridge.extend(self.turns, messages, **self.how)

    def answer(
        self, asked: Sequence[Mapping[str, Any]], observation: Sequence[int], sampled: Sequence[int],
        message: Mapping[str, Any], *, closing: int = 0, finish: FinishReason = FinishReason.STOP,
        stop_reason: int | str | None = None,
    ) -> None:  # fmt: skip
        self.turns.append(
            PastTurn(
                TokenIds.of(observation), TokenIds.of(sampled), tuple(asked), message, closing, finish, stop_reason
            )
        )

    def sampled(self, text: str, *, ended: bool = True) -> list[int]:
        return self.renderer.encode(
            text + ((self.kind.end or self.kind.eos) if ended else ""), add_special_tokens=False
        )


def asked(name: str, sampled: str, message: Mapping[str, Any], *first: Mapping[str, Any], **how: Any) -> Played:
    """A session with one turn."""
    played = Played(name, **how)
    first = first or (user("What is 1+2?"),)
    played.answer(first, played.begin(*first), played.sampled(sampled), message)
    return played


def text_behind(played: Played, found: Bridged | NoBridge) -> str:
    assert isinstance(found, Bridged), found
    return played.renderer.exact_text(found.observation.tolist())


# -- what stands behind an answer ---------------------------------------------------------------


@pytest.mark.parametrize("name", BRIDGED)
def test_a_turn_that_ended_goes_on_behind_its_last_token(name: str) -> None:
    played = asked(name, "It is 3.", said("It is 3."))
    new = [user("and 2+2?"), user("quick!")]
    found = played.ask(*new)
    assert text_behind(played, found) == played.kind.behind(new)
    assert isinstance(found, Bridged)
    assert (found.closing, found.how) == (0, "template")


@pytest.mark.parametrize("name", BRIDGED)
@pytest.mark.parametrize("text", ["It is 3", "", "half a wo", "<|im_end|", "\n\n "])
def test_a_turn_that_was_cut_off_is_closed_as_the_template_does(name: str, text: str) -> None:
    played = Played(name)
    first = (user("hi"),)
    sampled = played.sampled(text, ended=False)
    played.answer(first, played.begin(*first), sampled, said(text), finish=FinishReason.LENGTH)
    found = played.ask(user("go on"))
    assert isinstance(found, Bridged)
    end = played.kind.end or ""
    assert text_behind(played, found) == end + played.kind.behind([user("go on")])
    assert played.renderer.exact_text(found.observation.tolist()[: found.closing]) == end


@pytest.mark.parametrize("name", BRIDGED)
def test_a_tokenizer_that_puts_spaces_behind_special_tokens_does_so_in_the_bridge(name: str) -> None:
    """An answer sampled as the template would write it: then the bridge is the end of the whole conversation's ids."""
    played = Played(name, spaces=True)
    new: list[dict[str, Any]] = [user("hi")]
    observation = played.begin(*new)
    for i in range(3):
        played.answer(new, observation, [], said("ok"))
        whole = [message for turn in played.turns for message in (*turn.messages, turn.answer)]
        ended = played.renderer.render([*whole, user(f"{i}?")])[1]
        before = played.ids()
        assert ended[: len(before)] == before
        end = played.renderer.encode(played.kind.end or "<|user|>")[-1]
        sampled = ended[len(before) : ended.index(end, len(before)) + 1]
        played.turns[-1] = played.turns[-1]._replace(sampled=TokenIds.of(sampled), finish_reason=FinishReason.STOP)
        new = [user(f"{i}?")]
        found = played.ask(*new)
        assert isinstance(found, Bridged), found
        observation = found.observation.tolist()
        assert played.ids() + observation == ended


def test_a_turn_that_stopped_at_a_word_is_closed_one_that_stopped_at_a_special_token_is_not() -> None:
    played = Played("strips")
    other = played.renderer.encode("3<|endoftext|>")
    word = played.renderer.encode("3</tool_call>")
    cases = [
        (other, None, ""),
        (other, other[-1], ""),
        (other, "text|>", "<|im_end|>"),
        (word, word[-1], "<|im_end|>"),
        (word, "call>", "<|im_end|>"),
    ]
    for sampled, stop_reason, closing in cases:
        first = (user("hi"),)
        played.turns.clear()
        played.answer(first, played.begin(*first), sampled, said("3"), stop_reason=stop_reason)
        assert text_behind(played, played.ask(user("x"))) == closing + played.kind.behind([user("x")])


def test_the_mark_a_model_stops_at_is_the_next_messages_own() -> None:
    played = Played("roles")
    first = (user("hi"),)
    for mark, new in (("<|observation|>", tool("3")), ("<|user|>", user("x"))):
        played.turns.clear()
        played.answer(first, played.begin(*first), played.renderer.encode("ok" + mark), said("ok"))
        assert mark + text_behind(played, played.ask(new)) == played.kind.behind([new])
    assert text_behind(played, played.ask(tool("3"))) == played.kind.behind([tool("3")])


def test_a_plain_text_template_is_continued_where_its_text_stays_what_it_is() -> None:
    played = asked("plain", "yes", said("yes"))
    assert text_behind(played, played.ask(user("x"))) == "\n\nuser: x\n\nassistant: "
    first = (user("hi"),)
    played.turns.clear()
    played.answer(
        first, played.begin(*first), played.sampled("ye", ended=False), said("ye"), finish=FinishReason.LENGTH
    )
    found = played.ask(user("x"))
    assert text_behind(played, found) == "\n\nuser: x\n\nassistant: "
    assert isinstance(found, Bridged)
    assert found.closing == 0


def test_a_cut_off_answer_is_not_continued_where_the_tokenizer_would_add_a_space_to_it() -> None:
    played = Played("plain", spaces=True)
    first = (user("hi"),)
    played.answer(
        first, played.begin(*first), played.sampled("ye", ended=False), said("ye"), finish=FinishReason.LENGTH
    )
    found = played.ask(user("x"))
    assert found == NoBridge(
        ForkReason.BRIDGE_UNAVAILABLE, "the template has no token that ends a turn which was cut off"
    )


@pytest.mark.parametrize("name", ["strips", "keeps", "llama"])
@pytest.mark.parametrize("typed", [False, True])
def test_c36_tool_calls_and_results_are_bridged(name: str, typed: bool) -> None:
    """The arguments were sampled with spaces of their own; no template would write them so again."""
    words = '<tool_call>\n{"name": "add", "arguments": {"a": 1,"b":2}}\n</tool_call>'
    played = asked(name, words, said("", tool_calls=[CALL]), typed=typed, tools=() if name == "llama" else TOOLS)
    new = [tool("<|im_end|> 3"), tool("4"), user("so?"), {"role": "system", "content": "be kind"}]
    found = played.ask(*new)
    assert text_behind(played, found) == played.kind.behind(new)
    assert isinstance(found, Bridged)
    assert found.how == ("typed:qwen3" if typed and name == "strips" else "template")
    cut = played.turns[0]._replace(
        sampled=TokenIds.of(cut_ids := cut_off(played.turns[0])), finish_reason=FinishReason.LENGTH
    )
    played.turns = [cut]
    assert cut_ids
    assert text_behind(played, played.ask(*new)) == (played.kind.end or "") + played.kind.behind(new)


def cut_off(turn: PastTurn) -> list[int]:
    return turn.sampled.tolist()[:-3]


def test_the_callers_own_assistant_messages_are_what_the_template_makes_of_them() -> None:
    played = asked("keeps", "It is 3.", said("It is 3."), user("hi"), said("yes?"), user("1+2?"))
    new = [said("or was it?"), user("and 2+2?")]
    assert text_behind(played, played.ask(*new)) == played.kind.behind(new)


# -- reasoning ----------------------------------------------------------------------------------

THOUGHT = "<think>\nOne and two.\n</think>\n\nIt is 3."
ANSWER = said("It is 3.", reasoning="One and two.")


@pytest.mark.parametrize(("name", "typed"), [("strips", False), ("strips", True), ("keeps", False)])
def test_kept_reasoning_stays_although_the_template_would_strip_it(name: str, typed: bool) -> None:
    played = asked(name, THOUGHT, ANSWER, typed=typed)
    for i in range(3):
        new = [user(f"and {i}?")]
        found = played.ask(*new)
        assert text_behind(played, found) == played.kind.behind(new)
        assert isinstance(found, Bridged)
        played.answer(new, found.observation.tolist(), played.sampled(THOUGHT), ANSWER)
    assert played.renderer.exact_text(played.ids()).count("One and two.") == 4


def test_reasoning_as_the_template_has_it_forks_where_the_template_strips_it() -> None:
    stripped = asked("strips", THOUGHT, ANSWER, history=ReasoningHistory.TEMPLATE).ask(user("and?"))
    assert isinstance(stripped, NoBridge)
    assert stripped.reason is ForkReason.TEMPLATE_REWRITES_HISTORY
    kept = asked("keeps", THOUGHT, ANSWER, history=ReasoningHistory.TEMPLATE)
    assert text_behind(kept, kept.ask(user("and?"))) == kept.kind.behind([user("and?")])


def test_reasoning_that_was_cut_off_is_closed_and_what_closes_it_is_no_rewriting() -> None:
    played = Played("strips", typed=True)
    first = (user("hi"),)
    cut = played.sampled("<think>\nOne and", ended=False)
    played.answer(first, played.begin(*first), cut, said("", reasoning="One and"), finish=FinishReason.LENGTH)
    found = played.ask(user("so?"))
    assert isinstance(found, Bridged)
    assert (found.how, found.closing) == ("typed:qwen3", 2)
    assert text_behind(played, found) == "</think><|im_end|>" + played.kind.behind([user("so?")])
    observation = found.observation.tolist()
    played.answer([user("so?")], observation, played.sampled("3"), said("3"), closing=found.closing)
    own = [said("or 4"), user("so?")]  # messages that typed bridges refuse
    found = played.ask(*own)
    assert text_behind(played, found) == played.kind.behind(own)


def test_reasoning_as_the_template_has_it_forks_where_the_tokenizer_would_spell_it_otherwise() -> None:
    played = Played("plain", spaces=True, history=ReasoningHistory.TEMPLATE)
    letters = played.renderer.tokenizer.convert_tokens_to_ids(list("three"))
    first = (user("hi"),)
    played.answer(first, played.begin(*first), letters, said("three"), finish=FinishReason.LENGTH)
    found = played.ask(user("x"))
    assert isinstance(found, NoBridge)
    assert found.reason is ForkReason.TEMPLATE_REWRITES_HISTORY


def test_reasoning_as_the_template_has_it_closes_nothing_where_the_template_does_not() -> None:
    played = Played("roles", history=ReasoningHistory.TEMPLATE)
    first = (user("hi"),)
    cut = played.sampled("It is", ended=False)
    played.answer(first, played.begin(*first), cut, said("It is"), finish=FinishReason.LENGTH)
    found = played.ask(user("x"))
    assert text_behind(played, found) == played.kind.behind([user("x")])
    assert isinstance(found, Bridged)
    assert (found.closing, found.how) == (0, "rendered")


def test_reasoning_as_the_template_has_it_keeps_odd_tokens_of_the_same_text() -> None:
    played = Played("keeps", history=ReasoningHistory.TEMPLATE)
    first = (user("hi"),)
    odd = [token for letter in "It is 3." for token in played.renderer.encode(letter)]
    assert odd != played.renderer.encode("It is 3.")
    played.answer(first, played.begin(*first), [*odd, *played.renderer.encode("<|im_end|>")], said("It is 3."))
    assert text_behind(played, played.ask(user("x"))) == played.kind.behind([user("x")])
    played.turns = [played.turns[0]._replace(sampled=TokenIds.of(odd[:-1]), answer=said("It is 3"))]
    found = played.ask(user("x"))
    assert text_behind(played, found) == "<|im_end|>" + played.kind.behind([user("x")])
    assert isinstance(found, Bridged)
    assert found.closing == 1


@pytest.mark.parametrize("typed", [False, True])
def test_thinking_switched_off_prefills_the_generation_prompt(typed: bool) -> None:
    played = asked("strips", "It is 3.", said("It is 3."), typed=typed, options={"enable_thinking": False})
    found = played.ask(user("x"))
    assert text_behind(played, found) == played.kind.behind([user("x")]) + "<think>\n\n</think>\n\n"
    assert isinstance(found, Bridged)
    played.answer([user("x")], found.observation.tolist(), played.sampled("yes"), said("yes"))
    del played.how["options"]  # the next turn may think
    assert text_behind(played, played.ask(user("y"))) == played.kind.behind([user("y")])


# -- where there is no bridge ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [("counts", ForkReason.TEMPLATE_REWRITES_HISTORY), ("shouts", ForkReason.BRIDGE_UNAVAILABLE)],
)
def test_templates_that_cannot_be_continued_say_so(name: str, reason: ForkReason) -> None:
    found = asked(name, "yes", said("yes")).ask(user("x"))
    assert isinstance(found, NoBridge)
    assert found.reason is reason
    assert found.detail


@pytest.mark.parametrize(
    ("name", "rewritten"), [("ages-behind", "step 1"), ("ages-before", "step 0"), ("ages-thinking", None)]
)
def test_what_a_template_adds_to_old_answers_is_a_rewriting_unless_it_is_reasoning(
    name: str, rewritten: str | None
) -> None:
    played = asked(name, "yes", said("yes"))
    for i in range(3):
        new = [user(f"{i}?")]
        found = played.ask(*new)
        if i == 2 and rewritten is not None:
            assert isinstance(found, NoBridge)
            assert rewritten in found.detail
            return
        assert text_behind(played, found) == played.kind.behind(new)
        assert isinstance(found, Bridged)
        played.answer(new, found.observation.tolist(), played.sampled("yes"), said("yes"))


def test_a_template_that_moves_its_tools_rewrites_history() -> None:
    played = asked("inst", "yes", said("yes"), tools=TOOLS)
    found = played.ask(user("x"))
    assert found == NoBridge(
        ForkReason.TEMPLATE_REWRITES_HISTORY,
        "what stands before the answer of step 0 is not what the template says now",
    )


@pytest.mark.parametrize("typed", [False, True])
def test_other_tools_than_the_session_began_with_are_no_continuation(typed: bool) -> None:
    played = asked("strips", "yes", said("yes"), typed=typed, tools=TOOLS)
    played.how["tools"] = [*TOOLS, *TOOLS]
    found = played.ask(user("x"))
    assert isinstance(found, NoBridge)
    assert found.reason is ForkReason.TEMPLATE_REWRITES_HISTORY


@pytest.mark.parametrize("typed", [False, True])
def test_ids_that_are_not_the_templates_are_no_continuation(typed: bool) -> None:
    played = asked("strips", "yes", said("yes"), typed=typed)
    played.turns = [played.turns[0]._replace(observation=TokenIds.of(played.renderer.encode("something else")))]
    found = played.ask(user("x"))
    assert isinstance(found, NoBridge)
    assert found.reason is ForkReason.TEMPLATE_REWRITES_HISTORY


def test_a_turn_given_as_ids_cannot_be_bridged() -> None:
    played = Played("keeps")
    played.answer((), played.begin(user("hi")), played.sampled("yes"), said("yes"))
    found = played.ask(user("x"))
    assert isinstance(found, NoBridge)
    assert found.reason is ForkReason.BRIDGE_UNAVAILABLE


def test_messages_that_the_template_refuses_are_no_bridge_too_many_tokens_an_error() -> None:
    played = asked("llama", "yes", said("yes"))
    found = played.ask(said("", tool_calls=[CALL, CALL]))
    assert isinstance(found, NoBridge)
    assert (found.reason, "one call at a time" in found.detail) == (ForkReason.BRIDGE_UNAVAILABLE, True)
    played.how["at_most"] = 10
    with pytest.raises(TooManyTokens):
        played.ask(user("x " * 400))


# -- typed bridges ------------------------------------------------------------------------------


def test_the_typed_package_is_left_alone_where_no_tokenizer_of_its_families_is_seen() -> None:
    script = (
        "import sys; from tests.unit.rendering.test_bridge import asked, said, user\n"
        "played = asked('tidies', 'yes', said('yes'), typed=True)\n"
        "assert played.ask(user('x')).how == 'template'\n"
        "assert 'renderers' not in sys.modules, 'renderers was imported'\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_every_family_of_the_typed_package_has_a_token_that_gives_it_away() -> None:
    from renderers import base, create_renderer
    from renderers.configs import DefaultRendererConfig

    create_renderer(renderer_of("keeps").tokenizer, DefaultRendererConfig())  # fills the registry
    for name, family in base.RENDERER_REGISTRY.items():
        sources = "".join(inspect.getsource(sys.modules[cls.__module__]) for cls in family.__mro__[:-1])
        assert name == "default" or any(hint in sources for hint in HINTS), name


# -- anything -----------------------------------------------------------------------------------

WORDS = [
    "", " ", "\n", "a", "It is 3.", " It", "ünï", "e\u0301", "日本🙂", "<|im_end|>", "<|eot_id|>", "</s>", "<|im_start|>assistant\n",
    "<|user|>", "[INST]", "</think>", "<think>", "assistant: ", "\n\n", "{{ x }}", "<tool_call>", "\x00", "%s",
]  # fmt: skip


def words(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 4)))


def sampled_by(rng: random.Random, played: Played) -> tuple[list[int], str, FinishReason]:
    """Ids as a model leaves them: its own tokenization of a text, odd pieces, or nonsense; ended, or cut off."""
    text = words(rng)
    size = played.renderer.size
    ids = {
        "text": lambda: played.renderer.encode(text, add_special_tokens=False),
        "letters": lambda: [t for letter in text for t in played.renderer.encode(letter, add_special_tokens=False)],
        "nonsense": lambda: [rng.randrange(size) for _ in range(rng.randint(0, 6))],
    }[rng.choice(["text", "letters", "nonsense"])]()
    content = played.renderer.decode(ids)
    if rng.random() < 0.6:
        return [*ids, *played.sampled("")], content, FinishReason.STOP
    return ids, content, FinishReason.LENGTH


def next_messages(rng: random.Random) -> list[dict[str, Any]]:
    kinds: list[Any] = [user, user, tool, lambda text: {"role": "system", "content": text}]
    parts: Any = lambda text: user([{"type": "text", "text": text}, {"type": "text", "text": "b"}])  # noqa: E731
    return [rng.choice([*kinds, parts])(words(rng)) for _ in range(rng.randint(1, 3))]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**48),
    st.sampled_from([*BRIDGED, "plain", "counts", "shouts"]),
    st.booleans(),
    st.sampled_from(ReasoningHistory),
)
def test_a50_whatever_is_said_the_tokens_so_far_stay_and_the_rest_is_the_templates(
    seed: int, name: str, normalizes: bool, history: ReasoningHistory
) -> None:
    """Either ids that say what the template puts there, behind ids that stay, or a reason; never a third thing."""
    rng = random.Random(seed)
    played = Played(name, typed=rng.random() < 0.5, normalizes=normalizes, history=history)
    new: list[dict[str, Any]] = [user(words(rng) or "hi")]
    observation, closing = played.begin(*new), 0
    for _ in range(rng.randint(1, 4)):
        sampled, content, finish = sampled_by(rng, played)
        played.answer(new, observation, sampled, said(content), closing=closing, finish=finish)
        before = played.ids()
        new = next_messages(rng)
        found = played.ask(*new)
        assert played.ids() == before
        if isinstance(found, NoBridge):
            assert found.reason in (ForkReason.BRIDGE_UNAVAILABLE, ForkReason.TEMPLATE_REWRITES_HISTORY)
            assert found.detail
            return
        observation, closing = found.observation.tolist(), found.closing
        if history is ReasoningHistory.KEEP:
            end = "" if sampled and finish is FinishReason.STOP else played.kind.end or ""
            if end and sampled[-1:] == played.renderer.encode(end, add_special_tokens=False):
                end = ""
            same = played.renderer.exact_text(played.renderer.encode(end + played.kind.behind(new)))
            assert text_behind(played, found) == same
        else:
            whole = [message for turn in played.turns for message in (*turn.messages, turn.answer)]
            text = played.renderer.render([*whole, *new])[1]
            assert played.renderer.exact_text(before + observation) == played.renderer.exact_text(text)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**48))
def test_typed_and_template_bridges_say_the_same(seed: int) -> None:
    rng = random.Random(seed)
    typed, template = Played("strips", typed=True), Played("strips")
    first = [user("hi")]
    sampled, content, finish = sampled_by(rng, typed)
    new = [message for message in next_messages(rng) if isinstance(message["content"], str)] or [user("x")]
    answers = []
    for played in (typed, template):
        played.answer(first, played.begin(*first), sampled, said(content), finish=finish)
        answers.append(played.ask(*new))
    one, other = answers
    assert isinstance(other, Bridged)
    assert isinstance(one, Bridged)
    thought = typed.renderer.encode("<think>")[0] in sampled
    if one.how.startswith("typed:") and not thought:  # it closes reasoning that was cut off
        assert (one.observation, one.closing) == (other.observation, other.closing)
