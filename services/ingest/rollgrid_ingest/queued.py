"""A message of RG_SUBMIT as a request: who sent it, in which form, under which key.

The tenant comes from the subject.  A message without a key of its own is named by its place in the
stream, so that a redelivery names the same groups: by sequence and time together, because a stream
that is made anew counts from 1 again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime

import msgspec
from rollgrid_contracts import codec, subjects
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.topology import Header

from .idempotency import body_digest, checked_key, with_body_key
from .rollout_schema import RolloutRequest
from .submission import Caller
from .terms import RecordFormat
from .wire import decode_body, invalid

ROUTE = "/v1/rollouts"
"""The same request through either door has one digest, so one key may be sent to both."""

FORMATS = {codec.JSON: RecordFormat.JSON, codec.MSGPACK: RecordFormat.MSGPACK, "application/x-msgpack": RecordFormat.MSGPACK}  # fmt: skip
_DECODERS: dict[RecordFormat, msgspec.json.Decoder[RolloutRequest] | msgspec.msgpack.Decoder[RolloutRequest]] = {
    RecordFormat.JSON: msgspec.json.Decoder(RolloutRequest),
    RecordFormat.MSGPACK: msgspec.msgpack.Decoder(RolloutRequest),
}
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class QueuedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`place_key` names the message by its place; no client can send such a key (it is not printable)."""

    subject: str
    sequence: int
    stored_ns: int
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, subject: str, sequence: int, stored_ns: int, headers: Mapping[str, str], body: bytes) -> QueuedRequest:
        named = {str(name).lower(): str(value).strip() for name, value in headers.items()}
        return cls(subject=subject, sequence=sequence, stored_ns=stored_ns, headers=named, body=body)

    @property
    def tenant(self) -> str:
        return subjects.tenant_of_submit(self.subject)

    @property
    def at(self) -> float:
        """When the message was stored (UNIX seconds): deadlines count from then."""
        return self.stored_ns / 1e9

    @property
    def place_key(self) -> str:
        return f"\x1esubmit\x1e{self.sequence}\x1e{self.stored_ns}"

    @property
    def content_type(self) -> str:
        return self.headers.get(Header.CONTENT_TYPE.lower(), "").partition(";")[0].strip().lower()

    @property
    def traceparent(self) -> str | None:
        value = self.headers.get(Header.TRACEPARENT.lower(), "")
        return value if _TRACEPARENT.fullmatch(value) else None

    @property
    def form(self) -> RecordFormat:
        """By the header, else by the first byte: a map in msgpack, anything else counts as JSON."""
        named = FORMATS.get(self.content_type)
        return named if named is not None else _sniffed(self.body)

    def read(self, max_body_bytes: int) -> tuple[RolloutRequest, Caller]:
        """Raises RollgridError naming what is wrong with it."""
        if self.content_type and self.content_type not in FORMATS:
            raise invalid(
                f"Content-Type {self.content_type[:80]!r} is not offered",
                "Content-Type",
                code=ErrorCode.UNSUPPORTED,
                limit=", ".join(FORMATS),
            )
        if len(self.body) > max_body_bytes:
            raise invalid(
                f"the body has {len(self.body)} bytes",
                code=ErrorCode.PAYLOAD_TOO_LARGE,
                limit=f"max_body_bytes={max_body_bytes}",
            )
        key = checked_key(self.headers.get(Header.IDEMPOTENCY_KEY.lower()))
        request = decode_body(self.body, _DECODERS[self.form], self.form.value)
        return request, with_body_key(self.caller(key), request.idempotency_key, ROUTE, self.body)

    def caller(self, key: str | None) -> Caller:
        return Caller(
            tenant=self.tenant,
            key=self.place_key if key is None else key,
            idempotent=key is not None,
            queued=True,
            digest="" if key is None else body_digest(ROUTE, self.body),
            traceparent=self.traceparent,
            record_format=self.form.value,
        )


def _sniffed(body: bytes) -> RecordFormat:
    first = body[0] if body else 0
    return RecordFormat.MSGPACK if 0x80 <= first <= 0x8F or first in (0xDE, 0xDF) else RecordFormat.JSON


def nanoseconds(stamp: str) -> int:
    """UNIX nanoseconds of a time as the server writes it (RFC 3339, UTC, up to nine digits of a second)."""
    seconds, _, fraction = stamp.removesuffix("Z").partition(".")
    whole = datetime.fromisoformat(seconds).replace(tzinfo=UTC)
    return int(whole.timestamp()) * 1_000_000_000 + int(fraction.ljust(9, "0")[:9] or "0")
