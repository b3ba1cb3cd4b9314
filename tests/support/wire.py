"""A wire that can be bad: forwards TCP to a server, and flips a byte or cuts where a test says so."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


class Wire:
    """`url` leads to the server; what goes there may suffer, answers never do."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.every: int | None = None
        """A fault once in so many bytes of a connection; `cuts` it, or flips a bit of the last of them."""
        self.cuts = False
        self.faults = 0
        """How many more there will be."""
        self.suffered = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._open += [client, server]
            for source, sink, faulty in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pump, args=(source, sink, faulty), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, faulty: bool) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if faulty:
                    data = self._spoiled(data, passed)
                    passed += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _spoiled(self, data: bytes, passed: int) -> bytes:
        if not self.faults or self.every is None or (passed + len(data)) // self.every == passed // self.every:
            return data
        self.faults -= 1
        self.suffered += 1
        if self.cuts:
            raise ConnectionError
        spoiled = bytearray(data)
        spoiled[self.every - passed % self.every - 1] ^= 1
        return bytes(spoiled)

    def close(self) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@contextlib.contextmanager
def wire(url: str) -> Iterator[Wire]:
    host, _, port = url.removeprefix("http://").partition(":")
    made = Wire(host, int(port))
    thread = threading.Thread(target=made.serve, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.close()
        thread.join(10)
