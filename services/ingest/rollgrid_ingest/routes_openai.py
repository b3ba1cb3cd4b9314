"""`/v1/models`, `/v1/completions`, `/inference/v1/generate`."""

from __future__ import annotations

from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from .answers import completion_answer, generate_answer, models_answer
from .auth import Scope
from .door import caller_of, interactive, json_response, parts, principal, request_id
from .openai_schema import (
    CompletionRequest,
    CompletionResponse,
    GenerateRequest,
    GenerateResponse,
    ModelCard,
    ModelList,
)
from .openapi import described
from .results import not_found
from .wire import decode_json

router = APIRouter()
_COMPLETION = msgspec.json.Decoder(CompletionRequest)
_GENERATE = msgspec.json.Decoder(GenerateRequest)


@router.get("/v1/models", **described("List models", answer=ModelList))
async def list_models(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(models_answer(door.catalog.visible(who.tenant), door.started_at))


@router.get("/v1/models/{model:path}", **described("One model", answer=ModelCard))
async def get_model(request: Request, model: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    cards = models_answer(door.catalog.visible(who.tenant), door.started_at).data
    for card in cards:
        if card.id == model:
            return json_response(card)
    raise not_found("model", model)


@router.post("/v1/completions", **described("Complete prompts", body=CompletionRequest, answer=CompletionResponse))
async def completions(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked = decode_json(body, _COMPLETION)
    submission = await door.translator.completion(asked, caller_of(request, who, body))
    renderer = door.catalog.renderer(submission.policy)
    accepted, collected = await interactive(request, submission)
    work = partial(completion_answer, asked, submission, accepted, collected, renderer)
    if any(sample.text is None for sample in collected.everything()):  # a text-free engine: detokenise here
        return json_response(await door.threads.run(work))
    return json_response(work())


@router.post(
    "/inference/v1/generate", **described("Token in, token out", body=GenerateRequest, answer=GenerateResponse)
)
async def generate(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked = decode_json(body, _GENERATE)
    submission = await door.translator.generate(asked, caller_of(request, who, body))
    accepted, collected = await interactive(request, submission)
    return json_response(generate_answer(asked, submission, accepted, collected, request_id(request)))
