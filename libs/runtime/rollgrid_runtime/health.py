"""`/livez`, `/readyz` and `/metrics` for services without an HTTP door of their own.

Alive means the loop answers.  Ready means that a real operation of every dependency worked a
moment ago: the service's own `problems` says what does not.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

Problems = Callable[[], Awaitable[dict[str, str]]]
"""What keeps the service from working: dependency name → cause; empty = ready."""

Facts = Callable[[], dict[str, Any]]
"""What the service says of itself on /readyz (versions, slots, depths)."""

PROBE_TIMEOUT_S = 4.0


async def readiness(problems: Problems, facts: Facts) -> tuple[int, bytes]:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            found = await problems()
    except TimeoutError:
        found = {"probe": f"no answer within {PROBE_TIMEOUT_S} s"}
    body = {"status": "ready" if not found else "not_ready", "problems": found, **facts()}
    return (200 if not found else 503), msgspec.json.encode(body, enc_hook=str)


class HealthApp:
    """Pure ASGI."""

    def __init__(self, problems: Problems, facts: Facts) -> None:
        self._problems, self._facts = problems, facts

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        content = b"application/json"
        match scope["path"]:
            case "/livez":
                status, body = 200, b'{"status":"alive"}'
            case "/readyz" | "/health" | "/healthz":
                status, body = await readiness(self._problems, self._facts)
            case "/metrics":
                status, body, content = 200, generate_latest(), CONTENT_TYPE_LATEST.encode()
            case _:
                status, body = 404, b'{"status":"not_found"}'
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", content)]})
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def http_server(app: Any, host: str, port: int, **options: Any) -> AsyncIterator[uvicorn.Server]:
    """Serve an ASGI app inside this loop, without uvicorn's own signal handling; port 0 serves nothing."""
    server = uvicorn.Server(
        uvicorn.Config(app, host=host, port=port, log_level="warning", access_log=False, lifespan="off", **options)
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined, method-assign, unused-ignore]
    if port == 0:
        yield server
        return
    task = asyncio.create_task(server._serve())  # serve() would capture the process's signals
    try:
        while not server.started:
            if task.done():
                task.result()
                raise RuntimeError(f"HTTP server on {host}:{port} ended before it started")
            await asyncio.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                await task
