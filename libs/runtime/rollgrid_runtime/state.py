"""Redis / Valkey: affinity and episode state.  A cache of the streams, never their rival.

Whatever changes state is a Lua script: one step for everybody, and safe to run twice, because an answer that
was lost is asked for again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff
from redis.exceptions import RedisError
from rollgrid_contracts import keys
from rollgrid_contracts.failures import Boundary, ErrorCode

from .errors import RollgridError
from .settings import RedisSettings

ANSWER_S = 2.0
"""One call waits so long for Redis, reconnecting included."""

CONNECTIONS = 64

Argument = str | bytes | int | float


class StateError(RollgridError):
    """Redis did not answer or refused."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.STORAGE_ERROR, message, boundary=Boundary.STORAGE, retry_after_s=1.0)


class Script:
    """A Lua script.  Its keys share one hash tag; it may be run again when its answer did not come."""

    def __init__(self, state: State, source: str) -> None:
        self._state = state
        self._script: Any = state.client.register_script(source)

    async def __call__(self, names: Sequence[str], *arguments: Argument) -> Any:
        """What the script returned (bytes, int, list or None); raises StateError within `ANSWER_S`."""
        task = asyncio.current_task()
        cancels = task.cancelling() if task is not None else 0
        try:
            async with asyncio.timeout(ANSWER_S), self._state.turn:
                found = await self._script(keys=list(names), args=list(arguments))
        except (RedisError, OSError, TimeoutError) as error:
            raise StateError(f"Redis: {error!r}") from error
        if task is not None and task.cancelling() > cancels:
            # redis-py sends within `asyncio.wait_for`, which before Python 3.12 may swallow a cancellation
            raise asyncio.CancelledError
        return found


class State:
    def __init__(self, settings: RedisSettings) -> None:
        self.client: redis.Redis = redis.Redis.from_url(
            settings.url.get_secret_value(),
            socket_timeout=2,
            socket_connect_timeout=2,
            health_check_interval=15,
            max_connections=CONNECTIONS + 1,  # one for the probe
            retry=Retry(ConstantBackoff(0.05), 2),
        )
        self.turn = asyncio.Semaphore(CONNECTIONS)
        """The pool refuses a call that finds every connection in use: here it waits."""

    def script(self, source: str) -> Script:
        """A script to call by its digest; the server is given its text when it does not know it."""
        return Script(self, source)

    async def probe(self, service: str) -> None:
        """A real write and read; raises StateError."""
        try:
            await self.client.set(keys.probe(service), service, ex=30)
            if await self.client.get(keys.probe(service)) != service.encode():
                raise StateError("Redis probe read back another value")
        except RedisError as error:
            raise StateError(f"Redis: {error}") from error

    async def close(self) -> None:
        await self.client.aclose()
