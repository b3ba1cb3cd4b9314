"""A session's own events, read from its subject of RG_SAMPLES: one direct read, right on every replica."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened
from rollgrid_contracts.samples import GroupsCancelled, SamplesFinished
from rollgrid_contracts.scoring import SamplesScored
from rollgrid_contracts.topology import SAMPLES
from rollgrid_episodes.tree import SessionEvent
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import PayloadGone
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import Stored, read_after

log = get_logger(__name__)

PAGE = 256
READ_S = 5.0
_Known = SessionOpened | SamplesFinished | SessionForked | SessionEnded | SamplesScored | GroupsCancelled


class Recorded(NamedTuple):
    """An event of a session: its RG_SAMPLES sequence, and when it was stored (UNIX seconds)."""

    seq: int
    event: SessionEvent
    stored_at: float


async def events_behind(bus: Bus, tenant: str, session: str, after: int, limit: int | None = None) -> list[Recorded]:
    """What the stream has of a session behind `after`, in order (the first `limit`, if given).

    Verdicts and whatever nobody can read any more are left out.  Raises BusError, StorageError.
    """
    subject = subjects.samples_of(tenant, session)
    found: list[Recorded] = []
    while True:
        page = await read_after(bus, SAMPLES.name, subject, after, limit or PAGE, timeout_s=READ_S)
        for stored in page.messages:
            after = stored.sequence
            event = await _event_of(bus, stored)
            if event is not None:
                found.append(Recorded(stored.sequence, event, _stored_at(stored)))
        if page.pending == 0 or not page.messages or (limit is not None and len(found) >= limit):
            return found


async def event_at(bus: Bus, seq: int) -> SessionEvent | None:
    """The whole event at an RG_SAMPLES sequence, nothing left out; None when it is gone.  Raises as `events_behind`."""
    stored = await bus.stored(SAMPLES.name, seq)
    if stored is None or stored.data is None:
        return None
    return await _decoded(bus, seq, stored.data, stored.headers or {})


async def _event_of(bus: Bus, stored: Stored) -> SessionEvent | None:
    event = await _decoded(bus, stored.sequence, stored.data, stored.headers)
    return None if event is None else lean(event)


async def _decoded(bus: Bus, seq: int, data: bytes, headers: dict[str, str]) -> SessionEvent | None:
    try:
        event: _Known = await bus.decoded(data, headers, _Known)  # type: ignore[arg-type]
    except (PayloadGone, msgspec.DecodeError, RecursionError) as error:
        log.warning("session_event_unreadable", seq=seq, error=str(error))
        return None
    return None if isinstance(event, SamplesScored | GroupsCancelled) else event


def lean(event: SessionEvent) -> SessionEvent:
    """Without what no later turn is built from: alternatives and prompt logprobs stay in the stream and the record."""
    if not isinstance(event, SamplesFinished):
        return event
    samples = tuple(
        msgspec.structs.replace(sample, top_logprobs=None, prompt_logprobs=None) for sample in event.samples
    )
    return msgspec.structs.replace(event, samples=samples)


def _stored_at(stored: Stored) -> float:
    stamp = stored.headers.get("Nats-Time-Stamp")
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0
