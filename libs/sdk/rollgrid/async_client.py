"""The asyncio client: the names and meanings of `client`, awaited."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rollgrid_contracts.jobs import SamplingParams, WeightConstraint

from . import calls
from .answers import Accepted, BatchProgress, Fleet, Model, Policy, Posted, ScoredTokens
from .async_sessions import AsyncSessions
from .async_weights import AsyncWeights
from .client import iteration_timeout, pace_deadline
from .cursor import CursorFile
from .discovery import resolve
from .errors import NotFound, RollgridAPIError, Unreachable
from .following import GroupReader, Reader, T
from .results import Group
from .rewards import Post, PostReader, PostTarget, RewardsLike, group_of, post_body, run_body
from .tasks import ScorerLike, TaskLike, score_body, submission
from .transport import AsyncTransport, Call, Retries


class AsyncBatch:
    """As `Batch`."""

    def __init__(self, transport: AsyncTransport, accepted: Accepted) -> None:
        self._transport = transport
        self._accepted = accepted

    @property
    def batch_id(self) -> str:
        return self._accepted.batch_id

    @property
    def run(self) -> str:
        return self._accepted.run

    @property
    def cursor(self) -> int:
        """Where reading begins: every group of the batch closes behind it."""
        return self._accepted.cursor

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Group ids in the order of the tasks."""
        return self._accepted.group_ids

    @property
    def samples(self) -> int:
        """How many samples were submitted; 0 for a handle made of an id."""
        return self._accepted.n

    def groups(
        self, *, cursor: int | CursorFile | None = None, timeout: float | None = None
    ) -> AsyncGenerator[Group, None]:
        """As `Batch.groups`, for `async for`."""
        reader = GroupReader(
            functools.partial(calls.batch_page, self.batch_id, self.run),
            scope=f"batch:{self.batch_id}",
            cursor=self.cursor if cursor is None else cursor,
            timeout_s=iteration_timeout(self._accepted, timeout),
            expected=self.group_ids,
            exists=calls.batch_status(self.batch_id),
        )
        return _read(self._transport, reader)

    async def status(self) -> BatchProgress:
        return await self._transport.send(calls.batch_status(self.batch_id))

    async def cancel(self) -> None:
        """End what has not ended; those samples close as `cancelled`.  Safe to repeat."""
        await self._transport.send(calls.cancel(self.batch_id))

    def __repr__(self) -> str:
        return f"AsyncBatch({self.batch_id!r}, run={self.run!r}, groups={len(self.group_ids)})"


async def _read(transport: AsyncTransport, reader: Reader[Any, T]) -> AsyncGenerator[T, None]:
    budget_s = transport.retries.outage_budget_s
    try:
        while not reader.done:
            page = await transport.send(reader.next_call(), budget_s=budget_s, deadline=reader.deadline)
            fresh = reader.accept(page)
            for item in fresh:
                yield item
                if reader.durable:
                    await asyncio.to_thread(reader.consumed, item)
            question = reader.doubt(fresh)
            if question is not None:
                reader.done = not await _exists(transport, question)
    finally:
        reader.close()


async def _exists(transport: AsyncTransport, call: Call[Any]) -> bool:
    """False when the server says that there is no such thing; its trouble is left to the next page."""
    try:
        await transport.send(call, budget_s=0.0)
    except NotFound:
        return False
    except (RollgridAPIError, Unreachable):
        return True
    return True


class AsyncClient:
    """A connection to one rollgrid for one event loop; arguments and exceptions as `Client`."""

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, retries: Retries | None = None
    ) -> None:
        self._transport = AsyncTransport(resolve(base_url, api_key), retries or Retries())
        self.weights = AsyncWeights(self._transport)
        self.sessions = AsyncSessions(self._transport)

    @property
    def base_url(self) -> str:
        return self._transport.endpoint.url

    async def models(self) -> tuple[Model, ...]:
        return (await self._transport.send(calls.models())).data

    async def submit(
        self,
        tasks: Iterable[TaskLike],
        *,
        n: int = 1,
        sampling: Mapping[str, Any] | SamplingParams,
        scorers: Iterable[ScorerLike] = (),
        run: str = "default",
        policy: str | None = None,
        deadline_s: float | None = None,
        priority: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        weights: WeightConstraint | Mapping[str, Any] | None = None,
        pin: bool = False,
        on_refresh: str | None = None,
        pace: Mapping[str, int] | None = None,
        reward_formula: str | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncBatch:
        """As `Client.submit`."""
        body = submission(
            tasks, n=n, sampling=sampling, scorers=scorers, run=run, policy=policy, deadline_s=deadline_s,
            priority=priority, metadata=metadata, weights=weights, pin=pin, on_refresh=on_refresh, pace=pace,
            reward_formula=reward_formula,
        )  # fmt: skip
        call = calls.submit(body, idempotency_key)
        accepted = await self._transport.send(call, deadline=pace_deadline(pace, deadline_s))
        return AsyncBatch(self._transport, accepted)

    async def batch(self, batch_id: str) -> AsyncBatch:
        """As `Client.batch`."""
        known = await self._transport.send(calls.batch_status(batch_id))
        accepted = Accepted(batch_id=batch_id, run=known.run, deadline=known.deadline)
        return AsyncBatch(self._transport, accepted)

    def trajectories(
        self,
        run: str,
        *,
        cursor: int | CursorFile = 0,
        follow: bool = True,
        timeout: float | None = None,
        until: Iterable[str] = (),
    ) -> AsyncGenerator[Group, None]:
        """As `Client.trajectories`, for `async for`."""
        reader = GroupReader(
            functools.partial(calls.run_page, run),
            scope=f"run:{run}",
            cursor=cursor,
            follow=follow,
            timeout_s=timeout,
            expected=until,
        )
        return _read(self._transport, reader)

    async def group(self, group_id: str) -> Group:
        """One closed group; raises GroupOpen while it is not, NotFound when nobody knows it."""
        return await self._transport.send(calls.group(group_id))

    async def post_rewards(
        self,
        target: PostTarget,
        rewards: RewardsLike,
        *,
        name: str | None = None,
        kind: str | None = None,
        detail: str | None = None,
        source: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> Posted:
        """As `Client.post_rewards`."""
        body = post_body(target, rewards, name=name, kind=kind, detail=detail, source=source, metadata=metadata)
        return await self._transport.send(calls.post_rewards(group_of(target)[0], body, idempotency_key))

    async def post_run_rewards(
        self,
        run: str,
        rewards: Iterable[tuple[Group | str, RewardsLike]],
        *,
        source: str | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[Posted, ...]:
        """As `Client.post_run_rewards`."""
        body = run_body(rewards, source)
        return (await self._transport.send(calls.post_run_rewards(run, body, idempotency_key))).posts

    def rewards(
        self, run: str, *, cursor: int | CursorFile = 0, follow: bool = False, timeout: float | None = None
    ) -> AsyncGenerator[Post, None]:
        """As `Client.rewards`, for `async for`."""
        reader = PostReader(
            functools.partial(calls.rewards_page, run),
            scope=f"rewards:{run}",
            cursor=cursor,
            follow=follow,
            timeout_s=timeout,
        )
        return _read(self._transport, reader)

    async def score_tokens(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        top_logprobs: int = 0,
        policy: str | None = None,
        weights: WeightConstraint | Mapping[str, Any] | None = None,
        deadline_s: float = 120.0,
    ) -> tuple[ScoredTokens, ...]:
        """As `Client.score_tokens`."""
        body = score_body(token_ids, top_logprobs=top_logprobs, policy=policy, weights=weights, deadline_s=deadline_s)
        return (await self._transport.send(calls.score_tokens(body, deadline_s + 30))).data

    async def policies(self) -> tuple[Policy, ...]:
        return await self._transport.send(calls.policies())

    async def policy(self, name: str) -> Policy:
        return await self._transport.send(calls.policy(name))

    async def fleet(self) -> Fleet:
        """The workers that are there now, and what they run."""
        return await self._transport.send(calls.fleet())

    async def close(self) -> None:
        """As `Client.close`."""
        await self.weights.close()
        await self._transport.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
