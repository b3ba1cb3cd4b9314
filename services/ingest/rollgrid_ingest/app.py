"""The HTTP application: routes, error handlers, the door around them."""

from __future__ import annotations

from typing import Any, cast

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.health import readiness
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as ASGIScope

from . import openapi, routes_openai, routes_policies, routes_rewards, routes_rollouts, routes_sessions, routes_turns
from .auth import Scope
from .door import Parts, principal
from .envelope import error_response, internal_error
from .middleware import Door
from .wire import invalid


def create_app(parts: Parts) -> ASGIApp:
    """The whole door: authenticated, bounded, answering every failure with the error envelope."""
    app = FastAPI(
        title="rollgrid",
        version="0.1.0",
        summary="Rollouts for reinforcement learning: jobs in, trajectories out.",
        openapi_url="/openapi.json",
        docs_url="/docs",
        redoc_url=None,
    )
    app.state.parts = parts
    app.openapi = lambda: openapi.document(app)  # type: ignore[method-assign]
    app.add_exception_handler(RollgridError, _on_refusal)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_parameters)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_bug)
    for routes in (
        routes_openai, routes_rollouts, routes_rewards, routes_policies, routes_sessions, routes_turns,
    ):  # fmt: skip
        app.include_router(routes.router, dependencies=[Depends(refuse_unknown_parameters)])
    _add_health(app, parts)
    return Door(Direct(app), parts.settings, parts.keys)


class Direct:
    """Pure ASGI: the calls that wait, past FastAPI, which only describes them; everything else goes on to it."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        paths = {*routes_openai.ANSWERS, *(routes_turns.PREFIX + below for below in routes_turns.TURNS)}
        self._routes = {
            route.path: route for route in app.routes if isinstance(route, APIRoute) and route.path in paths
        }

    async def __call__(self, scope: ASGIScope, receive: Receive, send: Send) -> None:
        found = _answering(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        answering, template = found
        scope["app"], scope["route"] = self._app, self._routes[template]
        request = Request(scope, receive)
        try:
            await refuse_unknown_parameters(request)
            response = await answering(request)
            await response(scope, receive, send)
        except ClientDisconnect as error:
            raise _gone() from error


def _answering(path: str) -> tuple[routes_openai.Answering, str] | None:
    """Who answers a call that waits, and the path of its route."""
    plain = routes_openai.ANSWERS.get(path)
    if plain is not None:
        return plain, path
    turn = routes_turns.turning(path)
    if turn is None:
        return None
    name, answering, template = turn
    return (lambda request: answering(request, name)), template


async def refuse_unknown_parameters(request: Request) -> None:
    """A misspelt parameter would silently be none: refused by name."""
    if not request.scope["query_string"]:
        return
    known = {parameter.alias for parameter in request.scope["route"].dependant.query_params}
    for name in request.query_params:
        if name not in known:
            field = name[:80]
            raise invalid(f"unknown query parameter {field}", field, code=ErrorCode.UNKNOWN_FIELD)


def _add_health(app: FastAPI, parts: Parts) -> None:
    @app.get("/livez", include_in_schema=False)
    async def livez() -> Response:
        return Response(b'{"status":"alive"}', media_type="application/json")

    async def readyz() -> Response:
        status, body = await readiness(parts.problems, parts.facts)
        return Response(body, status, media_type="application/json")

    @app.get("/metrics", include_in_schema=False)
    async def metrics(request: Request) -> Response:
        principal(request, Scope.ADMIN)
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    for path in ("/readyz", "/health", "/healthz"):
        app.add_api_route(path, readyz, include_in_schema=False, response_model=None)


async def _on_refusal(request: Request, error: Exception) -> Response:
    return error_response(cast("RollgridError", error), _request_id(request))


async def _on_bug(request: Request, _: Exception) -> Response:
    """The answer to a bug; the exception goes on to the door, which logs it."""
    return error_response(internal_error(), _request_id(request))


async def _on_disconnect(request: Request, _: Exception) -> Response:
    return error_response(_gone(), _request_id(request))


def _gone() -> RollgridError:
    return RollgridError(ErrorCode.CANCELLED, "the client disconnected", boundary=Boundary.CLIENT)


async def _on_parameters(request: Request, error: Exception) -> Response:
    first: dict[str, Any] = dict(cast("RequestValidationError", error).errors()[0])
    where, *names = (str(part) for part in first["loc"])
    field = ".".join(names) or where
    if where == "path":
        return error_response(_no_route(request), _request_id(request))
    return error_response(invalid(f"{field}: {first['msg']}", field), _request_id(request))


async def _on_http(request: Request, error: Exception) -> Response:
    failure = cast("HTTPException", error)
    if failure.status_code == 404:
        return error_response(_no_route(request), _request_id(request))
    response = error_response(invalid(str(failure.detail)), _request_id(request))
    response.status_code = failure.status_code  # 405: the path is right, the method is not
    response.headers.update(failure.headers or {})
    return response


def _no_route(request: Request) -> RollgridError:
    path = request.url.path[:200]
    return RollgridError(ErrorCode.NOT_FOUND, f"there is nothing at {path}", boundary=Boundary.CLIENT, field="path")


def _request_id(request: Request) -> str | None:
    return cast("dict[str, str]", request.scope.get("state", {})).get("request_id")
