"""Redis / Valkey: affinity and episode state.  A cache of the streams, never their rival."""

from __future__ import annotations

import redis.asyncio as redis
from redis.exceptions import RedisError
from rollgrid_contracts import keys
from rollgrid_contracts.failures import Boundary, ErrorCode

from .errors import RollgridError
from .settings import RedisSettings


class StateError(RollgridError):
    """Redis did not answer or refused."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.STORAGE_ERROR, message, boundary=Boundary.STORAGE, retry_after_s=1.0)


class State:
    def __init__(self, settings: RedisSettings) -> None:
        self._redis: redis.Redis = redis.Redis.from_url(
            settings.url.get_secret_value(),
            socket_timeout=2,
            socket_connect_timeout=2,
            health_check_interval=15,
            max_connections=64,
        )

    async def probe(self, service: str) -> None:
        """A real write and read; raises StateError."""
        try:
            await self._redis.set(keys.probe(service), service, ex=30)
            if await self._redis.get(keys.probe(service)) != service.encode():
                raise StateError("Redis probe read back another value")
        except RedisError as error:
            raise StateError(f"Redis: {error}") from error

    async def close(self) -> None:
        await self._redis.aclose()
