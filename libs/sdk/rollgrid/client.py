"""The blocking client; `async_client` is its twin for asyncio."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rollgrid_contracts.jobs import SamplingParams, WeightConstraint

from . import calls
from .answers import Accepted, BatchProgress, Fleet, Model, Policy, Posted, ScoredTokens
from .cursor import CursorFile
from .discovery import resolve
from .errors import NotFound, RollgridAPIError, Unreachable
from .following import GroupReader, Reader, T
from .results import Group
from .rewards import Post, PostReader, PostTarget, RewardsLike, group_of, post_body, run_body
from .sessions import Sessions
from .tasks import ScorerLike, TaskLike, score_body, submission
from .transport import Call, Retries, SyncTransport
from .weights import Weights

PACE_WAIT_S = 24 * 3600.0
"""The server's default deadline of a batch."""

CLOSE_GRACE_S = 120.0
"""How long after a batch's deadline its last groups may take to be closed and read."""


def iteration_timeout(accepted: Accepted, timeout: float | None) -> float | None:
    """The caller's bound, else what is left until the batch's deadline plus a grace (None if unknown)."""
    if timeout is not None or not accepted.deadline:
        return timeout
    return max(0.0, accepted.deadline - time.time()) + CLOSE_GRACE_S


def pace_deadline(pace: Mapping[str, int] | None, deadline_s: float | None) -> float | None:
    """Until when (monotonic) a submission may wait for the pace of its run."""
    return None if pace is None else time.monotonic() + (PACE_WAIT_S if deadline_s is None else deadline_s)


class Batch:
    """A submitted batch.  It is durable: this handle may be dropped and made again with `Client.batch`."""

    def __init__(self, transport: SyncTransport, accepted: Accepted) -> None:
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
    ) -> Generator[Group, None, None]:
        """Groups as they finish, until the batch is complete.

        Reconnects by itself and goes on where it was; each group comes once per iterator.  With a
        `CursorFile` (or a stored `group.cursor`) a new process goes on where the old one stopped, at
        least once: the group that was in hand at a crash comes again.

        Raises:
            DeadlineExceeded: `timeout` seconds are over (default: the batch's deadline plus two minutes).
            Unreachable: no answer for `Retries.outage_budget_s`.
        """
        reader = GroupReader(
            functools.partial(calls.batch_page, self.batch_id, self.run),
            scope=f"batch:{self.batch_id}",
            cursor=self.cursor if cursor is None else cursor,
            timeout_s=iteration_timeout(self._accepted, timeout),
            expected=self.group_ids,
            exists=calls.batch_status(self.batch_id),
        )
        return _read(self._transport, reader)

    def status(self) -> BatchProgress:
        return self._transport.send(calls.batch_status(self.batch_id))

    def cancel(self) -> None:
        """End what has not ended; those samples close as `cancelled`.  Safe to repeat."""
        self._transport.send(calls.cancel(self.batch_id))

    def __repr__(self) -> str:
        return f"Batch({self.batch_id!r}, run={self.run!r}, groups={len(self.group_ids)})"


def _read(transport: SyncTransport, reader: Reader[Any, T]) -> Generator[T, None, None]:
    budget_s = transport.retries.outage_budget_s
    try:
        while not reader.done:
            page = transport.send(reader.next_call(), budget_s=budget_s, deadline=reader.deadline)
            fresh = reader.accept(page)
            for item in fresh:
                yield item
                reader.consumed(item)
            question = reader.doubt(fresh)
            if question is not None:
                reader.done = not _exists(transport, question)
    finally:
        reader.close()


def _exists(transport: SyncTransport, call: Call[Any]) -> bool:
    """False when the server says that there is no such thing; its trouble is left to the next page."""
    try:
        transport.send(call, budget_s=0.0)
    except NotFound:
        return False
    except (RollgridAPIError, Unreachable):
        return True
    return True


class Client:
    """A connection to one rollgrid; share it between threads, close it at the end.

    `base_url` and `api_key` default to $ROLLGRID_URL and $ROLLGRID_API_KEY, else to the stack that
    `rollgrid up` runs on this machine.

    Raises (every method): `RollgridAPIError` when the server refuses, `Unreachable` when it cannot be
    reached within `retries.budget_s`.
    """

    def __init__(
        self, base_url: str | None = None, api_key: str | None = None, *, retries: Retries | None = None
    ) -> None:
        self._transport = SyncTransport(resolve(base_url, api_key), retries or Retries())
        self.weights = Weights(self._transport)
        self.sessions = Sessions(self._transport)

    @property
    def base_url(self) -> str:
        return self._transport.endpoint.url

    def models(self) -> tuple[Model, ...]:
        return self._transport.send(calls.models()).data

    def submit(
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
    ) -> Batch:
        """Submit a batch of tasks, `n` samples each; returns once it is durably accepted.

        `sampling` takes vLLM's names and must say `max_tokens`; a task given as a mapping may override
        `n`, `sampling`, `scorers` and `deadline_s`.  `deadline_s` seconds from now whatever is missing
        closes as `expired`.  `policy` may be left out where one is served only.  `weights` demands
        `{"min_version": 3}`, `{"exact_version": 3}` or `{"max_staleness": 2}`; a version not there yet is waited
        for until the deadline.  `pin`: one version makes all samples of a group.  `on_refresh` says what
        becomes of samples in flight when new weights come: `wait`, `abort` or `keep` (default: the worker's).

        `pace={"batch": 64, "max_staleness": 1}` keeps the run from sampling further ahead of its training: with
        64 groups trained on for each version, at most (1 + 1 + versions so far) · 64 groups are admitted, and
        the call waits for the next version, up to `deadline_s` (then DeadlineExceeded).  Nothing is thrown away.

        A submission is sent with an idempotency key, a random one unless given, so a retry never
        duplicates it; give one that your trainer can make again (step, batch number) and a restarted
        trainer gets the same batch back instead of a second one.
        """
        body = submission(
            tasks, n=n, sampling=sampling, scorers=scorers, run=run, policy=policy, deadline_s=deadline_s,
            priority=priority, metadata=metadata, weights=weights, pin=pin, on_refresh=on_refresh, pace=pace,
            reward_formula=reward_formula,
        )  # fmt: skip
        call = calls.submit(body, idempotency_key)
        return Batch(self._transport, self._transport.send(call, deadline=pace_deadline(pace, deadline_s)))

    def batch(self, batch_id: str) -> Batch:
        """The handle of a batch submitted before, perhaps by another process; asks the server for it."""
        known = self._transport.send(calls.batch_status(batch_id))
        return Batch(self._transport, Accepted(batch_id=batch_id, run=known.run, deadline=known.deadline))

    def trajectories(
        self,
        run: str,
        *,
        cursor: int | CursorFile = 0,
        follow: bool = True,
        timeout: float | None = None,
        until: Iterable[str] = (),
    ) -> Generator[Group, None, None]:
        """Every closed group of `run` behind `cursor`, oldest first; resumes as `Batch.groups` does.

        With `follow` it waits for more until `timeout` (then DeadlineExceeded; None: for ever), without
        it ends when everything there is has been read.  It also ends when all groups of `until` have been read.
        """
        reader = GroupReader(
            functools.partial(calls.run_page, run),
            scope=f"run:{run}",
            cursor=cursor,
            follow=follow,
            timeout_s=timeout,
            expected=until,
        )
        return _read(self._transport, reader)

    def group(self, group_id: str) -> Group:
        """One closed group; raises GroupOpen while it is not, NotFound when nobody knows it."""
        return self._transport.send(calls.group(group_id))

    def post_rewards(
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
        """Post rewards onto a group, or onto one of its samples, after the fact; stored durably on return.

        For a sample `rewards` is a number, or one per turn; for a group (itself or its id) numbers by
        index, or rewards in full: `{"index": 0, "name": "tests", "kind": "pass_rate", "value": 0.5}`.
        A later post under the same `name` replaces an earlier one for readers; all stay recorded.

        A retry never posts twice: an idempotency key is sent, a random one unless given.

        Raises:
            GroupNotClosed: the group is still open.
            InvalidRequest: no such index, no tokens to reward, not a finite number; `field` says which.
        """
        body = post_body(target, rewards, name=name, kind=kind, detail=detail, source=source, metadata=metadata)
        return self._transport.send(calls.post_rewards(group_of(target)[0], body, idempotency_key))

    def post_run_rewards(
        self,
        run: str,
        rewards: Iterable[tuple[Group | str, RewardsLike]],
        *,
        source: str | None = None,
        idempotency_key: str | None = None,
    ) -> tuple[Posted, ...]:
        """`post_rewards` onto many groups of one run at once; all are checked before any is stored."""
        body = run_body(rewards, source)
        return (self._transport.send(calls.post_run_rewards(run, body, idempotency_key))).posts

    def rewards(
        self, run: str, *, cursor: int | CursorFile = 0, follow: bool = False, timeout: float | None = None
    ) -> Generator[Post, None, None]:
        """Every post of rewards onto groups of `run` behind `cursor`, oldest first; resumes as `trajectories` does.

        `Standing(client.rewards(run))` says what stands.
        """
        reader = PostReader(
            functools.partial(calls.rewards_page, run),
            scope=f"rewards:{run}",
            cursor=cursor,
            follow=follow,
            timeout_s=timeout,
        )
        return _read(self._transport, reader)

    def score_tokens(
        self,
        token_ids: Sequence[int] | Sequence[Sequence[int]],
        *,
        top_logprobs: int = 0,
        policy: str | None = None,
        weights: WeightConstraint | Mapping[str, Any] | None = None,
        deadline_s: float = 120.0,
    ) -> tuple[ScoredTokens, ...]:
        """Logprob and rank of each given token under the current weights; nothing is sampled.

        `weights` as in `submit`; `top_logprobs` alternatives are given beside each token.
        """
        body = score_body(token_ids, top_logprobs=top_logprobs, policy=policy, weights=weights, deadline_s=deadline_s)
        return (self._transport.send(calls.score_tokens(body, deadline_s + 30))).data

    def policies(self) -> tuple[Policy, ...]:
        return self._transport.send(calls.policies())

    def policy(self, name: str) -> Policy:
        return self._transport.send(calls.policy(name))

    def fleet(self) -> Fleet:
        """The workers that are there now, and what they run."""
        return self._transport.send(calls.fleet())

    def close(self) -> None:
        """Waits for publications that are under way (`weights.publish(..., block=False)`)."""
        self.weights.close()
        self._transport.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
