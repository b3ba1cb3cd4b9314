"""A50: whatever a client makes of its history, the model reads just that history, behind ids that were never tokenized twice.

Matching and bridging together, as a turn's prompt is made of them: the prompt, decoded and taken apart by its
template's marks, is the conversation that was sent, with each sampled answer in the very ids it was sampled in.
"""

from __future__ import annotations

import copy
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH, SessionOpened, SessionTerms, TurnNode
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus
from rollgrid_episodes import Tree, answer_of, match
from rollgrid_rendering.bridge import Bridge, Bridged, PastTurn

from tests.unit.rendering.templates import renderer_of

WORDS = ["", " ", "It is 3.", "\n", "ünï", "日本🙂", "e\u0301", "yes no", "assistant", "0 1 2", "<think>"]
ROLES = ["user", "system", "tool"]


def words(rng: random.Random) -> str:
    return "".join(rng.choice(WORDS) for _ in range(rng.randint(0, 3)))


class Client:
    """Keeps a history, and now and then changes it."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": words(rng)}]

    def goes_on(self, answer: dict[str, Any]) -> None:
        self.messages.append(copy.deepcopy(answer))
        for _ in range(self._rng.randint(1, 2)):
            self.messages.append({"role": self._rng.choice(ROLES), "content": words(self._rng)})
        if self._rng.random() < 0.5:
            self._edits()

    def _edits(self) -> None:
        at = self._rng.randrange(len(self.messages) - 1)
        kind = self._rng.choice(["say", "drop", "add", "cut", "parts"])
        message = self.messages[at]
        if kind == "say":
            message["content"] = words(self._rng)
        elif kind == "drop":
            del self.messages[at]
        elif kind == "add":
            self.messages.insert(at, {"role": "assistant", "content": words(self._rng)})
        elif kind == "cut":
            self.messages = [*self.messages[:at], {"role": "user", "content": words(self._rng)}]
        elif isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]


class Session:
    """What becomes of the client's turns."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.renderer = renderer_of("tails")
        self.bridge = Bridge(self.renderer, typed=False)
        self.tree = Tree()
        terms = SessionTerms(policy="p")
        self.tree.apply(
            1,
            SessionOpened(
                tenant="a", run="r", group_id="g", index=0, n=1, session="s", terms=terms, opened_at=0.0
            ),
        )  # fmt: skip

    def plan(self, messages: list[dict[str, Any]]) -> tuple[TurnNode, list[int]]:
        """The turn's place, and its prompt."""
        matched = match(self.tree, MAIN_BRANCH, messages)
        if matched.turn is not None and matched.new_messages:
            found = self.bridge.extend([past(node) for node in self.tree.path(matched.turn)], matched.new_messages)
            assert isinstance(found, Bridged), found
            node = TurnNode(
                parent=matched.turn, messages=matched.new_messages, observation=found.observation, closing=found.closing
            )
            return node, [*self.tree.token_ids(matched.turn), *found.observation]
        ids = self.renderer.render(messages)[1]
        return TurnNode(messages=tuple(copy.deepcopy(messages)), observation=TokenIds.of(ids)), ids

    def sample(self, node: TurnNode) -> Sample:
        """An answer in odd pieces, ended or cut off."""
        text, encode = words(self._rng), self.renderer.encode
        ids = [token for letter in text for token in encode(letter)] if self._rng.random() < 0.5 else encode(text)
        ended = self._rng.random() < 0.7
        made = Sample(
            index=0,
            turn=self.tree.next_turn,
            node=node,
            status=SampleStatus.SUCCEEDED,
            token_ids=TokenIds.of([*ids, *(encode("<|end|>") if ended else [])]),
            logprobs=Floats.of([0.0] * (len(ids) + ended)),
            text=self.renderer.decode(ids),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
        )
        event = SamplesFinished(
            tenant="a", run="r", batch_id="b", group_id="g", n=1, policy="p", job_seq=1, samples=(made,)
        )  # fmt: skip
        assert self.tree.apply(self.tree.events_to + 1, event) is None
        return made

    def read(self, ids: list[int]) -> list[tuple[str, str]]:
        """The conversation in a prompt, by the template's marks."""
        text = self.renderer.exact_text(ids)
        assert text.endswith("<|assistant|>\n")
        found = []
        for part in text.removesuffix("<|assistant|>\n").split("<|end|>\n")[:-1]:
            role, _, content = part.removeprefix("<|").partition("|>\n")
            found.append((role, content))
        return found


def past(node: Any) -> PastTurn:
    place, made = node.node, node.sample
    return PastTurn(
        place.observation, made.token_ids, place.messages, answer_of(made), place.closing, made.finish_reason
    )


def shown(message: dict[str, Any]) -> tuple[str, str]:
    content = message["content"]
    return message["role"], content if isinstance(content, str) else content[0]["text"]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**48))
def test_a50_the_model_reads_the_history_that_was_sent_and_sampled_ids_stay(seed: int) -> None:
    rng = random.Random(seed)
    client, session = Client(rng), Session(rng)
    for _ in range(rng.randint(2, 7)):
        node, prompt = session.plan(client.messages)
        assert session.read(prompt) == [shown(message) for message in client.messages]
        if node.parent is not None:
            kept = session.tree.token_ids(node.parent).tolist()
            assert prompt[: len(kept)] == kept
        made = session.sample(node)
        assert session.tree.token_ids(made.turn).tolist() == [*prompt, *made.token_ids]
        client.goes_on(answer_of(made))
