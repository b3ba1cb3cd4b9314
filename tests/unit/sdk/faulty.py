"""An HTTP server with ingest's rollout routes that fails on purpose, exactly as a test tells it to.

It keeps closed groups in memory and speaks the real shapes over real sockets; what it cannot do is
sample.  The SDK against the real thing is tests/integration/sdk.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import uvicorn
from rollgrid_contracts import codec
from rollgrid_contracts.trajectories import GroupClosed
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

Fault = Callable[[Request], Awaitable[Response | None]]
"""Answers in place of the route, or returns None to let the route answer."""


def refuse(
    status: int, code: str, *, retryable: bool = True, headers: dict[str, str] | None = None, **more: Any
) -> Fault:
    async def fault(_: Request) -> Response:
        error = {"message": code, "code": code, "retryable": retryable, **more}
        return Response(msgspec.json.encode({"error": error}), status, headers, codec.JSON)

    return fault


async def cut(request: Request) -> Response:
    """Reset the connection without an answer."""
    transport = request.scope["faulty.transport"]()
    transport.abort()
    return Response(status_code=500)


def after(fault: Fault) -> Fault:
    """Do what was asked, then fail: the answer is lost, its effect is not."""

    async def late(request: Request) -> Response | None:
        await request.scope["faulty.route"](request)
        return await fault(request)

    return late


class FaultyIngest:
    """`faults` are used up one a request; then it works.  `seen` counts requests by method and path."""

    def __init__(self) -> None:
        self.faults: deque[Fault] = deque()
        self.groups: list[tuple[int, GroupClosed]] = []
        self.batch_size = 0
        self.bodies: dict[str, bytes] = {}
        self.seen: Counter[str] = Counter()
        self.keys: list[str] = []
        self.cursors: list[int] = []
        self.files: dict[str, bytes] = {}
        self.uploads: dict[str, dict[str, Any]] = {}
        self.shards: dict[str, dict[int, list[dict[str, Any]]]] = {}
        self.committed: dict[str, int] = {}
        self.newest = 0
        self.desired: int | None = None
        self.loaded: list[dict[str, Any]] | None = None
        self.standing: dict[str, Any] = {"status": "verifying"}
        self.page_size = 1000
        self.retry_counts: list[str | None] = []
        self.forgotten = False

    # -- routes ---------------------------------------------------------------------------------

    async def submit(self, request: Request) -> Response:
        key = request.headers["idempotency-key"]
        self.keys.append(key)
        self.bodies[key] = await request.body()
        count = len(msgspec.json.decode(self.bodies[key])["tasks"])
        answer = {"batch_id": f"b-{key}", "run": "r", "policy": "p", "cursor": 0, "n": 1, "deadline": 0.0}
        return reply({**answer, "group_ids": [f"g{index}" for index in range(count)]}, 202)

    async def status(self, request: Request) -> Response:
        if self.forgotten:
            return await refuse(404, "not_found", retryable=False)(request) or Response(status_code=500)
        progress = {"run": "r", "groups": self.batch_size, "closed": len(self.groups), "samples": 0, "finished": 0}
        known = {"batch_id": request.path_params["batch"], "counts": {}, "status": "open", "done": False, "cursor": 0}
        return reply({**progress, **known})

    async def cancel(self, request: Request) -> Response:
        return reply({"batch_id": request.path_params["batch"], "status": "cancelling"}, 202)

    async def page(self, request: Request) -> Response:
        cursor = int(request.query_params["cursor"])
        self.cursors.append(cursor)
        behind = [(at, group) for at, group in self.groups if at > cursor][: self.page_size]
        if not behind and "wait_s" in request.query_params:
            await asyncio.sleep(min(0.05, float(request.query_params["wait_s"])))
        reached = behind[-1][0] if behind else cursor
        done = bool(self.batch_size) and sum(at > reached for at, _ in self.groups) == 0
        done = done and len(self.groups) >= self.batch_size and "batch" in request.path_params
        items = [{"cursor": at, "group": msgspec.Raw(codec.encode(group))} for at, group in behind]
        return reply({"groups": items, "cursor": reached, "done": done})

    async def version(self, request: Request) -> Response:
        names = request.path_params
        return reply({"policy": names["p"], "version": int(names["version"]), **self.standing})

    async def policy(self, request: Request) -> Response:
        loaded = [{"policy": "p", "version": self.newest}] if self.loaded is None else self.loaded
        worker = {"worker": "w", "incarnation": "1", "pool": "x", "engine": "scripted", "device": "cpu", "slots": 1}
        answer = {
            "policy": "p",
            "tenant": "shared",
            "desired": self.newest if self.desired is None else self.desired,
            "newest": self.newest,
            "workers": [{**worker, "loaded": loaded}],
        }
        return reply(answer)

    async def begin(self, request: Request) -> Response:
        terms = msgspec.json.decode(await request.body())
        if terms["version"] is not None and terms["version"] <= self.newest and terms["upload"] not in self.uploads:
            return await refuse(409, "version_unavailable", retryable=False)(request) or Response(status_code=500)
        self.uploads.setdefault(terms["upload"], terms)
        return reply({"policy": "p", "upload": terms["upload"], "world": terms["world"]})

    async def put_file(self, request: Request) -> Response:
        content = await request.body()
        self.files[request.path_params["name"]] = content
        return reply({"name": "x", "size": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    async def shard(self, request: Request) -> Response:
        shard = msgspec.json.decode(await request.body())
        self.shards.setdefault(request.path_params["upload"], {})[shard["rank"]] = shard["files"]
        return reply({"upload": "u", "rank": shard["rank"], "missing": []})

    async def commit(self, request: Request) -> Response:
        name = request.path_params["upload"]
        missing = set(range(self.uploads[name]["world"])) - set(self.shards.get(name, {}))
        if missing:
            refused = refuse(409, "upload_incomplete", limit=f"missing={sorted(missing)}")
            return await refused(request) or Response(status_code=500)
        if name not in self.committed:
            self.newest += 1
            self.committed[name] = self.newest
        return reply({"policy": "p", "version": self.committed[name], "created": True})

    # -- the server -----------------------------------------------------------------------------

    def app(self) -> Starlette:
        def faulty(route: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
            async def endpoint(request: Request) -> Response:
                self.seen[f"{request.method} {request.url.path}"] += 1
                self.retry_counts.append(request.headers.get("x-rollgrid-retry-count"))
                request.scope["faulty.route"] = route
                if self.faults and (answer := await self.faults.popleft()(request)) is not None:
                    return answer
                return await route(request)

            return endpoint

        return Starlette(
            routes=[
                Route("/v1/rollouts", faulty(self.submit), methods=["POST"]),
                Route("/v1/rollouts/{batch}", faulty(self.status)),
                Route("/v1/rollouts/{batch}/cancel", faulty(self.cancel), methods=["POST"]),
                Route("/v1/rollouts/{batch}/groups", faulty(self.page)),
                Route("/v1/runs/{run}/trajectories", faulty(self.page)),
                Route("/v1/policies/{policy}", faulty(self.policy)),
                Route("/v1/policies/{p}/versions/{version}", faulty(self.version)),
                Route("/v1/policies/{p}/uploads", faulty(self.begin), methods=["POST"]),
                Route("/v1/policies/{p}/uploads/{upload}/files/{name}", faulty(self.put_file), methods=["PUT"]),
                Route("/v1/policies/{p}/uploads/{upload}/shards", faulty(self.shard), methods=["POST"]),
                Route("/v1/policies/{p}/uploads/{upload}/commit", faulty(self.commit), methods=["POST"]),
                *(Route(path, faulty(route)) for path, route in self.more_gets().items()),
                *(Route(path, faulty(route), methods=["POST"]) for path, route in self.more_posts().items()),
                *(Route(path, faulty(route), methods=["DELETE"]) for path, route in self.more_deletes().items()),
            ]
        )

    def more_gets(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        """Further routes by path."""
        return {}

    def more_posts(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {}

    def more_deletes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {}


def reply(body: object, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(body), status, None, codec.MSGPACK)


class _ExposingProtocol(H11Protocol):
    """Lets a fault reach the connection it came on."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        inner = self.app

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["faulty.transport"] = lambda: transport
            await inner(scope, receive, send)

        self.app = app


class RunningServer:
    """A uvicorn of its own thread, which can be stopped and started again on the same port."""

    def __init__(self, ingest: FaultyIngest) -> None:
        self._ingest = ingest
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        config = uvicorn.Config(
            self._ingest.app(), host="127.0.0.1", port=self.port, log_level="error", lifespan="off",
            http=_ExposingProtocol, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise RuntimeError("the server did not start")
            threading.Event().wait(0.005)

    def stop(self) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join()


@contextmanager
def running(ingest: FaultyIngest) -> Iterator[RunningServer]:
    server = RunningServer(ingest)
    server.start()
    try:
        yield server
    finally:
        server.stop()
