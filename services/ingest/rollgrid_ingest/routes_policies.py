"""Policies, the publication of their versions, and the fleet."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response
from rollgrid_contracts.checkpoints import CheckpointKind, PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Versioned

from .auth import Principal, Scope
from .catalog import SHARED
from .door import Parts, json_response, parts, principal
from .openapi import described
from .rollout_schema import FleetAnswer, PolicyAnswer, PolicyList
from .version_schema import (
    BeginRequest,
    CommitAnswer,
    CommitRequest,
    FileAnswer,
    RollbackRequest,
    ShardAnswer,
    ShardRequest,
    UploadAnswer,
    VersionAnswer,
    VersionList,
)
from .wire import decode_json

router = APIRouter()
_BEGIN = msgspec.json.Decoder(BeginRequest)
_SHARD = msgspec.json.Decoder(ShardRequest)
_COMMIT = msgspec.json.Decoder(CommitRequest)
_ROLLBACK = msgspec.json.Decoder(RollbackRequest)


@router.get("/v1/policies", **described("List policies", answer=PolicyList))
async def list_policies(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    found = [await door.fleet.policy_answer(entry, who.tenant) for entry in door.catalog.visible(who.tenant)]
    return json_response(PolicyList(object="list", data=found))


@router.get("/v1/policies/{policy}", **described("One policy, and what its workers run", answer=PolicyAnswer))
async def get_policy(request: Request, policy: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(await door.fleet.policy_answer(_policy(door, who, policy), who.tenant))


@router.get("/v1/policies/{policy}/versions", **described("The versions that are kept", answer=VersionList))
async def list_versions(request: Request, policy: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(door.versions.listed(_policy(door, who, policy).value))


@router.get(
    "/v1/policies/{policy}/versions/{version}",
    **described("Where a published version stands, and why it was refused", answer=VersionAnswer),
)
async def get_version(request: Request, policy: str, version: int) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(await door.versions.status(_policy(door, who, policy).value, version))


@router.post(
    "/v1/policies/{policy}/rollback",
    **described("Go back to a version that was adopted before", body=RollbackRequest, answer=PolicyAnswer),
)
async def roll_back(request: Request, policy: str) -> Response:
    door, who, state = _publishing(request, policy)
    asked = decode_json(await request.body(), _ROLLBACK)
    entry = await door.versions.roll_back(state, asked.version)
    return json_response(await door.fleet.policy_answer(entry, who.tenant))


@router.post(
    "/v1/policies/{policy}/uploads",
    **described("Begin a publication", body=BeginRequest, answer=UploadAnswer, optional_body=True),
)
async def begin(request: Request, policy: str) -> Response:
    door, _, state = _publishing(request, policy)
    body = await request.body()
    asked = decode_json(body, _BEGIN) if body.strip() else BeginRequest()
    if asked.kind == CheckpointKind.LORA:
        await door.fleet.check_takes_adapters(state)
    return json_response(await door.uploads.begin(await door.versions.current(state), asked))


@router.put("/v1/policies/{policy}/uploads/{upload}/files/{name}", **described("Upload one file", answer=FileAnswer))
async def put_file(request: Request, policy: str, upload: str, name: str) -> Response:
    door, _, state = _publishing(request, policy)
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdigit() and len(declared) < 20 else None
    found = await door.uploads.find(state, upload)
    return json_response(await door.uploads.put(found, name, request.stream(), size))


@router.post(
    "/v1/policies/{policy}/uploads/{upload}/shards",
    **described("One rank has uploaded its files", body=ShardRequest, answer=ShardAnswer),
)
async def finish_shard(request: Request, policy: str, upload: str) -> Response:
    door, _, state = _publishing(request, policy)
    asked = decode_json(await request.body(), _SHARD)
    return json_response(await door.uploads.finish(await door.uploads.find(state, upload), asked))


@router.post(
    "/v1/policies/{policy}/uploads/{upload}/commit",
    **described("Publish what all ranks have uploaded", body=CommitRequest, answer=CommitAnswer, optional_body=True),
)
async def commit(request: Request, policy: str, upload: str) -> Response:
    door, _, state = _publishing(request, policy)
    body = await request.body()
    asked = decode_json(body, _COMMIT) if body.strip() else CommitRequest()
    return json_response(await door.commits.commit(await door.versions.current(state), upload, asked))


@router.get("/v1/fleet", **described("Workers, policies, queues (admin)", answer=FleetAnswer))
async def fleet(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.ADMIN)
    answer = FleetAnswer(
        workers=await door.fleet.workers(),
        policies=[await door.fleet.policy_answer(entry, who.tenant) for entry in door.catalog.visible(who.tenant)],
        queues=await door.fleet.queues(),
        ledger=await door.fleet.ledger(),
    )
    return json_response(answer)


def _policy(door: Parts, who: Principal, name: str) -> Versioned[PolicyState]:
    entry = door.catalog.policy(who.tenant, name)
    if entry is None:
        raise RollgridError(
            ErrorCode.MODEL_NOT_FOUND, f"no policy {name[:80]!r}", boundary=Boundary.CLIENT, field="policy"
        )
    return entry


def _publishing(request: Request, name: str) -> tuple[Parts, Principal, PolicyState]:
    """The policy whose versions the caller may publish; a shared one touches every tenant, so it takes an admin."""
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    state = _policy(door, who, name).value
    if state.tenant == SHARED:
        who.require(Scope.ADMIN)
    return door, who, state
