"""Where spans go: OTLP over HTTP and a file of JSON lines, in batches, by threads of their own.

A collector that is away costs the spans and nothing else: the queue is bounded, the loop never waits
for it, and the flush at the end has a deadline.  The tracer is ours alone and never OpenTelemetry's
global one, into which an engine's own instrumentation would write.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    format_span_id,
    format_trace_id,
    set_span_in_context,
)
from prometheus_client import Counter

from .logging import get_logger
from .settings import TraceSettings
from .telemetry import Span, Value, kept

QUEUE_SPANS = 4096
"""Ended spans that wait for export; further ones push out the oldest."""
BATCH_SPANS = 512
EXPORT_EVERY_S = 1.0
EXPORT_TIMEOUT_S = 5.0
FILE_LIMIT_BYTES = 256 * 1024 * 1024
"""A trace file of this size takes no more: it is for a laptop, not for a fleet."""

log = get_logger(__name__)
SPANS = Counter("rollgrid_trace_spans_total", "Spans by what became of them", ["exporter", "outcome"])
_KINDS = {kind.name.lower(): kind for kind in SpanKind}


class _Ids(RandomIdGenerator):
    """Random ids, and once the one that is set."""

    def __init__(self) -> None:
        self.next: int | None = None

    def generate_span_id(self) -> int:
        chosen, self.next = self.next, None
        return chosen if chosen is not None else super().generate_span_id()


class Recorder:
    """Makes spans and exports them.  `start` belongs to one thread; `close` flushes."""

    def __init__(self, service: str, instance: str, exporters: dict[str, SpanExporter]) -> None:
        self._ids = _Ids()
        name = f"rollgrid-{service.replace('_', '-')}"
        resource = Resource.create({"service.name": name, "service.instance.id": instance})
        self._provider = TracerProvider(
            sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False
        )
        for name, exporter in exporters.items():
            self._provider.add_span_processor(
                BatchSpanProcessor(
                    _Counted(exporter, name),
                    max_queue_size=QUEUE_SPANS,
                    schedule_delay_millis=EXPORT_EVERY_S * 1e3,
                    max_export_batch_size=BATCH_SPANS,
                )
            )
        self._tracer = self._provider.get_tracer("rollgrid")

    def start(
        self,
        name: str,
        parent: str | None,
        kind: str,
        attributes: Mapping[str, Value | None],
        at: float | None = None,
        span_id: int | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        self._ids.next = span_id
        context = set_span_in_context(NonRecordingSpan(_context(parent))) if parent is not None else None
        span = self._tracer.start_span(
            name,
            context=context,
            kind=_KINDS[kind],
            attributes=kept(attributes),
            links=[Link(_context(link)) for link in links],
            start_time=_nanoseconds(at),
        )
        return _Recorded(span)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Export what waits, for at most `timeout_s`; whether all of it went out in time."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True, name="trace-flush")
        closing.start()
        closing.join(timeout_s)
        return not closing.is_alive()


class _Recorded(Span):
    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        flags = f"{int(context.trace_flags):02x}"
        super().__init__(f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{flags}")
        self._span = span

    @property
    def recorded(self) -> bool:
        return True

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, **attributes: Value | None) -> None:
        self._span.set_attributes(kept(attributes))

    def event(self, name: str, at: float, **attributes: Value | None) -> None:
        self._span.add_event(name, kept(attributes), _nanoseconds(at))

    def fail(self, why: str) -> None:
        self._span.set_status(Status(StatusCode.ERROR, why))

    def end(self, at: float | None = None) -> None:
        if self._span.is_recording():
            self._span.end(_nanoseconds(at))


class _Counted(SpanExporter):
    """Counts what an exporter made of its batches, and says once that it fails."""

    def __init__(self, exporter: SpanExporter, name: str) -> None:
        self._exporter, self._name = exporter, name
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        lost = result is not SpanExportResult.SUCCESS
        SPANS.labels(self._name, "lost" if lost else "exported").inc(len(spans))
        if lost and not self._failing:
            log.warning("spans_lost", exporter=self._name, spans=len(spans))
        self._failing = lost
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class _TraceFile(SpanExporter):
    """One JSON object a line, appended; several services may share the file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            if self._file.tell() > FILE_LIMIT_BYTES:
                return SpanExportResult.FAILURE
            for span in spans:
                self._file.write(span.to_json(indent=None).encode() + b"\n")
        except OSError:
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._file.close()


def recorder_of(service: str, instance: str, settings: TraceSettings) -> Recorder | None:
    """What the settings ask for; None when they name no place for spans.  Raises OSError (the file)."""
    exporters: dict[str, SpanExporter] = {}
    if settings.otlp_endpoint or settings.otlp_traces_endpoint:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        # it reads OTEL_EXPORTER_OTLP_…: the address, headers, certificates
        exporters["otlp"] = OTLPSpanExporter(timeout=EXPORT_TIMEOUT_S)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `_Counted` says it, once
    if settings.file is not None:
        exporters["file"] = _TraceFile(settings.file.expanduser())
    return Recorder(service, instance, exporters) if exporters else None


def _context(traceparent: str) -> SpanContext:
    _, trace, span, flags = traceparent.split("-")
    return SpanContext(int(trace, 16), int(span, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def _nanoseconds(at: float | None) -> int | None:
    return None if at is None else int(at * 1e9)
