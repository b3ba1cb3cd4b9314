"""`/v1/rollouts`, their results, groups, and the trajectories of runs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request, Response
from rollgrid_contracts import codec, ids
from rollgrid_contracts.fleet import GroupStatus
from starlette.responses import StreamingResponse

from .auth import Scope
from .door import Parts, caller_of, json_response, msgpack_response, parts, principal
from .idempotency import with_body_key
from .openapi import described
from .results import ReadScope, ResultPage, not_found
from .rewards_schema import GroupAnswer
from .rollout_schema import (
    AcceptedAnswer,
    CancelAnswer,
    CancelRequest,
    OpenGroupAnswer,
    PageAnswer,
    PageItem,
    ProgressAnswer,
    RawPageAnswer,
    RawPageItem,
    RolloutRequest,
)
from .wire import INT64, decode_json, invalid

router = APIRouter()
_ROLLOUT = msgspec.json.Decoder(RolloutRequest)
_CANCEL = msgspec.json.Decoder(CancelRequest)
EVENTS = "text/event-stream"
PAGE = 64

Cursor = Annotated[int | None, Query(ge=0, lt=INT64, description="read behind this cursor")]
Limit = Annotated[int, Query(ge=1, description="records of one page")]
Wait = Annotated[float, Query(ge=0, allow_inf_nan=False, description="hold an empty page back for so many seconds")]
RunHint = Annotated[str | None, Query(description="the batch's run, if known: then only the stream is asked")]


@router.post("/v1/rollouts", **described("Submit a batch", body=RolloutRequest, answer=AcceptedAnswer, status=202))
async def submit(request: Request) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    door.refuse_while_draining()
    body = await request.body()
    asked, caller = decode_json(body, _ROLLOUT), caller_of(request, who, body)
    caller = with_body_key(caller, asked.idempotency_key, request.url.path, body)
    submission = await door.translator.rollout(asked, caller)
    accepted = await door.handler.submit(submission)
    answer = AcceptedAnswer(
        batch_id=accepted.batch_id,
        run=accepted.run,
        policy=submission.policy.policy,
        cursor=accepted.cursor,
        group_ids=list(accepted.group_ids),
        n=submission.samples,
        deadline=accepted.deadline,
    )
    return json_response(answer, 202)


@router.get("/v1/rollouts/{batch_id}", **described("Progress of a batch", answer=ProgressAnswer))
async def progress(request: Request, batch_id: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    return json_response(await _progress(door, who.tenant, batch_id))


async def _progress(door: Parts, tenant: str, batch_id: str) -> ProgressAnswer:
    known = door.handler.known(tenant, batch_id)
    status = await door.ledger.batch(tenant, batch_id, known=known is not None)
    if status is None:
        if known is None:
            raise not_found("batch", batch_id)
        # accepted here, and the ledger has not come to it yet
        return _progress_answer(batch_id, known.run, known.groups, 0, known.samples, 0, {}, known.cursor)
    groups = max(status.groups, known.groups if known else 0)
    samples = max(status.samples, known.samples if known else 0)
    counts = {name.value: count for name, count in status.counts.items() if count}
    return _progress_answer(
        batch_id, status.run, groups, status.closed, samples, status.finished, counts, status.last_closed_seq
    )


def _progress_answer(
    batch_id: str,
    run: str,
    groups: int,
    closed: int,
    samples: int,
    finished: int,
    counts: dict[str, int],
    cursor: int,
) -> ProgressAnswer:
    done = closed >= groups
    return ProgressAnswer(
        batch_id=batch_id,
        run=run,
        status="done" if done else "running",
        groups=groups,
        closed=closed,
        samples=samples,
        finished=finished,
        counts=counts,
        done=done,
        cursor=cursor,
    )


@router.delete("/v1/rollouts/{batch_id}", **described("Cancel a batch", answer=CancelAnswer, status=202))
@router.post(
    "/v1/rollouts/{batch_id}/cancel",
    **described("Cancel a batch", body=CancelRequest, answer=CancelAnswer, status=202, optional_body=True),
)
async def cancel(request: Request, batch_id: str) -> Response:
    door, who = parts(request), principal(request, Scope.SUBMIT)
    body = await request.body()
    asked = decode_json(body, _CANCEL) if body.strip() else CancelRequest()
    known = door.handler.known(who.tenant, batch_id)
    run = known.run if known is not None else None
    if run is None:
        status = await door.ledger.batch(who.tenant, batch_id)
        if status is None:
            raise not_found("batch", batch_id)
        run = status.run
    groups = asked.group_ids or []
    if len(groups) > door.settings.max_groups or not all(len(group) <= 64 for group in groups):
        raise invalid(
            "group_ids names no groups of a batch", "group_ids", limit=f"max_groups={door.settings.max_groups}"
        )
    reason = (asked.reason or "cancelled by the caller")[:200]
    await door.handler.cancel(who.tenant, run, batch_id, groups, reason)
    return json_response(CancelAnswer(batch_id=batch_id, status="cancelling"), 202)


@router.get("/v1/rollouts/{batch_id}/groups", **described("Closed groups of a batch (as /results)", answer=PageAnswer))
@router.get("/v1/rollouts/{batch_id}/results", **described("Closed groups of a batch", answer=PageAnswer, events=True))
async def batch_results(
    request: Request, batch_id: str, cursor: Cursor = None, limit: Limit = PAGE, wait_s: Wait = 0.0, run: RunHint = None
) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    if run is not None and not ids.is_label(run):
        raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)
    scope, start = await door.results.scope_of_batch(who.tenant, batch_id, run)
    return await _read(request, scope, start, cursor, limit, wait_s)


@router.get("/v1/runs/{run}/trajectories", **described("Closed groups of a run", answer=PageAnswer, events=True))
async def run_trajectories(
    request: Request, run: str, cursor: Cursor = None, limit: Limit = PAGE, wait_s: Wait = 0.0
) -> Response:
    who = principal(request, Scope.READ)
    if not ids.is_label(run) and run != ids.REJECTED_RUN:
        raise invalid("run is not a usable name", "run", limit=ids.LABEL_PATTERN)
    return await _read(request, ReadScope(who.tenant, run), 0, cursor, limit, wait_s)


async def _read(
    request: Request, scope: ReadScope, start: int, cursor: int | None, limit: int, wait_s: float
) -> Response:
    door = parts(request)
    limit = min(limit, door.settings.max_page)
    accept = request.headers.get("accept", "")
    if EVENTS in accept:
        last = request.headers.get("last-event-id")
        if last is not None:
            if not (last.isascii() and last.isdigit() and len(last) < 19):
                raise invalid("Last-Event-ID is not a cursor of this stream", "Last-Event-ID")
            cursor = int(last)
        door.readers.check(scope.tenant)
        events = _events(request, scope, start if cursor is None else cursor, limit)
        return StreamingResponse(
            events, media_type=EVENTS, headers={"cache-control": "no-store", "x-accel-buffering": "no"}
        )
    wait_s = min(wait_s, door.settings.max_wait_s)
    with door.readers.holding(scope.tenant) if wait_s > 0 else contextlib.nullcontext():
        page = await door.results.page(scope, start if cursor is None else cursor, limit, wait_s)
    stale = [door.freshness.consumed(scope.tenant, record) for record in page.records]
    return _page_response(page, stale, codec.MSGPACK in accept)


def _page_response(page: ResultPage, stale: list[int | None], packed: bool) -> Response:
    """`stale`: the staleness of each group of the page."""
    records = list(zip(page.records, stale, strict=True))
    if packed:
        raw = [RawPageItem(cursor=r.cursor, group=msgspec.Raw(r.msgpack), staleness=behind) for r, behind in records]
        return msgpack_response(RawPageAnswer(groups=raw, cursor=page.cursor, done=page.done))
    items = [PageItem(cursor=record.cursor, group=record.group, staleness=behind) for record, behind in records]
    return json_response(PageAnswer(groups=items, cursor=page.cursor, done=page.done))


async def _events(request: Request, scope: ReadScope, cursor: int, limit: int) -> AsyncIterator[bytes]:
    """`group` events with their cursor as id; a comment in silence; `end` when the batch has no more to come."""
    door = parts(request)
    with door.readers.holding(scope.tenant):
        yield b": rollgrid trajectories\n\n"
        async for page in door.results.follow(scope, cursor, limit, door.settings.keep_alive_s):
            for record in page.records:
                door.freshness.consumed(scope.tenant, record)
                data = codec.encode(record.group, codec.JSON)
                yield b"event: group\nid: %d\ndata: %b\n\n" % (record.cursor, data)
            if page.done:
                yield b'event: end\nid: %d\ndata: {"cursor":%d}\n\n' % (page.cursor, page.cursor)
            elif not page.records:
                yield b": keep-alive\n\n"
            if await request.is_disconnected():
                return


@router.get("/v1/groups/{group_id}", **described("One group", answer=GroupAnswer))
async def get_group(request: Request, group_id: str) -> Response:
    door, who = parts(request), principal(request, Scope.READ)
    status: GroupStatus | None = None
    if len(group_id) <= 64:
        status = (await door.ledger.groups(who.tenant, [group_id])).get(group_id)
    if status is None:
        raise not_found("group", group_id)
    if status.closed_seq == 0:
        answer = OpenGroupAnswer(
            group_id=group_id,
            batch_id=status.batch_id,
            run=status.run,
            status="open",
            n=status.n,
            done=sorted({*status.done, *status.ended}),
        )
        return json_response(answer, 202)
    record = await door.results.at(who.tenant, status.run, status.closed_seq)
    if record is None or record.tenant != who.tenant or record.group_id != group_id:
        raise not_found("group", group_id)
    posted = await door.posts.standing(who.tenant, status.run, group_id, status.closed_seq)
    behind = door.freshness.of(who.tenant, record)
    return json_response(GroupAnswer(cursor=status.closed_seq, group=record, staleness=behind, posted_rewards=posted))
