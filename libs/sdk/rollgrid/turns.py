"""One turn of a session: what is asked for, and what came back with the ids and logprobs that were sampled."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from rollgrid_contracts.arrays import PackedArray, TokenIds
from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason
from rollgrid_contracts.jobs import VersionSpan

from .errors import Unsendable
from .results import Ids, Logprobs
from .tasks import Message, json_body

IdsLike = Sequence[int] | npt.NDArray[Any] | PackedArray[int]

CHAT, COMPLETIONS = "/chat/completions", "/completions"


class TurnPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a turn stands in its session's tree, as in the `session` object of its answer."""

    session: str
    turn: int
    branch: str = MAIN_BRANCH
    parent: int | None = None
    fork: ForkReason | None = None
    fork_detail: str | None = None


class _Logprob(msgspec.Struct, frozen=True, kw_only=True):
    logprob: float


class _Logprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of a chat or of a completion."""

    content: tuple[_Logprob, ...] = ()
    token_logprobs: tuple[float, ...] = ()


class _Message(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    token_ids: TokenIds
    text: str = ""
    message: _Message | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    parse_status: str | None = None
    prompt_token_ids: TokenIds | None = None
    weight_versions: tuple[VersionSpan, ...] = ()
    sample_id: str = ""


class TurnAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion or a completion of a session."""

    choices: tuple[_Choice]
    session: TurnPlace
    prompt_token_ids: TokenIds | None = None


class Turn:
    """One generation of a session: arrays as in `Sample`, and its place in the tree."""

    __slots__ = ("__dict__", "answer")

    def __init__(self, answer: TurnAnswer) -> None:
        self.answer = answer

    @property
    def number(self) -> int:
        """Counted over the whole session, all branches; `fork` and `close(turn_rewards=…)` go by it."""
        return self.answer.session.turn

    @property
    def branch(self) -> str:
        return self.answer.session.branch

    @property
    def parent(self) -> int | None:
        """The turn whose tokens it goes on behind; None: it begins at the root."""
        return self.answer.session.parent

    @property
    def fork(self) -> ForkReason | None:
        """Why it does not go on behind the last turn of its branch; None: it does."""
        return self.answer.session.fork

    @property
    def fork_detail(self) -> str | None:
        return self.answer.session.fork_detail

    @property
    def _choice(self) -> _Choice:
        return self.answer.choices[0]

    @functools.cached_property
    def prompt_ids(self) -> Ids:
        """All that the model saw, from the root on, shape (tokens,), dtype uint32."""
        packed = self._choice.prompt_token_ids or self.answer.prompt_token_ids or TokenIds()
        return np.frombuffer(packed.packed, dtype="<u4")

    @functools.cached_property
    def token_ids(self) -> Ids:
        """Sampled ids, shape (tokens,), dtype uint32; EOS and stop tokens stay in."""
        return np.frombuffer(self._choice.token_ids.packed, dtype="<u4")

    @functools.cached_property
    def logprobs(self) -> Logprobs:
        """Of each sampled token, shape (tokens,), dtype float32."""
        found = self._choice.logprobs
        if found is None:
            return np.zeros(0, dtype=np.float32)
        values = [entry.logprob for entry in found.content] or found.token_logprobs
        return np.array(values, dtype=np.float32)

    @property
    def message(self) -> dict[str, Any]:
        """The assistant's message, to be appended to the conversation as it is."""
        found = self._choice.message or _Message(content=self._choice.text)
        more = {"reasoning": found.reasoning, "tool_calls": None if not found.tool_calls else list(found.tool_calls)}
        return {
            "role": found.role,
            "content": found.content,
            **{name: value for name, value in more.items() if value is not None},
        }

    @property
    def text(self) -> str:
        """The visible text; empty where there are tool calls alone."""
        message = self._choice.message
        return self._choice.text if message is None else message.content or ""

    @property
    def reasoning(self) -> str | None:
        return None if self._choice.message is None else self._choice.message.reasoning

    @property
    def tool_calls(self) -> tuple[dict[str, Any], ...]:
        """In OpenAI's shape; `parse_status` is `malformed` where one was begun and could not be read."""
        return () if self._choice.message is None else self._choice.message.tool_calls or ()

    @property
    def parse_status(self) -> str | None:
        return self._choice.parse_status

    @property
    def finish_reason(self) -> str | None:
        return self._choice.finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        return self._choice.stop_reason

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Which checkpoint version computed which of its tokens."""
        return self._choice.weight_versions

    @property
    def versions(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(span.version for span in self.spans))

    def __len__(self) -> int:
        return len(self._choice.token_ids)

    def __repr__(self) -> str:
        fork = f", fork={self.fork.value!r}" if self.fork is not None else ""
        return f"Turn({self.number}, branch={self.branch!r}, tokens={len(self)}{fork}, {self.finish_reason})"


def turn_request(
    messages: Sequence[Message] | None,
    token_ids: IdsLike | None,
    observation_token_ids: IdsLike | None,
    sampling: Mapping[str, Any],
) -> tuple[str, bytes]:
    """Path below the session's base URL, and the body.

    Raises:
        TypeError: not exactly one of the three.
        Unsendable: JSON would silently change it.
    """
    given = {"messages": messages, "token_ids": token_ids, "observation_token_ids": observation_token_ids}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise TypeError(f"give one of {', '.join(given)}, not {' and '.join(named) or 'none'}")
    if sampling.get("stream"):
        raise Unsendable("sample() waits for the whole turn: stream with session.openai()")
    options = {**sampling, "return_token_ids": True}
    if messages is not None:
        return CHAT, json_body({"messages": list(messages), "logprobs": True, **options})
    ids = _list(token_ids if token_ids is not None else observation_token_ids)
    place = "prompt" if token_ids is not None else "observation_token_ids"
    return COMPLETIONS, json_body({place: ids, "logprobs": 0, **options})


def _list(ids: Any) -> list[int]:
    return [int(token) for token in (ids.tolist() if isinstance(ids, (np.ndarray, PackedArray)) else ids)]
