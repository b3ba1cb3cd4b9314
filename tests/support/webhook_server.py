"""A customer's webhook: a real HTTP server in a thread whose paths behave well or badly."""

from __future__ import annotations

import contextlib
import gzip
import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple


class Received(NamedTuple):
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class WebhookServer:
    """`received` in order of arrival; `/hold` answers only once `released` is set."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.received: list[Received] = []
        self.released = threading.Event()
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate)
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def url(self, path: str = "/score", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def of(self, path: str) -> list[Received]:
        with self._lock:
            return [call for call in self.received if call.path == path]

    def arrived(self, call: Received) -> int:
        """Which call of its path this is, from 1."""
        with self._lock:
            self.received.append(call)
            self._counts[call.path] = self._counts.get(call.path, 0) + 1
            return self._counts[call.path]


def good_answer(call: Received) -> dict[str, Any]:
    """1 for texts with "good", null for "unsure", invalid for "garbled", with a value per turn."""
    scores = []
    for sample in call.json["samples"]:
        text = sample["text"] or ""
        score: dict[str, Any] = {"index": sample["index"], "value": None if "unsure" in text else float("good" in text)}
        if "garbled" in text:
            score |= {"invalid_output": True, "detail": "cannot read it"}
        if "turns" in text:
            score["turn_values"] = [0.5, None]
        scores.append(score)
    return {"scores": scores, "version": "rev-9"}


def _handler(owner: WebhookServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            call = Received(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            number = owner.arrived(call)
            with contextlib.suppress(OSError):
                self.behave(self.path.split("?")[0], call, number)

        def behave(self, path: str, call: Received, number: int) -> None:
            match path:
                case "/hold":
                    owner.released.wait(60)
                    self.answer(good_answer(call))
                case "/busy-then-good" if number <= 2:
                    self.answer({}, 503 if number == 1 else 429, {"Retry-After": "0"})
                case "/broken-then-good" if number == 1:
                    self.close_connection = True
                case "/down":
                    self.answer({}, 503)
                case "/redirect":
                    self.answer({}, 307, {"Location": "http://169.254.169.254/latest/meta-data/"})
                case "/redirect-home":
                    self.answer({}, 302, {"Location": owner.url("/score")})
                case "/refused":
                    self.answer({"error": "no such task"}, 422)
                case "/huge":
                    self.answer(b'{"scores": [], "padding": "' + b"x" * 3_000_000 + b'"}')
                case "/zipped":
                    self.answer(
                        gzip.compress(json.dumps(good_answer(call)).encode()), 200, {"Content-Encoding": "gzip"}
                    )
                case "/drip":
                    self.drip()
                case path if path.startswith("/shape/"):
                    self.answer(SHAPES[path.removeprefix("/shape/")])
                case _:
                    self.answer(good_answer(call))

        def answer(self, body: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def drip(self) -> None:
            """A byte now and then, for ever."""
            self.send_response(200)
            self.send_header("Content-Length", "1000")
            self.end_headers()
            while not owner.released.is_set():
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(0.05)

    return Handler


SHAPES: dict[str, bytes] = {
    "no-json": b"<html>",
    "empty": b"",
    "list": b"[]",
    "no-scores": b"{}",
    "text-value": b'{"scores": [{"index": 0, "value": "1"}]}',
    "no-value": b'{"scores": [{"index": 0}]}',
    "nan": b'{"scores": [{"index": 0, "value": NaN}]}',
    "infinite": b'{"scores": [{"index": 0, "value": 1e999}]}',
    "twice": b'{"scores": [{"index": 0, "value": 1}, {"index": 0, "value": 0}]}',
    "foreign": b'{"scores": [{"index": 0, "value": 1}, {"index": 99, "value": 0}]}',
    "turn-nan": b'{"scores": [{"index": 0, "value": 1, "turn_values": [1e999]}]}',
    "not-utf8": b'{"scores": [{"index": 0, "value": 1, "detail": "\xff"}]}',
    "deep": b"[" * 100_000,
}


def certificate_for(name: str, folder: Path) -> Path:
    """A self-signed certificate of a host and its key, in one PEM file."""
    path, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    path.write_bytes(key.read_bytes() + path.read_bytes())
    return path


@contextlib.contextmanager
def webhook_server(certificate: Path | None = None) -> Iterator[WebhookServer]:
    server = WebhookServer(certificate)
    server.start()
    try:
        yield server
    finally:
        server.stop()
