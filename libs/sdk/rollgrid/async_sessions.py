"""`client.sessions` of the asyncio client: the names and meanings of `sessions`, awaited."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack

from rollgrid_contracts.episodes import ForkReason

from . import session_calls
from .errors import RollgridError
from .session_answers import Ended, Opened, SessionState
from .session_calls import HEAD, Head, TurnRewards
from .sessions import GIVING_UP_S, SessionTerms, SessionView, failing, opened_of, opening, view_of
from .tasks import Message
from .transport import AsyncTransport
from .turns import IdsLike, Turn


class AsyncSession(SessionView):
    """As `Session`, for `async with`."""

    def __init__(self, transport: AsyncTransport, *view: Any) -> None:
        super().__init__(*view)
        self._transport = transport

    async def sample(
        self,
        messages: Sequence[Message] | None = None,
        *,
        token_ids: IdsLike | None = None,
        observation_token_ids: IdsLike | None = None,
        idempotency_key: str | None = None,
        **sampling: Any,
    ) -> Turn:
        """As `Session.sample`."""
        call = self.turn_call(messages, token_ids, observation_token_ids, sampling, idempotency_key)
        return self.sampled(await self._transport.send(call, budget_s=self._transport.retries.outage_budget_s))

    async def fork(
        self,
        from_turn: int | Head | None = HEAD,
        *,
        reason: ForkReason | str = ForkReason.REQUESTED,
        name: str | None = None,
        detail: str | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> AsyncSession:
        """As `Session.fork`."""
        call = self.address.forking(from_turn, reason=reason, name=name, detail=detail, metadata=metadata)
        return AsyncSession(self._transport, *self.branch_view(await self._transport.send(call)))

    async def close(
        self,
        reward: float | None = None,
        *,
        turn_rewards: TurnRewards | None = None,
        failed: bool = False,
        detail: str | None = None,
        leaf: int | None = None,
        deliverables: Sequence[Mapping[str, Any]] | None = None,
    ) -> Ended:
        """As `Session.close`."""
        by_number = session_calls.by_turn(turn_rewards, self.life.turns)
        call = self.address.closing(
            reward=reward, turn_rewards=by_number, failed=failed, detail=detail, leaf=leaf, deliverables=deliverables
        )
        ended = await self._transport.send(call, budget_s=self._transport.retries.outage_budget_s)
        self.life.ended = True
        return ended

    async def state(self) -> SessionState:
        """The tree as the server has it."""
        return await self._transport.send(session_calls.state(self.id))

    async def __aenter__(self) -> AsyncSession:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ended:
            return
        if error is None:
            await self.close()
            return
        with contextlib.suppress(RollgridError):
            await self._transport.send(failing(self.id, error), budget_s=GIVING_UP_S)
            self.life.ended = True


class AsyncSessions:
    """`client.sessions`: opens sessions, and finds them again."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def open(
        self,
        *,
        run: str = "default",
        group: str | None = None,
        index: int = 0,
        n: int = 1,
        **terms: Unpack[SessionTerms],
    ) -> AsyncSession:
        """As `Sessions.open`."""
        call, sampling = opening(run, group, index, n, terms)
        return self._view(await self._transport.send(call), None, sampling)

    async def get(
        self, session: str, *, branch: str | None = None, sampling: Mapping[str, Any] | None = None
    ) -> AsyncSession:
        """As `Sessions.get`."""
        return self._view(opened_of(await self.state(session)), branch, sampling)

    async def state(self, session: str) -> SessionState:
        return await self._transport.send(session_calls.state(session))

    async def cancel(self, session: str, *, detail: str | None = None) -> Ended:
        """As `Sessions.cancel`."""
        return await self._transport.send(session_calls.cancelling(session, detail))

    def _view(self, opened: Opened, branch: str | None, sampling: Mapping[str, Any] | None) -> AsyncSession:
        return AsyncSession(self._transport, *view_of(self._transport.endpoint, opened, branch, sampling))
