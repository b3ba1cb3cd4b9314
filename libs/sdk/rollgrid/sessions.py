"""Multi-turn sessions: `client.sessions`.  `async_sessions` is its twin for asyncio.

A session is one sample of a group, played in turns.  Any OpenAI client plays it (`session.openai()`), or
`session.sample`, which gives the ids and logprobs of each turn.  Every call may be sent twice: opening names
the session, a turn carries an idempotency key, and the first close counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypedDict, Unpack

from rollgrid_contracts import ids
from rollgrid_contracts.episodes import ForkReason
from rollgrid_contracts.jobs import WeightConstraint

from . import session_calls
from .discovery import Endpoint
from .errors import RollgridError
from .session_answers import Ended, Forked, Opened, SessionState
from .session_calls import HEAD, Address, Head, TurnRewards
from .tasks import Message, ScorerLike
from .transport import Call, SyncTransport
from .turns import IdsLike, Turn

NO_KEY = "none"
"""What OpenAI clients, which insist on a key, send to a rollgrid without keys."""

OPEN = "open"
"""The status of a session that can be played."""

GIVING_UP_S = 10.0
"""For the close of a session whose body has failed: its own failure is what matters."""


DETAIL_CHARS = 500
"""Of a failure's own text in the record."""


class SessionTerms(TypedDict, total=False):
    """Of `Sessions.open`, and of `run_episodes` for all its sessions.

    `hold`: `pin` keeps the first turn's weights, `float` (default) takes the newest for each turn; `weights` demands as in
    `Client.submit`.  `reasoning_history`: `keep` (default) leaves earlier turns as they were sampled, `template` follows
    the chat template.  `on_concurrent_turn`: `refuse` (default) or `fork`.  `ttl_s` counts from the last turn,
    `deadline_s` from the opening, for the whole group.  `task`, `scorers` and `deadline_s` are the group's.
    `sampling` are defaults of every `sample`.
    """

    policy: str | None
    weights: WeightConstraint | Mapping[str, Any] | None
    scorers: Sequence[ScorerLike]
    hold: str | None
    reasoning_history: str | None
    on_concurrent_turn: str | None
    ttl_s: float | None
    deadline_s: float | None
    max_turns: int | None
    max_tokens: int | None
    metadata: Mapping[str, Any] | None
    task: Mapping[str, Any] | None
    rights: Mapping[str, Any] | None
    sampling: Mapping[str, Any]


def opening(
    run: str, group: str | None, index: int, n: int, terms: SessionTerms
) -> tuple[Call[Opened], Mapping[str, Any]]:
    """The call that opens a session, and the defaults of its turns.  A group of its own gets a name, so that a retry finds it."""
    rest: dict[str, Any] = dict(terms)
    sampling = rest.pop("sampling", {})
    label = ids.new_key() if group is None else group
    body = session_calls.open_body(
        run=run,
        group=label,
        index=index,
        n=n,
        policy=rest.pop("policy", None),
        weights=rest.pop("weights", None),
        scorers=rest.pop("scorers", ()),
        terms=rest,
    )
    return session_calls.opening(body), sampling


@dataclasses.dataclass
class Life:
    """What all views of one session share: `ended` once this process has closed it, and the turns it has sampled."""

    ended: bool = False
    turns: list[int] = dataclasses.field(default_factory=list)


class SessionView:
    """A branch of a session without I/O: its names, and the calls that `Session` and `AsyncSession` send."""

    def __init__(
        self, url: str, api_key: str | None, opened: Opened, address: Address, life: Life, sampling: Mapping[str, Any]
    ) -> None:
        self.opened, self.address, self.life = opened, address, life
        self.sampling = dict(sampling)
        self._url, self._api_key = url, api_key

    @property
    def id(self) -> str:
        return self.opened.session

    @property
    def group_id(self) -> str:
        return self.opened.group_id

    @property
    def run(self) -> str:
        return self.opened.run

    @property
    def index(self) -> int:
        """Which sample of its group it plays, 0 to n - 1."""
        return self.opened.index

    @property
    def n(self) -> int:
        return self.opened.n

    @property
    def policy(self) -> str:
        return self.opened.policy

    @property
    def branch(self) -> str:
        return self.address.branch

    @property
    def base_url(self) -> str:
        """For any OpenAI client: chats and completions below it are turns of this branch."""
        return f"{self._url.rstrip('/')}{self.address.path}"

    @property
    def ended(self) -> bool:
        """This process has closed it."""
        return self.life.ended

    def openai(self) -> dict[str, Any]:
        """Arguments of an unmodified client: `openai.OpenAI(**session.openai())`."""
        return {"base_url": self.base_url, "api_key": self._api_key or NO_KEY}

    def turn_call(
        self,
        messages: Sequence[Message] | None,
        token_ids: IdsLike | None,
        observation_token_ids: IdsLike | None,
        sampling: Mapping[str, Any],
        key: str | None,
    ) -> Call[Turn]:
        return self.address.turn(
            messages=messages,
            token_ids=token_ids,
            observation_token_ids=observation_token_ids,
            sampling={**self.sampling, **sampling},
            key=key,
        )

    def sampled(self, turn: Turn) -> Turn:
        self.life.turns.append(turn.number)
        return turn

    def branch_view(self, forked: Forked) -> tuple[Any, ...]:
        """Arguments of a view on the new branch."""
        address = Address(self.address.session, forked.branch)
        return self._url, self._api_key, self.opened, address, self.life, self.sampling

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.id!r}, branch={self.branch!r}, group={self.group_id!r}, index={self.index})"
        )


class Session(SessionView):
    """One session, seen on one of its branches.

    As a context manager it ends itself: left by an exception as failed (a turn under way is stopped), else closed
    without a reward, unless `close` was called inside.
    """

    def __init__(self, transport: SyncTransport, *view: Any) -> None:
        super().__init__(*view)
        self._transport = transport

    def sample(
        self,
        messages: Sequence[Message] | None = None,
        *,
        token_ids: IdsLike | None = None,
        observation_token_ids: IdsLike | None = None,
        idempotency_key: str | None = None,
        **sampling: Any,
    ) -> Turn:
        """Play one turn.  Give the whole conversation so far, or the ids of the whole prompt, or only the new ids.

        Messages are mappings, or what the `openai` package returned.  The prompt goes on behind the very tokens of the
        branch's last turn; where the history was edited, the turn
        forks, and `turn.fork` says why.  `sampling` and further fields (`tools`, `tool_choice`, `response_format`, …) are
        those of the chat and completions routes.

        A retry never plays a turn twice: an idempotency key is sent, a random one unless given.

        Raises:
            SessionBusy: another turn of this branch is under way.
            LimitExceeded: a cap of the session is reached (`limit` says which); it can still be closed.
            SessionEnded: it was closed, or nobody played it for `ttl_s`.
        """
        call = self.turn_call(messages, token_ids, observation_token_ids, sampling, idempotency_key)
        return self.sampled(self._transport.send(call, budget_s=self._budget_s))

    @property
    def _budget_s(self) -> float:
        """A turn outlives a restart of the servers, as an iterator does."""
        return self._transport.retries.outage_budget_s

    def fork(
        self,
        from_turn: int | Head | None = HEAD,
        *,
        reason: ForkReason | str = ForkReason.REQUESTED,
        name: str | None = None,
        detail: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> Session:
        """A new branch behind `from_turn` (None: at the root; default: behind the last turn of this one).

        Branches are played side by side and share what is before the fork.  `reason`: requested, best_of_n, explore, retry,
        sub_agent or compaction.
        """
        call = self.address.forking(from_turn, reason=reason, name=name, detail=detail, metadata=metadata)
        return Session(self._transport, *self.branch_view(self._transport.send(call)))

    def close(
        self,
        reward: float | None = None,
        *,
        turn_rewards: TurnRewards | None = None,
        failed: bool = False,
        detail: str | None = None,
        leaf: int | None = None,
        deliverables: Sequence[Mapping[str, Any]] | None = None,
    ) -> Ended:
        """End the session, all branches of it, with rewards of your own if you have any.  Safe to repeat.

        `turn_rewards` by turn number, or one for each turn that was sampled here, in their order.  `failed` ends it as a sample that failed: no reward, and
        `detail` says why.  Scorers see the path that ends with turn `leaf` (default: the last of the main branch).

        Raises:
            SessionEnded: it has ended before, in another way.
        """
        by_number = session_calls.by_turn(turn_rewards, self.life.turns)
        call = self.address.closing(
            reward=reward, turn_rewards=by_number, failed=failed, detail=detail, leaf=leaf, deliverables=deliverables
        )
        ended = self._transport.send(call, budget_s=self._budget_s)
        self.life.ended = True
        return ended

    def state(self) -> SessionState:
        """The tree as the server has it."""
        return self._transport.send(session_calls.state(self.id))

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended:
            return
        if error is None:
            self.close()
            return
        with contextlib.suppress(RollgridError):  # the body's own failure goes on; the TTL ends the session at last
            self._transport.send(failing(self.id, error), budget_s=GIVING_UP_S)
            self.life.ended = True


def failing(session: str, error: BaseException) -> Call[Ended]:
    """The call that ends a session for `error`, which may have come out of a turn that is still under way."""
    said = f"{type(error).__name__}: {error}"[:DETAIL_CHARS]
    return session_calls.cancelling(session, said.encode(errors="replace").decode())  # file names may hold surrogates


class Sessions:
    """`client.sessions`: opens sessions, and finds them again."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport

    def open(
        self,
        *,
        run: str = "default",
        group: str | None = None,
        index: int = 0,
        n: int = 1,
        **terms: Unpack[SessionTerms],
    ) -> Session:
        """Open sample `index` of a group of `n`.  Sessions of one run that name the same `group` are one group.

        Opening it again, also from another process, gives the same session.  Without `group` it is a group of its own.
        The group closes when all n sessions have ended, or at `deadline_s`.  `SessionTerms` says what else there is.
        """
        call, sampling = opening(run, group, index, n, terms)
        return self._view(self._transport.send(call), None, sampling)

    def get(self, session: str, *, branch: str | None = None, sampling: Mapping[str, Any] | None = None) -> Session:
        """A session that was opened before, perhaps by another process; asks the server for it."""
        return self._view(opened_of(self.state(session)), branch, sampling)

    def state(self, session: str) -> SessionState:
        return self._transport.send(session_calls.state(session))

    def cancel(self, session: str, *, detail: str | None = None) -> Ended:
        """End a session as failed, whoever plays it; a turn under way is aborted.  `detail` says why.  Safe to repeat."""
        return self._transport.send(session_calls.cancelling(session, detail))

    def _view(self, opened: Opened, branch: str | None, sampling: Mapping[str, Any] | None) -> Session:
        return Session(self._transport, *view_of(self._transport.endpoint, opened, branch, sampling))


def view_of(
    endpoint: Endpoint,
    opened: Opened,
    branch: str | None = None,
    sampling: Mapping[str, Any] | None = None,
) -> tuple[Any, ...]:
    """Arguments of a `SessionView`."""
    address = Address(opened.session) if branch is None else Address(opened.session, branch)
    return endpoint.url, endpoint.api_key, opened, address, Life(ended=opened.status != OPEN), sampling or {}


def opened_of(state: SessionState) -> Opened:
    """The names of a session that is known by its state."""
    return Opened(
        session=state.session,
        run=state.run,
        group_id=state.group_id,
        index=state.index,
        n=state.n,
        policy=state.policy,
        model=state.model,
        status=state.status,
        turns=state.turns,
    )
