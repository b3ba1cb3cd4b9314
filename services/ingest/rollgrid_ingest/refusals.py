"""What becomes of a submission that is refused after it was accepted: entries that say why.

The queue door's PubAck is a promise, so a refusal is a record: n failed samples for each task in the
run it named, or, when run and n cannot be read, one in the tenant's run `_rejected`.  The ledger
closes either from a single event (`SamplesFinished` with job_seq 0).
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts import codec, ids, subjects
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.topology import Header
from rollgrid_runtime.bus import Bus, Outgoing
from rollgrid_runtime.errors import RollgridError

from .idempotency import Idempotency, checked_key
from .ledger_client import LedgerClient
from .queued import QueuedRequest
from .settings import Limits
from .submission import Caller
from .terms import RecordFormat, payload
from .wire import decode_body

CATCH_UP_S = 3.0
HEAD_BYTES = 512
MESSAGE_CHARS = 500
METADATA = "rollgrid_submit"
"""Under this name of a refused group's metadata stands what is known of the message."""

NOBODY = "_unknown"
"""Tenant of messages whose subject names none; no tenant can have this name."""


class Outline(NamedTuple):
    """What of a refused body could be read: enough to close its groups."""

    run: str
    sizes: tuple[int, ...]
    metadata: tuple[dict[str, Any], ...] = ()
    policy: str = ""
    record_format: str = ""
    key: str | None = None


def outline_of(request: QueuedRequest, limits: Limits) -> Outline | None:
    """None unless run and n of every task can be read, within the limits."""
    if len(request.body) > limits.max_body_bytes:
        return None
    decoder: Any = msgspec.json.Decoder() if request.form is RecordFormat.JSON else msgspec.msgpack.Decoder()
    try:
        body = decode_body(request.body, decoder, request.form.value)
    except RollgridError:
        return None
    if not isinstance(body, dict):
        return None
    run, tasks = body.get("run"), body.get("tasks")
    if not isinstance(run, str) or not ids.is_label(run) or not isinstance(tasks, list):
        return None
    if not 1 <= len(tasks) <= limits.max_groups or not all(isinstance(task, dict) for task in tasks):
        return None
    sizes = [_size(task.get("n"), body.get("n")) for task in tasks]
    if not all(1 <= size <= limits.max_n for size in sizes) or sum(sizes) > limits.max_samples:
        return None
    wanted, policy, key = (
        body.get("record_format"),
        body.get("policy") or body.get("model"),
        body.get("idempotency_key"),
    )
    return Outline(
        run=run,
        sizes=tuple(sizes),
        metadata=tuple(_metadata(body, task, limits) for task in tasks),
        policy=policy[:63] if isinstance(policy, str) and policy.isprintable() else "",
        record_format=wanted if wanted in tuple(RecordFormat) else request.form.value,
        key=key if isinstance(key, str) else None,
    )


def _size(own: object, shared: object) -> int:
    """The n of one task; 0 when it cannot be read."""
    asked = own if own is not None else shared
    if asked is None:
        return 1
    return asked if isinstance(asked, int) and not isinstance(asked, bool) else 0


def _metadata(body: dict[str, Any], task: dict[str, Any], limits: Limits) -> dict[str, Any]:
    """The caller's own, as far as it can be stored."""
    merged: dict[str, Any] = {}
    for found in (body.get("metadata"), task.get("metadata")):
        if isinstance(found, dict):
            with contextlib.suppress(RollgridError, UnicodeEncodeError):
                codec.encode(payload(found, "metadata", limits))  # half a character cannot be stored
                merged |= found
    return merged


class Refusals:
    """Publishes what closes a refused submission.  Raises only what trying again may cure."""

    def __init__(self, bus: Bus, ledger: LedgerClient, limits: Limits) -> None:
        self._bus, self._ledger, self._limits = bus, ledger, limits
        self._idempotency = Idempotency(bus)

    async def close(self, request: QueuedRequest, error: RollgridError) -> bool:
        """End the submission in its run (True); where that cannot be read, as `reject` (False).

        Groups that the ledger has already are left alone: an earlier delivery was accepted.
        """
        outline = outline_of(request, self._limits)
        if outline is None:
            await self.reject(request, error)
            return False
        key, positions = await self._unknown(request, outline)
        batch = ids.batch_id(request.tenant, outline.run, key)
        events = [
            self._event(
                request,
                error,
                run=outline.run,
                batch_id=batch,
                group_id=ids.group_id(request.tenant, outline.run, key, position),
                n=outline.sizes[position],
                policy=outline.policy,
                record_format=outline.record_format,
                metadata=outline.metadata[position] | {METADATA: {**_origin(request), "position": position}},
            )
            for position in positions
        ]
        await self._publish(events)
        return True

    async def reject(self, request: QueuedRequest, error: RollgridError) -> None:
        """End the message with one entry in the run `_rejected`."""
        tenant, run, key = _tenant(request), ids.REJECTED_RUN, request.place_key
        told = {
            **_origin(request),
            "subject": request.subject,
            "content_type": request.content_type,
            "bytes": len(request.body),
            "sha256": hashlib.sha256(request.body).hexdigest(),
            "head": request.body[:HEAD_BYTES].decode("utf-8", "replace"),
        }
        event = self._event(
            request,
            error,
            run=run,
            batch_id=ids.batch_id(tenant, run, key),
            group_id=ids.group_id(tenant, run, key, 0),
            n=1,
            policy="",
            record_format=request.form.value,
            metadata={METADATA: told},
        )
        await self._publish([event])

    async def _unknown(self, request: QueuedRequest, outline: Outline) -> tuple[str, Sequence[int]]:
        """(key, positions of the groups nobody has).

        The client's own key is claimed as by an accepted body; when it stands for another body, the
        groups under it are not this message's to end, and its place names new ones.
        """
        key = request.place_key
        own = self._client_key(request, outline)
        if own is not None:
            caller = request.caller(own)
            try:
                await self._idempotency.claim(request.tenant, self._record(caller, outline, request.at))
                key = own
            except RollgridError as error:
                if error.code is not ErrorCode.IDEMPOTENCY_CONFLICT:
                    raise
        groups = [ids.group_id(request.tenant, outline.run, key, at) for at in range(len(outline.sizes))]
        known = await self._ledger.caught_up(request.tenant, groups, within_s=CATCH_UP_S)
        return key, [position for position, group in enumerate(groups) if group not in known]

    def _client_key(self, request: QueuedRequest, outline: Outline) -> str | None:
        header = request.headers.get(Header.IDEMPOTENCY_KEY.lower())
        if header is not None and outline.key is not None and header != outline.key:
            return None
        try:
            return checked_key(header if header is not None else outline.key)
        except RollgridError:
            return None

    def _record(self, caller: Caller, outline: Outline, at: float) -> IdempotencyRecord:
        return IdempotencyRecord(
            body_sha256=caller.digest,
            run=outline.run,
            batch_id=ids.batch_id(caller.tenant, outline.run, caller.key),
            key=caller.key,
            groups=len(outline.sizes),
            cursor=0,
            created_at=at,
        )

    def _event(
        self,
        request: QueuedRequest,
        error: RollgridError,
        *,
        run: str,
        batch_id: str,
        group_id: str,
        n: int,
        policy: str,
        record_format: str,
        metadata: dict[str, Any],
    ) -> SamplesFinished:
        info = _shortened(error.info())
        failed = tuple(
            Sample(index=index, status=SampleStatus.FAILED, finish_reason=FinishReason.ERROR, error=info)
            for index in range(n)
        )
        return SamplesFinished(
            tenant=_tenant(request),
            run=run,
            batch_id=batch_id,
            group_id=group_id,
            n=n,
            policy=policy,
            job_seq=0,
            samples=failed,
            scoring=ScoringTask(scorers=(), metadata=metadata),
            traceparent=request.traceparent,
            record_format=record_format,
        )

    async def _publish(self, events: list[SamplesFinished]) -> None:
        if not events:
            return
        items = [
            Outgoing(
                subjects.samples(ScorerKind.DONE, event.tenant),
                event,
                {Header.GROUP.value: event.group_id, Header.BATCH.value: event.batch_id},
            )
            for event in events
        ]
        await self._bus.publish_batch(items)


def _tenant(request: QueuedRequest) -> str:
    return request.tenant if ids.is_name(request.tenant) else NOBODY


def _origin(request: QueuedRequest) -> dict[str, Any]:
    key = request.headers.get(Header.IDEMPOTENCY_KEY.lower())
    return {"sequence": request.sequence, "at": request.at, **({"key": _text(key[:255])} if key is not None else {})}


def _shortened(info: ErrorInfo) -> ErrorInfo:
    """Its texts, which may quote the body, go into every one of n entries."""
    return msgspec.structs.replace(
        info, message=_text(info.message), field=None if info.field is None else _text(info.field)
    )


def _text(text: str) -> str:
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= MESSAGE_CHARS else whole[: MESSAGE_CHARS - 1] + "…"
