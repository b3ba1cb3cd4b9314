"""Handles of the nursery and of its workers, for the scorer's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from rollgrid_runtime.logging import get_logger

from .calls import HEAD_SIZE, Cell, frame_length

log = get_logger(__name__)
START_S = 60.0
ANSWER_S = 10.0
ALIVE = "still running"
_SECRET_WORDS = ("SECRET", "PASSWORD", "PASSWD", "TOKEN", "CREDENTIAL", "_KEY")
_PR_SET_DUMPABLE = 4
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class NurseryDown(Exception):
    """The nursery does not start or does not answer."""


class WorkerGone(Exception):
    """The worker closed its socket: it has ended."""


class WorkerProcess:
    """One forked worker: its pid (leader of its own session), its socket, its progress cell."""

    def __init__(self, pid: int, cell: Cell, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.pid, self.cell = pid, cell
        self._reader, self._writer = reader, writer

    @property
    def alive(self) -> bool:
        return not self._reader.at_eof() and not self._writer.is_closing()

    async def send(self, data: bytes) -> None:
        """Write one frame; the death of the worker shows at `receive`."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def receive(self) -> bytes:
        """One frame's body.  Raises WorkerGone at the end, ValueError for an impossible length."""
        try:
            return await self._reader.readexactly(frame_length(await self._reader.readexactly(HEAD_SIZE)))
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerGone from None

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
        self.cell.close()


class Nursery:
    """Starts the nursery process and asks it for workers; starts it again when it has died."""

    def __init__(
        self, memory_mb: int, verifiers: Sequence[str], *, environment: Mapping[str, str], watched: bool
    ) -> None:
        self._memory_mb, self._verifiers = memory_mb, tuple(verifiers)
        self._environment = dict(environment)
        self._network = "watched" if watched else "free"
        self._process: subprocess.Popen[bytes] | None = None
        self._door: socket.socket | None = None
        self._lock = asyncio.Lock()

    async def ensure(self) -> None:
        """Have a living nursery; raises NurseryDown."""
        async with self._lock:
            await self._ensure()

    async def spawn(self) -> WorkerProcess:
        """A new worker; raises NurseryDown."""
        async with self._lock:
            await self._ensure()
            ours, theirs = socket.socketpair()
            cell = Cell.create()
            try:
                pid = int(await self._ask(b"spawn", (theirs.fileno(), cell.fd)))
            except (OSError, ValueError, NurseryDown) as error:
                ours.close()
                cell.close()
                self._kill()
                raise NurseryDown(f"the nursery forked no worker: {error!r}") from error
            finally:
                theirs.close()
        ours.setblocking(False)
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return WorkerProcess(pid, cell, reader, writer)

    async def discard(self, worker: WorkerProcess, *, ending: bool) -> str:
        """Kill the worker's whole session and reap it; how it ended, in words.

        `ending` = its socket has closed, so it is given a moment to end in its own way.
        """
        async with self._lock:
            how = await self._reap(worker.pid, 200) if ending else ALIVE
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, signal.SIGKILL)
            if how == ALIVE:
                how = await self._reap(worker.pid, 5000)
        await worker.close()
        return how

    async def _reap(self, pid: int, wait_ms: int) -> str:
        if self._door is None:
            return "killed with its nursery"
        try:
            return _ended(await self._ask(b"reap %d %d" % (pid, wait_ms)))
        except (OSError, ValueError, NurseryDown):
            self._kill()
            return "killed with its nursery"

    async def close(self) -> None:
        async with self._lock:
            self._kill()

    async def _ask(self, request: bytes, descriptors: Sequence[int] = ()) -> bytes:
        door = self._door
        if door is None:
            raise NurseryDown("the nursery is not running")

        def ask() -> bytes:
            socket.send_fds(door, [request], descriptors)
            return door.recv(64)

        try:
            answer = await asyncio.to_thread(ask)
        except asyncio.CancelledError:
            self._kill()  # its answer would be taken for the next one's
            raise
        if not answer:
            raise NurseryDown("the nursery has ended")
        return answer

    async def _ensure(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._kill()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(theirs.fileno()), str(os.getpid()), str(self._memory_mb), self._network, *self._verifiers]
        # started on the loop's own thread: the death signal follows the thread that started it
        self._process = subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-m", "rollgrid_scorer.nursery", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,
            env=clean_environment(os.environ) | self._environment,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        ours.settimeout(START_S)
        self._door = ours
        try:
            greeting = await asyncio.to_thread(ours.recv, 64)
        except OSError:
            greeting = b""
        except asyncio.CancelledError:
            self._kill()
            raise
        if greeting != b"ready":
            code = self._process.poll()
            self._kill()
            raise NurseryDown(f"the nursery did not start (exit code {code})")
        ours.settimeout(ANSWER_S)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._door is not None:
            self._door.close()
            self._door = None


def hide_this_process() -> None:
    """Close /proc/<pid>/environ and memory of the scorer to other processes of its user: workers run foreign code.

    Root reads them all the same: run the scorer as an ordinary user.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0)


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What user code may see: no settings of rollgrid, no cloud accounts, nothing named like a secret."""
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("ROLLGRID_", "AWS_")) and not any(word in name.upper() for word in _SECRET_WORDS)
    }
    return kept | dict.fromkeys(_ONE_THREAD, "1") | {"PYTHONUNBUFFERED": "1"}


def _ended(answer: bytes) -> str:
    if answer == b"alive":
        return ALIVE
    status = int(answer)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exit code {os.waitstatus_to_exitcode(status)}"
