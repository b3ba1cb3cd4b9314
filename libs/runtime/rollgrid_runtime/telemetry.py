"""Spans that follow one sample through all services: begun, joined by `traceparent`, ended.

Off (no exporter configured, or a request that is not sampled) every call here costs well under a
microsecond: nothing of OpenTelemetry is imported and a context that came from outside is only passed
on.  A context travels in the message header `traceparent` and in the structs' field of that name.
Only ingest begins traces; everybody else continues one or does nothing.

Attributes are ids and sizes.  Prompts, texts and keys never become one.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from .tracing import Recorder

Value = str | int | float | bool

MAX_SAMPLE_SPANS = 32
"""Samples of one job that get spans of their own; the job's span counts them all."""
MAX_TRACED_GROUPS = 16
"""Groups of one request that are traced: a batch of ten thousand is not ten thousand traces."""

MAX_TEXT_CHARS = 200
NAMES = {
    "tenant": "rollgrid.tenant",
    "run": "rollgrid.run",
    "batch": "rollgrid.batch_id",
    "group": "rollgrid.group_id",
    "request_id": "rollgrid.request_id",
    "stream": "messaging.destination.name",
    "messages": "messaging.batch.message_count",
    "bytes": "messaging.message.body.size",
    "method": "http.request.method",
    "route": "http.route",
    "http_status": "http.response.status_code",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "tokens": "gen_ai.usage.output_tokens",
    "finish_reason": "gen_ai.response.finish_reason",
}
"""OpenTelemetry's semantic conventions where they have a name; the rest is `rollgrid.<name>`."""

_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_ODD = frozenset("13579bdf")
_recorder: Recorder | None = None
_ratio = 0.0


class Span:
    """One step of a trace.  `traceparent` is the context that its children and messages carry.

    As a context manager it is `current` inside, fails by what is raised, and ends.
    """

    __slots__ = ("_token", "traceparent")

    def __init__(self, traceparent: str | None) -> None:
        self.traceparent = traceparent

    @property
    def recorded(self) -> bool:
        return False

    def rename(self, name: str) -> None: ...

    def set(self, **attributes: Value | None) -> None: ...

    def event(self, name: str, at: float, **attributes: Value | None) -> None: ...

    def fail(self, why: str) -> None: ...

    def end(self, at: float | None = None) -> None: ...

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _CURRENT.reset(self._token)
        if error is not None:
            self.fail(str(getattr(error, "code", type(error).__name__)))
        self.end()


class _Off(Span):
    """The one span of everything that is not traced: many tasks are inside it at once, so it keeps nothing."""

    __slots__ = ()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


OFF: Span = _Off(None)
_CURRENT: ContextVar[Span] = ContextVar("rollgrid_span", default=OFF)


def enable(recorder: Recorder, ratio: float) -> None:
    """Record from now on; `ratio` of the requests that bring no context begin a trace."""
    global _recorder, _ratio
    _recorder, _ratio = recorder, ratio


def disable() -> Recorder | None:
    """Record no more; what recorded until now, for its owner to flush."""
    global _recorder, _ratio
    recorder, _recorder, _ratio = _recorder, None, 0.0
    return recorder


def valid(traceparent: str | None) -> str | None:
    """The header of a caller, if it is one."""
    return traceparent if traceparent is not None and _TRACEPARENT.fullmatch(traceparent) else None


def sampled(traceparent: str | None) -> bool:
    """Whether spans below this context are recorded here."""
    return _recorder is not None and traceparent is not None and traceparent[-1:] in _ODD


def unsampled(traceparent: str | None) -> str | None:
    """The same context for something that is not recorded."""
    return traceparent[:-2] + "00" if traceparent is not None else None


def current() -> Span:
    return _CURRENT.get()


def root(
    name: str, caller: str | None, *, kind: str = "server", at: float | None = None, **attributes: Value | None
) -> Span:
    """The first span of a request: below the caller's own context, else a new trace for some of them."""
    if caller is not None:
        return _start(name, caller, kind, attributes, at)
    if _recorder is None or random.random() >= _ratio:
        return OFF
    return _recorder.start(name, None, kind, attributes, at)


def start(
    name: str,
    parent: str | None,
    *,
    kind: str = "internal",
    at: float | None = None,
    span_id: int | None = None,
    links: Sequence[str] = (),
    **attributes: Value | None,
) -> Span:
    """A span below `parent`, begun `at` (UNIX seconds; None = now)."""
    return _start(name, parent, kind, attributes, at, span_id, links)


def child(name: str, *, kind: str = "internal", **attributes: Value | None) -> Span:
    """A span below the current one."""
    return _start(name, _CURRENT.get().traceparent, kind, attributes)


def record(
    name: str, parent: str | None, begun: float, ended: float, *, kind: str = "internal", **attributes: Value | None
) -> None:
    """A step whose times are known by now."""
    if sampled(parent):
        _start(name, parent, kind, attributes, begun).end(max(begun, ended))


def _start(
    name: str,
    parent: str | None,
    kind: str,
    attributes: dict[str, Value | None],
    at: float | None = None,
    span_id: int | None = None,
    links: Sequence[str] = (),
) -> Span:
    if parent is None:
        return OFF
    if _recorder is None or parent[-1:] not in _ODD:
        return Span(parent)
    return _recorder.start(name, parent, kind, attributes, at, span_id, links)


def step_context(parent: str, *names: Value) -> str:
    """The context of a step that anybody can name without being told: the attempt before a redelivery, say."""
    return f"{parent[:36]}{step_id(parent, *names):016x}{parent[52:]}"


def step_id(parent: str, *names: Value) -> int:
    digest = hashlib.sha256("\x1f".join((parent, *map(str, names))).encode()).digest()
    return int.from_bytes(digest[:8], "big") or 1


def trace_id(traceparent: str | None) -> str | None:
    return traceparent[3:35] if traceparent is not None else None


def kept(attributes: Mapping[str, Value | None]) -> dict[str, Value]:
    """Attributes under their full names; what is not known is left out, texts are cut."""
    return {
        NAMES.get(name) or f"rollgrid.{name}": value[:MAX_TEXT_CHARS] if isinstance(value, str) else value
        for name, value in attributes.items()
        if value is not None
    }
