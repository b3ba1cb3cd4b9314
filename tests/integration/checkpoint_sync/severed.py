"""A link to S3 that is lost when a file of a version is read over it: every connection ends, none is taken."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Link:
    def __init__(self, target: int, marker: bytes) -> None:
        self._target, self._marker = target, marker
        self.port, self.armed, self.cut = 0, False, 0
        self._open: set[asyncio.StreamWriter] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.armed and self.cut:
            writer.close()
            return
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.close()
            return
        mine = {writer, forth}
        self._open |= mine
        try:
            await asyncio.gather(self._pump(reader, forth, watched=True), self._pump(back, writer))
        finally:
            self._open -= mine
            for one in mine:
                one.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, watched: bool = False) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await source.read(1 << 16):
                line = data.split(b"\r\n", 1)[0]
                if self.armed and watched and line.startswith(b"GET ") and b".safetensors" in line:
                    self.cut += self._marker in line
                    for one in list(self._open):
                        one.close()
                    return
                sink.write(data)
                await sink.drain()
        sink.close()


@contextlib.asynccontextmanager
async def severed(target: int, marker: bytes) -> AsyncIterator[Link]:
    """Passes everything to 127.0.0.1:`target`; while `armed`, it is lost with the first file that is read."""
    link = Link(target, marker)
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    async with server:
        yield link
