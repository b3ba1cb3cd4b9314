"""`/v1/models`, `/v1/completions`, `/v1/chat/completions`, `/v1/score_tokens`, `/inference/v1/generate`.

The answering functions take a request and give an ASGI response; `app` also calls the busiest ones without FastAPI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp

from .answers import completion_answer, generate_answer, model_card, models_answer, score_answer
from .auth import Scope
from .chat_answers import chat_answer
from .chat_schema import ChatRequest, ChatResponse
from .chunks import ChatChunks, CompletionChunks, GenerateChunks
from .door import Parts, caller_of, interactive, json_response, parts, principal, request_id
from .openai_schema import (
    CompletionRequest,
    CompletionResponse,
    GenerateRequest,
    GenerateResponse,
    ModelCard,
    ModelList,
    ScoreRequest,
    ScoreResponse,
)
from .openapi import described
from .replies import Collected
from .sse import StreamAnswer
from .submission import Caller
from .wire import decode_json

T = TypeVar("T")
router = APIRouter()
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_CHAT = msgspec.json.Decoder(ChatRequest)
_GENERATE = msgspec.json.Decoder(GenerateRequest)
_SCORE = msgspec.json.Decoder(ScoreRequest)


@router.get("/v1/models", **described("List models", answer=ModelList))
async def list_models(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(models_answer(door.catalog.visible(who.tenant), door.started_at))


@router.get("/v1/models/{model:path}", **described("One model", answer=ModelCard))
async def get_model(request: Request, model: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    policy, _ = door.catalog.resolve(who.tenant, model)
    return json_response(model_card(policy, model, door.started_at))


async def _taken(request: Request, decoder: msgspec.json.Decoder[T]) -> tuple[Parts, T, Caller]:
    """The call's body and who makes it, unless the door is draining."""
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    return door, decode_json(body, decoder), caller_of(request, who, body)


async def completions(request: Request) -> ASGIApp:
    door, asked, caller = await _taken(request, _COMPLETION)
    submission = await door.translator.completion(asked, caller)
    renderer = door.catalog.renderer(submission.policy)
    if asked.stream:
        chunks = CompletionChunks(asked, submission, renderer)
        return StreamAnswer(door, request, submission, chunks, renderer, exact=asked.logprobs is not None)
    accepted, collected = await interactive(request, submission)
    return await written(door, collected, partial(completion_answer, asked, submission, accepted, collected, renderer))


async def chat(request: Request) -> ASGIApp:
    door, asked, caller = await _taken(request, _CHAT)
    submission = await door.translator.chat(asked, caller)
    renderer = door.catalog.renderer(submission.policy)
    if asked.stream:
        chunks = ChatChunks(asked, submission, renderer)
        return StreamAnswer(door, request, submission, chunks, renderer, exact=bool(asked.logprobs))
    accepted, collected = await interactive(request, submission)
    return await written(door, collected, partial(chat_answer, asked, submission, accepted, collected, renderer))


async def generate(request: Request) -> ASGIApp:
    door, asked, caller = await _taken(request, _GENERATE)
    submission = await door.translator.generate(asked, caller)
    renderer = door.catalog.renderer(submission.policy)
    if asked.stream:
        chunks = GenerateChunks(asked, submission, request_id(request))
        exact = asked.sampling_params.logprobs is not None
        return StreamAnswer(door, request, submission, chunks, renderer, exact=exact)
    accepted, collected = await interactive(request, submission)
    return json_response(generate_answer(asked, submission, accepted, collected, request_id(request), renderer))


async def score_tokens(request: Request) -> ASGIApp:
    door, asked, caller = await _taken(request, _SCORE)
    submission = await door.translator.score(asked, caller)
    accepted, collected = await interactive(request, submission)
    return json_response(score_answer(bool(asked.top_logprobs), submission, accepted, collected))


async def written(door: Parts, collected: Collected, work: Callable[[], object]) -> Response:
    """The answer as JSON, made beside the event loop where texts must still be detokenised."""
    if any(sample.text is None for sample in collected.everything()):
        return json_response(await door.threads.run(work))
    return json_response(work())


Answering = Callable[[Request], Awaitable[ASGIApp]]
ANSWERS: dict[str, Answering] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat,
    "/v1/score_tokens": score_tokens,
    "/inference/v1/generate": generate,
}
"""The calls that wait, by path; all are POST."""

_DESCRIBED = {
    "/v1/completions": described("Complete prompts", body=CompletionRequest, answer=CompletionResponse, streamed=True),
    "/v1/chat/completions": described("Complete a conversation", body=ChatRequest, answer=ChatResponse, streamed=True),
    "/v1/score_tokens": described("Logprobs of given tokens", body=ScoreRequest, answer=ScoreResponse),
    "/inference/v1/generate": described(
        "Token in, token out", body=GenerateRequest, answer=GenerateResponse, streamed=True
    ),
}
for _path, _answering in ANSWERS.items():
    router.add_api_route(_path, _answering, methods=["POST"], name=_answering.__name__, **_DESCRIBED[_path])
