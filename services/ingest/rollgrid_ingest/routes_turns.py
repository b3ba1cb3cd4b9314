"""The OpenAI calls of a session: `/s/<session>[~<branch>]/v1/…` and `/s/<session>[~<branch>]/inference/v1/generate`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.episodes import MAIN_BRANCH
from rollgrid_rendering.renderer import Renderer
from starlette.types import ASGIApp

from .answers import completion_answer, generate_answer, model_card, models_answer
from .auth import Scope
from .chat_answers import chat_answer
from .chat_schema import ChatResponse
from .chunks import ChatChunks, CompletionChunks, GenerateChunks
from .door import Parts, caller_of, interactive, json_response, parts, principal, request_id
from .openai_schema import CompletionResponse, GenerateResponse, ModelCard, ModelList
from .openapi import described
from .prompts import Prompt
from .routes_openai import written
from .routes_sessions import episode_of
from .session_episode import Episode
from .session_refusals import no_session
from .sessions_schema import ChatTurnRequest, CompletionTurnRequest, GenerateTurnRequest
from .sse import StreamAnswer
from .submission import Caller, Submission
from .tools import ToolPlan
from .translate_openai import Prompting
from .turn_prompts import Planned
from .turns import TurnCall, check_policy
from .wire import decode_json, unsupported

T = TypeVar("T", ChatTurnRequest, CompletionTurnRequest, GenerateTurnRequest)
router = APIRouter()
_CHAT = msgspec.json.Decoder(ChatTurnRequest)
_COMPLETION = msgspec.json.Decoder(CompletionTurnRequest)
_GENERATE = msgspec.json.Decoder(GenerateTurnRequest)
PlannedBy = Callable[[Episode, str, PolicyState, ToolPlan, dict[str, Any]], Awaitable[Planned]]
Translate = Callable[[T, Caller, Prompting], Awaitable[Submission]]
ONE_AT_A_TIME = "a session samples one turn at a time: POST /v1/sessions/{session}/fork, and sample each branch"


def address_of(name: str) -> tuple[str, str]:
    """`<session>[~<branch>]` taken apart.  Raises not_found."""
    session, tilde, branch = name.partition("~")
    if not ids.is_label(session) or (tilde and not ids.is_label(branch)):
        raise no_session(name)
    return session, branch if tilde else MAIN_BRANCH


async def _taken(
    request: Request, name: str, decoder: msgspec.json.Decoder[T]
) -> tuple[Parts, T, Caller, tuple[str, str]]:
    """The call's body, who makes it, and the session and branch that it is made on."""
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    place = address_of(name)
    asked = decode_json(body, decoder)
    if asked.n not in (None, 1):
        raise unsupported("n", ONE_AT_A_TIME)
    return door, asked, caller_of(request, who, body), place


async def _begun(
    door: Parts, asked: T, caller: Caller, place: tuple[str, str], planned_by: PlannedBy, translate: Translate[T]
) -> tuple[Submission, TurnCall, Renderer]:
    """The turn that is asked for, begun on its session and branch (`place`)."""
    if asked.return_token_ids is None:
        asked.return_token_ids = True
    session, branch = place

    async def plan(episode: Episode, known: Planned | None) -> tuple[Submission, Planned]:
        planned = [] if known is None else [known]
        asked.model = asked.model or episode.terms.model

        async def prompted(policy: PolicyState, tools: ToolPlan, variables: dict[str, Any]) -> Prompt:
            check_policy(episode, policy)
            if not planned:
                planned.append(await planned_by(episode, branch, policy, tools, variables))
            return planned[0].prompt

        return await translate(asked, caller, prompted), planned[0]

    submission, call = await door.turns.prepare(caller, session, branch, plan)
    return submission, call, door.catalog.renderer(submission.policy)


async def chat(request: Request, name: str) -> ASGIApp:
    door, asked, caller, place = await _taken(request, name, _CHAT)

    async def planned(
        episode: Episode, branch: str, policy: PolicyState, tools: ToolPlan, variables: dict[str, Any]
    ) -> Planned:
        renderer = door.catalog.renderer(policy)
        return await door.turn_prompts.of_chat(asked, episode, branch, policy, tools, variables, renderer)

    submission, call, renderer = await _begun(door, asked, caller, place, planned, door.translator.chat)
    if asked.stream:
        chunks = ChatChunks(asked, submission, renderer)
        exact = bool(asked.logprobs)
        return StreamAnswer(door, request, submission, chunks, renderer, exact=exact, asked=call)
    accepted, collected = await interactive(request, submission, call)
    return await written(door, collected, partial(chat_answer, asked, submission, accepted, collected, renderer))


async def completions(request: Request, name: str) -> ASGIApp:
    door, asked, caller, place = await _taken(request, name, _COMPLETION)

    async def planned(episode: Episode, branch: str, policy: PolicyState, *_: object) -> Planned:
        renderer = door.catalog.renderer(policy)
        return await door.turn_prompts.of_completion(asked, episode, branch, policy, renderer)

    submission, call, renderer = await _begun(door, asked, caller, place, planned, door.translator.completion)
    if asked.stream:
        chunks = CompletionChunks(asked, submission, renderer)
        exact = asked.logprobs is not None
        return StreamAnswer(door, request, submission, chunks, renderer, exact=exact, asked=call)
    accepted, collected = await interactive(request, submission, call)
    return await written(door, collected, partial(completion_answer, asked, submission, accepted, collected, renderer))


async def generate(request: Request, name: str) -> ASGIApp:
    door, asked, caller, place = await _taken(request, name, _GENERATE)
    if asked.sampling_params.n not in (None, 1):
        raise unsupported("sampling_params.n", ONE_AT_A_TIME)

    async def planned(episode: Episode, branch: str, policy: PolicyState, *_: object) -> Planned:
        return await door.turn_prompts.of_generate(asked, episode, branch, policy)

    submission, call, renderer = await _begun(door, asked, caller, place, planned, door.translator.generate)
    if asked.stream:
        chunks = GenerateChunks(asked, submission, request_id(request))
        exact = asked.sampling_params.logprobs is not None
        return StreamAnswer(door, request, submission, chunks, renderer, exact=exact, asked=call)
    accepted, collected = await interactive(request, submission, call)
    return json_response(generate_answer(asked, submission, accepted, collected, request_id(request), renderer))


@router.get("/s/{name}/v1/models", **described("Models, from a session's base URL", answer=ModelList))
async def list_models(request: Request, name: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    await episode_of(door, who, address_of(name)[0])
    return json_response(models_answer(door.catalog.visible(who.tenant), door.started_at))


@router.get("/s/{name}/v1/models/{model:path}", **described("One model, from a session's base URL", answer=ModelCard))
async def get_model(request: Request, name: str, model: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    await episode_of(door, who, address_of(name)[0])
    policy, _ = door.catalog.resolve(who.tenant, model)
    return json_response(model_card(policy, model, door.started_at))


Turning = Callable[[Request, str], Awaitable[ASGIApp]]
TURNS: dict[str, tuple[Turning, dict[str, Any]]] = {
    "/v1/chat/completions": (
        chat,
        described("A turn of a session: a conversation", body=ChatTurnRequest, answer=ChatResponse, streamed=True),
    ),
    "/v1/completions": (
        completions,
        described(
            "A turn of a session: a prompt", body=CompletionTurnRequest, answer=CompletionResponse, streamed=True
        ),
    ),
    "/inference/v1/generate": (
        generate,
        described("A turn of a session: token ids", body=GenerateTurnRequest, answer=GenerateResponse, streamed=True),
    ),
}
"""The calls that wait, by path below `/s/<name>`; all are POST."""
PREFIX = "/s/{name}"
for _path, (_turning, _described) in TURNS.items():
    router.add_api_route(PREFIX + _path, _turning, methods=["POST"], name=f"turn_{_turning.__name__}", **_described)


def turning(path: str) -> tuple[str, Turning, str] | None:
    """The session's name, who answers, and the route's template; None for every other path.

    `inference/v1/generate` is also found below the base URL of OpenAI clients.
    """
    if not path.startswith("/s/"):
        return None
    name, slash, rest = path[3:].partition("/")
    below = slash + rest
    if below == "/v1/inference/v1/generate":
        below = below.removeprefix("/v1")
    found = TURNS.get(below)
    return None if found is None else (name, found[0], PREFIX + below)
