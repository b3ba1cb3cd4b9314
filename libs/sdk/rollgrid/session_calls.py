"""The routes of sessions, as data; beside `calls`."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

from rollgrid_contracts.episodes import MAIN_BRANCH, ForkReason

from .calls import answered, keyed, segment
from .errors import Unsendable
from .session_answers import Ended, Forked, Opened, SessionState
from .tasks import Message, ScorerLike, json_body, scorer_body, weights_body
from .transport import Call
from .turns import IdsLike, Turn, TurnAnswer, turn_request

TURN_S = 630.0
"""A turn is answered or refused within the deadline that ingest gives it (600 s unless it was said)."""

TurnRewards = Mapping[int, float] | Sequence[float | None]
"""By turn number; of a sequence the k-th is that of the k-th turn which this process has sampled."""

BUSY = frozenset({"session_busy"})


def opening(body: Mapping[str, Any]) -> Call[Opened]:
    """The session follows from run, group and index: a retry opens the same."""
    return Call("POST", "/v1/sessions", answered(Opened), body=json_body(dict(body)), headers=keyed(None))


def open_body(
    *,
    run: str,
    policy: str | None,
    group: str | None,
    index: int,
    n: int,
    weights: Any,
    scorers: Sequence[ScorerLike],
    terms: Mapping[str, Any],
) -> dict[str, Any]:
    """What is None is left to the server."""
    more = {
        "policy": policy,
        "group": group,
        "weights": weights_body(weights),
        "scorers": [scorer_body(scorer) for scorer in scorers] or None,
        **terms,
    }
    return {"run": run, "index": index, "n": n, **_given(more)}


def state(session: str) -> Call[SessionState]:
    return Call("GET", f"/v1/sessions/{segment(session)}", answered(SessionState))


def cancelling(session: str, detail: str | None = None) -> Call[Ended]:
    """Ends it whatever is under way: a close would wait for a turn whose caller has left."""
    params = {} if detail is None else {"detail": detail}
    return Call("DELETE", f"/v1/sessions/{segment(session)}", answered(Ended), params=params)


class Head(enum.Enum):
    """The last turn of the branch: where a fork begins unless it is said."""

    HEAD = "head"


HEAD = Head.HEAD


@dataclasses.dataclass(frozen=True)
class Address:
    """A branch of a session, and every call that can be made on it."""

    session: str
    branch: str = MAIN_BRANCH

    @property
    def path(self) -> str:
        """Of the base URL for OpenAI clients."""
        branch = "" if self.branch == MAIN_BRANCH else f"~{segment(self.branch)}"
        return f"/s/{segment(self.session)}{branch}/v1"

    def turn(
        self,
        *,
        messages: Sequence[Message] | None,
        token_ids: IdsLike | None,
        observation_token_ids: IdsLike | None,
        sampling: Mapping[str, Any],
        key: str | None,
    ) -> Call[Turn]:
        """The key makes a retry safe: the turn that was played is answered again.  Raises as `turn_request`."""
        below, body = turn_request(messages, token_ids, observation_token_ids, sampling)
        read = answered(TurnAnswer)
        wait_s = max(TURN_S, float(sampling.get("deadline_s") or 0) + 30)
        return Call(
            "POST",
            self.path + below,
            lambda data, content_type: Turn(read(data, content_type)),
            body=body,
            headers=keyed(key),
            read_timeout_s=wait_s,
            also_retried=BUSY if key is not None else frozenset(),  # a named turn may be another process's
            retried_if_resent=BUSY,
        )

    def forking(
        self,
        from_turn: int | Head | None,
        *,
        reason: ForkReason | str,
        name: str | None = None,
        detail: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> Call[Forked]:
        """`from_turn` None: at the root.  A turn still under way on this branch is waited for."""
        more = {"name": name, "detail": detail, "metadata": None if metadata is None else dict(metadata)}
        body: dict[str, Any] = {"branch": self.branch} if from_turn is HEAD else {"from_turn": from_turn}
        body["reason"] = ForkReason(reason).value
        return self._post("fork", {**body, **_given(more)}, Forked, key)

    def closing(
        self,
        *,
        reward: float | None = None,
        turn_rewards: Mapping[int, float] | None = None,
        failed: bool = False,
        detail: str | None = None,
        leaf: int | None = None,
        deliverables: Sequence[Mapping[str, Any]] | None = None,
    ) -> Call[Ended]:
        """Safe to repeat: the first close counts."""
        more = {
            "reward": reward,
            "turn_rewards": {str(turn): value for turn, value in turn_rewards.items()} if turn_rewards else None,
            "detail": detail,
            "leaf": leaf,
            "deliverables": None if deliverables is None else [dict(item) for item in deliverables],
        }
        return self._post("close", {"outcome": "failed" if failed else "closed", **_given(more)}, Ended, None)

    def _post(self, what: str, body: dict[str, Any], answer: type[Any], key: str | None) -> Call[Any]:
        """A turn still under way is waited for."""
        path = f"/v1/sessions/{segment(self.session)}/{what}"
        return Call("POST", path, answered(answer), body=json_body(body), headers=keyed(key), also_retried=BUSY)


def by_turn(rewards: TurnRewards | None, sampled: Sequence[int]) -> dict[int, float]:
    """Rewards by turn number; `sampled` are the numbers of the turns that a sequence is about.

    Numbers only grow, and some may be leapt over, so that the k-th turn need not be turn k.  Raises Unsendable.
    """
    if rewards is None or isinstance(rewards, Mapping):
        return {int(turn): float(value) for turn, value in (rewards or {}).items()}
    if len(rewards) > len(sampled):
        raise Unsendable(f"{len(rewards)} turn rewards for {len(sampled)} turns sampled here: give them by turn number")
    return {turn: float(value) for turn, value in zip(sampled, rewards, strict=False) if value is not None}


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
