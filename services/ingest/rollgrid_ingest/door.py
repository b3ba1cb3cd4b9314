"""What every route shares: the parts it works with, who calls, and how answers leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, cast

import msgspec
from rollgrid_contracts import codec, ids
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_rendering.offload import RenderThreads
from rollgrid_runtime import telemetry
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger
from starlette.requests import Request
from starlette.responses import Response

from .admission import Gate
from .auth import Keys, Principal, Scope
from .catalog import Catalog
from .commits import Commits
from .fleet import Fleet
from .freshness import Freshness
from .handler import Handler
from .idempotency import body_digest, checked_key
from .ledger_client import LedgerClient
from .posted_rewards import PostReader
from .replies import Collected, Replies, TurnRecord, refuse_failed
from .results import Results
from .rewards import Rewards
from .session_openings import Openings
from .settings import IngestSettings
from .submission import Accepted, Caller, Submission
from .translate import Translator
from .turn_prompts import TurnPrompts
from .turns import Turns
from .uploads import Uploads
from .versions import Versions

T = TypeVar("T")
log = get_logger(__name__)


@dataclass(slots=True)
class Parts:
    """The collaborators of all routes, made by the service."""

    settings: IngestSettings
    keys: Keys
    catalog: Catalog
    threads: RenderThreads
    translator: Translator
    handler: Handler
    replies: Replies
    results: Results
    freshness: Freshness
    ledger: LedgerClient
    fleet: Fleet
    uploads: Uploads
    commits: Commits
    versions: Versions
    readers: Gate
    rewards: Rewards
    posts: PostReader
    openings: Openings
    turns: Turns
    turn_prompts: TurnPrompts
    started_at: int = 0
    draining: bool = False
    waiting: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    problems: Any = None
    facts: Any = None

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Around an interactive call: a drain waits for it."""
        self.waiting += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.waiting -= 1
            if self.waiting == 0:
                self.idle.set()

    def refuse_while_draining(self) -> None:
        if self.draining:
            raise RollgridError(ErrorCode.NOT_READY, "this server is shutting down", retry_after_s=1.0)


def parts(request: Request) -> Parts:
    return cast("Parts", request.app.state.parts)


def principal(request: Request, scope: Scope) -> Principal:
    """The caller, who must hold `scope`."""
    found = cast("Principal", request.scope["state"]["principal"])
    found.require(scope)
    return found


def caller_of(request: Request, who: Principal, body: bytes) -> Caller:
    key = checked_key(request.headers.get("idempotency-key"))
    return Caller(
        tenant=who.tenant,
        run=request.headers.get("x-rollgrid-run", ""),
        key=key if key is not None else ids.new_key(),
        idempotent=key is not None,
        digest=body_digest(request.url.path, body) if key is not None else "",
        traceparent=telemetry.current().traceparent,
        affinity=request.headers.get("x-session-id") or None,
    )


def request_id(request: Request) -> str:
    return cast("str", request.scope["state"]["request_id"])


def json_response(answer: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(codec.encode(answer, codec.JSON), status, headers, media_type=codec.JSON)


def msgpack_response(answer: object) -> Response:
    return Response(msgspec.msgpack.encode(answer), media_type=codec.MSGPACK)


class ClientGone(Exception):
    """The client closed the connection while it was being served."""


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; raises ClientGone, ending `work`, when the client leaves first.

    The request's body must have been read.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for either in (task, watcher):
            either.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


class Call(Protocol):
    """Something to be answered: it is submitted once its replies are listened for.  `record` of a session's turn."""

    @property
    def record(self) -> TurnRecord | None: ...

    async def submit(self) -> Accepted: ...

    async def give_up(self, accepted: Accepted, reason: str) -> None:
        """Nobody waits for it any more."""

    async def answered(self, collected: Collected) -> None:
        """Its samples have come, whatever became of them."""

    async def let_go(self) -> None:
        """The last of it, whether it was ever submitted or not."""


class GroupsCall:
    """The groups of one request.  See `Call`."""

    record: TurnRecord | None = None

    def __init__(self, door: Parts, submission: Submission) -> None:
        self._door, self._submission = door, submission

    async def submit(self) -> Accepted:
        return await self._door.handler.submit(self._submission)

    async def give_up(self, accepted: Accepted, reason: str) -> None:
        """They are cancelled, unless the call has a key: then its client may come back."""
        asked = self._submission
        if asked.idempotent:
            return
        try:
            await self._door.handler.cancel(asked.tenant, asked.run, accepted.batch_id, reason=reason)
        except RollgridError as error:  # they run to their end, or to their deadline
            log.warning("call_not_cancelled", batch=accepted.batch_id, error=error.message)

    async def answered(self, collected: Collected) -> None:
        pass

    async def let_go(self) -> None:
        pass


@contextlib.asynccontextmanager
async def ending(call: Call) -> AsyncIterator[None]:
    """Around all that is done for a call."""
    try:
        yield
    finally:
        await call.let_go()


async def interactive(
    request: Request, submission: Submission, asked: Call | None = None
) -> tuple[Accepted, Collected]:
    """Submit and wait: every sample asked for, each succeeded.

    A client that leaves cancels its groups, unless it gave an idempotency key: then it may come back.

    Raises the first failure of any sample, expired at the deadline, cancelled when the client left.
    """
    door = parts(request)
    call: Call = GroupsCall(door, submission) if asked is None else asked
    sizes = {group_id: group.n for group_id, group in zip(submission.group_ids, submission.groups, strict=True)}
    async with door.held(), ending(call), door.replies.listening(sizes, turn=call.record) as collected:
        accepted = await call.submit()
        waiting = door.replies.wait(collected, submission.tenant, accepted.deadline, ask_first=not accepted.fresh)
        try:
            await until_disconnect(request, waiting)
        except ClientGone:
            await call.give_up(accepted, "the client disconnected")
            raise RollgridError(ErrorCode.CANCELLED, "the client disconnected", boundary=Boundary.CLIENT) from None
        await call.answered(collected)
    for group_id, group in zip(accepted.group_ids, submission.groups, strict=True):
        refuse_failed(collected.samples(group_id), empty=group.sampling.max_tokens == 0)
    return accepted, collected
