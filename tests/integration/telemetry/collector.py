"""A real OTLP/HTTP receiver: what a collector is to the services, decoded by OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

from tests.support.processes import free_port
from tests.support.waiting import wait_until


class Received(NamedTuple):
    """One span as it arrived; times in UNIX seconds, ids in hex."""

    service: str
    name: str
    trace: str
    span: str
    parent: str
    start: float
    end: float
    attributes: dict[str, object]
    events: dict[str, float]
    links: tuple[str, ...]
    failed: bool


class Collector:
    """Listens on one port over any number of `start` and `stop`."""

    def __init__(self) -> None:
        self.port = free_port()
        self.spans: list[Received] = []
        self._server: ThreadingHTTPServer | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), self._handler())
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def of(self, trace: str) -> list[Received]:
        """The spans of one trace, by their start."""
        return sorted((span for span in self.spans if span.trace == trace), key=lambda span: span.start)

    def wait_for(self, trace: str, *names: str, timeout_s: float = 30.0) -> list[Received]:
        """The trace, once a span of each of these names is there."""
        wait_until(
            lambda: set(names) <= {span.name for span in self.of(trace)},
            timeout_s,
            f"spans {names} of {trace}; there are {[span.name for span in self.of(trace)]}",
            every_s=0.1,
        )
        return self.of(trace)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                spans.extend(_spans(ExportTraceServiceRequest.FromString(body)))
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _spans(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for resource in request.resource_spans:
        named = {item.key: _value(item.value) for item in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Received(
                    service=str(named["service.name"]),
                    name=span.name,
                    trace=span.trace_id.hex(),
                    span=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    attributes={item.key: _value(item.value) for item in span.attributes},
                    events={event.name: event.time_unix_nano / 1e9 for event in span.events},
                    links=tuple(link.span_id.hex() for link in span.links),
                    failed=span.status.code == 2,
                )


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind is not None else None


@contextmanager
def collector() -> Iterator[Collector]:
    found = Collector()
    found.start()
    try:
        yield found
    finally:
        found.stop()
