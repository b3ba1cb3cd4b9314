"""The HTTP application: routes, error handlers, the door around them."""

from __future__ import annotations

from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.health import readiness
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from . import openapi, routes_openai, routes_policies, routes_rollouts
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
    for router in (routes_openai.router, routes_rollouts.router, routes_policies.router):
        app.include_router(router)
    _add_health(app, parts)
    return Door(app, parts.settings, parts.keys)


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
    gone = RollgridError(ErrorCode.CANCELLED, "the client disconnected", boundary=Boundary.CLIENT)
    return error_response(gone, _request_id(request))


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
