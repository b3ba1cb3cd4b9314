"""rollgrid over NATS alone: publish batches, follow trajectories.  Needs the extra `[nats]`.

For trainers with a NATS user of their tenant (`rollgrid tenants add`).  A batch is accepted when its
message is acknowledged; a follower is a durable that the operator made with the tenant, and the server
keeps its place.  nats-py is imported when a client connects.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from rollgrid_contracts import codec, ids, subjects, topology
from rollgrid_contracts.jobs import SamplingParams, WeightConstraint

from .async_client import AsyncClient
from .cursor import CursorFile
from .errors import (
    ConfigurationError,
    Forbidden,
    PayloadTooLarge,
    QueueFull,
    RollgridAPIError,
    ServerError,
    Unauthenticated,
    Unreachable,
    Unsendable,
    refusal,
)
from .nats_follower import Follower
from .results import Group
from .tasks import ScorerLike, TaskLike, submission

if TYPE_CHECKING:
    from nats.aio.client import Client as NatsConnection

T = TypeVar("T")
CONNECT_S = 10.0
ATTEMPT_S = 5.0
PAUSE_S = 0.25
HEADROOM_BYTES = 1024
"""Headers count against the server's bound as well."""

TOO_LARGE = 10054
FULL = frozenset({10077, 10122})


@dataclasses.dataclass(frozen=True)
class Queued:
    """A batch that the queue has: its ids follow from tenant, run and key, so they are known at once.

    What is wrong with it is told by its groups, which then close as rejected, or, where it has none (a run
    or an n that is not allowed, a key that stands for another body), by what `NatsClient.groups` raises.
    """

    run: str
    batch_id: str
    group_ids: tuple[str, ...]
    sequence: int
    idempotency_key: str


class NatsClient:
    """One connection as one tenant, for one event loop.  Use as an async context manager.

    `http` (an `AsyncClient`) fetches groups too large for the stream, if there are any.

    Raises (every method): Unreachable within `budget_s`, Unauthenticated, Forbidden when the user lacks
    a permission.
    """

    def __init__(
        self,
        url: str,
        *,
        tenant: str,
        user: str | None = None,
        password: str | None = None,
        http: AsyncClient | None = None,
        budget_s: float = 60.0,
    ) -> None:
        if not ids.is_name(tenant):
            raise ConfigurationError(f"{tenant!r} is not a tenant name: {ids.NAME_PATTERN}")
        self.url, self.tenant, self.budget_s = url, tenant, budget_s
        self._user, self._password, self._http = user, password, http
        self._nats: NatsConnection | None = None
        self._refused: RollgridAPIError | None = None
        self._told = asyncio.Event()

    async def connect(self) -> None:
        """Once; afterwards the connection is kept up for ever."""
        try:
            import nats
            from nats.errors import Error
        except ModuleNotFoundError as error:
            raise ConfigurationError("nats-py is not installed: pip install 'rollgrid[nats]'") from error
        options: dict[str, Any] = {}
        if self._user is not None:
            options = {"user": self._user, "password": self._password or ""}
        connecting = nats.connect(
            self.url,
            name=f"rollgrid-sdk-{self.tenant}",
            error_cb=self._on_error,
            max_reconnect_attempts=-1,
            reconnect_time_wait=PAUSE_S,
            connect_timeout=2,
            **options,
        )
        try:
            async with asyncio.timeout(min(CONNECT_S, self.budget_s)):
                self._nats = await self._unless_refused(connecting)
        except (Error, OSError, TimeoutError) as error:
            self.check()
            raise Unreachable(f"{self.url}: {error!r}") from error

    async def close(self) -> None:
        if self._nats is not None:
            await self._nats.close()
            self._nats = None

    async def __aenter__(self) -> NatsClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

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
    ) -> Queued:
        """Publish a batch, as `Client.submit`; returns once the queue has it durably.

        Sent again until it is acknowledged: the key makes that safe.  A batch beyond its run's `pace` waits
        in the queue; its deadline counts from now.

        Raises PayloadTooLarge, Unsendable, and QueueFull when there was no room within `budget_s`.
        """
        asked = list(tasks)
        if not asked:
            raise Unsendable("tasks is empty")
        body = submission(
            asked, n=n, sampling=sampling, scorers=scorers, run=run, policy=policy, deadline_s=deadline_s,
            priority=priority, metadata=metadata, weights=weights, pin=pin, on_refresh=on_refresh, pace=pace,
            reward_formula=reward_formula, record_format="msgpack",
        )  # fmt: skip
        key = ids.new_key() if idempotency_key is None else idempotency_key
        if not (key and key.isascii() and key.isprintable()):
            raise Unsendable("an idempotency key is printable ASCII")
        headers = {
            topology.Header.CONTENT_TYPE.value: codec.JSON,
            topology.Header.IDEMPOTENCY_KEY.value: key,
        }
        return Queued(
            run=run,
            batch_id=ids.batch_id(self.tenant, run, key),
            group_ids=tuple(ids.group_id(self.tenant, run, key, position) for position in range(len(asked))),
            sequence=await self._publish(body, headers),
            idempotency_key=key,
        )

    def trajectories(
        self,
        run: str | None = None,
        *,
        follower: str = "default",
        cursor: CursorFile | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Groups as they close, of all runs of the tenant or those of `run`; what comes again comes out of order.

        Each comes until it is acknowledged, which is when the next one is asked for: after a crash the
        one in hand comes again (with those whose acknowledgement was still on its way), none is skipped.  The place is the durable's, so it is the same for
        whoever reads as this follower (one at a time), and groups of other runs are passed over for
        good.  With a `CursorFile`, which is written before the acknowledgement, not even the one whose
        acknowledgement was lost comes twice.  Rewards posted later are passed over.

        Raises DeadlineExceeded after `timeout` seconds (None: never).
        """
        return self._read(run, follower, cursor, timeout)

    def groups(
        self, batch: Queued, *, follower: str = "default", timeout: float | None = None
    ) -> AsyncGenerator[Group, None]:
        """The groups of one batch as they close, as `trajectories`; all other groups are passed over for good.

        Raises what the batch was refused for (LimitExceeded, IdempotencyConflict, …) where it was not under
        these groups.
        """
        return self._read(batch.run, follower, None, timeout, batch)

    async def _read(
        self,
        run: str | None,
        follower: str,
        cursor: CursorFile | None,
        timeout: float | None,
        batch: Queued | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Ends when all of `batch` have been consumed."""
        wanted = None if batch is None else set(batch.group_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        place = Follower(self, topology.tenant_consumer(self.tenant, follower))
        scope = f"follower:{self.tenant}/{follower}"
        done = cursor.read(scope) if cursor is not None else 0
        try:
            while wanted is None or wanted:
                message = await place.next(deadline)
                asked_for = run in (None, message.run) and (wanted is None or message.group_id in wanted)
                if asked_for and message.sequence != done:
                    yield await message.group(self._http)
                    if cursor is not None:
                        await asyncio.to_thread(cursor.commit, message.sequence, scope)
                    if wanted is not None:
                        wanted.discard(message.group_id)
                await place.acknowledge(message, confirmed=cursor is not None)
                if batch is not None and not asked_for and message.run in (batch.run, ids.REJECTED_RUN):
                    refused = message.refusal(batch.sequence)
                    if refused is not None:
                        raise refusal(refused)
        finally:
            if cursor is not None:
                await asyncio.to_thread(cursor.flush)
            await place.close()

    # -- what the follower uses as well -----------------------------------------------------------

    @property
    def connection(self) -> NatsConnection:
        if self._nats is None:
            raise ConfigurationError("this client is not connected: `async with NatsClient(...)`")
        return self._nats

    def refuse(self, error: RollgridAPIError) -> None:
        """Whoever waits next (or now) is told."""
        self._refused = error
        self._told.set()

    def check(self) -> None:
        """Raise what the server has refused meanwhile: it tells nobody else."""
        if self._refused is not None:
            refused, self._refused = self._refused, None
            self._told.clear()
            raise refused

    async def request(self, subject: str, body: bytes, seconds: float, headers: dict[str, str] | None = None) -> bytes:
        """One answer.  Raises nats-py's errors, and at once what the server refuses."""
        asking = self.connection.request(subject, body, timeout=seconds, headers=headers)
        return bytes((await self._unless_refused(asking)).data)

    async def _unless_refused(self, work: Coroutine[Any, Any, T]) -> T:
        """Refusals reach only the error callback: whoever waits need not wait to the end."""
        asking, told = asyncio.ensure_future(work), asyncio.ensure_future(self._told.wait())
        try:
            await asyncio.wait({asking, told}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                self.check()
            return await asking
        finally:
            for task in (asking, told):
                task.cancel()
            await asyncio.gather(asking, told, return_exceptions=True)

    async def persistently(self, subject: str, body: bytes, headers: dict[str, str] | None = None) -> bytes:
        """An answer, asked for until the budget is spent; then raises Unreachable.  Only for what may be sent twice."""
        from nats.errors import Error, MaxPayloadError, NoRespondersError

        give_up = time.monotonic() + self.budget_s
        while True:
            try:
                return await self.request(subject, body, min(ATTEMPT_S, max(0.1, give_up - time.monotonic())), headers)
            except MaxPayloadError:
                raise
            except (Error, TimeoutError, OSError) as error:
                problem = "nobody serves this subject here" if isinstance(error, NoRespondersError) else repr(error)
            if time.monotonic() + PAUSE_S > give_up:
                raise Unreachable(f"{self.url}: {subject} not answered within {self.budget_s:g} s: {problem}")
            await asyncio.sleep(PAUSE_S)

    # -- inside -------------------------------------------------------------------------------------

    async def _publish(self, body: bytes, headers: dict[str, str]) -> int:
        most = min(self.connection.max_payload or topology.MAX_PAYLOAD, topology.MAX_PAYLOAD) - HEADROOM_BYTES
        if len(body) > most:
            raise _too_large(len(body), most)
        give_up = time.monotonic() + self.budget_s
        while True:
            answer = json.loads(await self.persistently(subjects.submit(self.tenant), body, headers))
            if "error" not in answer:
                return int(answer["seq"])
            problem = _refusal(answer["error"])
            if not problem.retryable or time.monotonic() + PAUSE_S > give_up:
                raise problem
            await asyncio.sleep(PAUSE_S)

    async def _on_error(self, error: Exception) -> None:
        text = str(error)
        if "authorization violation" in text.lower():
            self.refuse(
                Unauthenticated(f"NATS refuses user {self._user!r}", code="unauthenticated", status=401, field="user")
            )
        elif "permissions violation" in text.lower():
            self.refuse(Forbidden(text.removeprefix("nats: "), code="forbidden", status=403, boundary="client"))


def _too_large(size: int, most: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"the batch has {size} bytes: send fewer tasks in one call",
        code="payload_too_large",
        status=413,
        limit=f"max_payload={most}",
    )


def _refusal(error: Mapping[str, Any]) -> RollgridAPIError:
    """What a JetStream answer stands for."""
    text, number = str(error.get("description", error)), int(error.get("err_code", 0))
    if number == TOO_LARGE:
        return PayloadTooLarge(text, code="payload_too_large", status=413)
    if number in FULL or error.get("code") == 503:
        return QueueFull(text, code="queue_full", status=429, retryable=True)
    return ServerError(text, code="bus_error", status=int(error.get("code", 500)))
