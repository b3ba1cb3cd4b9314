"""A client's idempotency key names one request: the first body claims it, another body is refused."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.topology import IDEMPOTENCY
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, Conflict, RollgridError
from rollgrid_runtime.kv import Table

from .submission import Caller
from .wire import invalid

MAX_KEY_CHARS = 255


def body_digest(route: str, body: bytes) -> str:
    return hashlib.sha256(route.encode() + b"\n" + body).hexdigest()


def checked_key(value: str | None, field: str = "Idempotency-Key") -> str | None:
    """The Idempotency-Key header: printable ASCII, or absent."""
    if value is None:
        return None
    if not value or len(value) > MAX_KEY_CHARS or not value.isascii() or not value.isprintable():
        limit = f"1-{MAX_KEY_CHARS} printable ASCII characters"
        raise invalid(f"{field} is not usable", field, limit=limit)
    return value


def with_body_key(caller: Caller, key: str | None, route: str, body: bytes) -> Caller:
    """`caller` under the key that the body names, for clients that send no header."""
    if key is None:
        return caller
    if caller.idempotent and caller.key != key:
        raise invalid("idempotency_key and the header Idempotency-Key differ", "idempotency_key")
    named = checked_key(key, "idempotency_key") or ""
    return msgspec.structs.replace(caller, key=named, idempotent=True, digest=body_digest(route, body))


class Claim(NamedTuple):
    """`fresh` when this request is the key's first; `revision` is that of the record."""

    record: IdempotencyRecord
    fresh: bool
    revision: int


class Idempotency:
    def __init__(self, bus: Bus) -> None:
        self._table: Table[IdempotencyRecord] = Table(bus, IDEMPOTENCY, IdempotencyRecord)

    async def claim(self, tenant: str, record: IdempotencyRecord) -> Claim:
        """Claim `record.key` for its body.

        Raises idempotency_conflict when the key stands for another body, BusError without an answer.
        """
        key = ids.idempotency_key(tenant, record.key)
        try:
            return Claim(record, True, await self._table.create(key, record))
        except Conflict:
            pass
        existing = await self._table.get(key)
        if existing is None:  # expired between the two calls
            raise BusError("the idempotency record vanished while it was read")
        if existing.value.body_sha256 != record.body_sha256 or existing.value.run != record.run:
            raise RollgridError(
                ErrorCode.IDEMPOTENCY_CONFLICT,
                "this Idempotency-Key was used with another body",
                boundary=Boundary.CLIENT,
                field="Idempotency-Key",
            )
        return Claim(existing.value, False, existing.revision)

    async def probe(self, instance: str) -> None:
        """A real durable write and read.  Raises BusError."""
        record = IdempotencyRecord(
            body_sha256="", run="", batch_id="", key=instance, groups=0, cursor=0, created_at=0.0
        )
        key = ids.idempotency_key("probe", instance)
        await self._table.put(key, record)
        if await self._table.get(key) is None:
            raise BusError("the probe was not read back")
