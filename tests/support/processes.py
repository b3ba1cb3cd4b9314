"""One child process of a test: started, watched, paused, killed and restarted by its own pid."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import os
import random
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PORTS = random.SystemRandom()
_taken = {23646}  # where SeaweedFS's first instance listens, asked or not


class ProcessDied(RuntimeError):
    """The process ended although nobody stopped it; the message carries the end of its log."""


def free_port() -> int:
    """A port nobody listens on, below the kernel's range for outgoing connections; no other test process is given it.

    A port that is free now is listened on later, meanwhile another lane of the tests might choose it: each process
    holds its own by a record lock, at the port's offset in one file, until it ends.
    """
    for _ in range(200):
        port = _PORTS.randrange(15000, 31000)
        if port in _taken or not _reserved(port):
            continue
        _taken.add(port)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise RuntimeError("no free port found in 15000-31000")


@functools.cache
def _reservations() -> int:
    path = Path(tempfile.gettempdir()) / f"rollgrid-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _reserved(port: int) -> bool:
    try:
        fcntl.lockf(_reservations(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
    except (BlockingIOError, PermissionError):
        return False
    return True


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Process:
    """A child in its own process group.  It dies with the test process even when that is killed.

    Start it from the main thread only: the kernel ends it when the thread that started it ends.
    """

    poll_s = 0.005

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        cwd: Path | None = None,
    ) -> None:
        self.name, self.argv, self.log, self.cwd = name, list(argv), log, cwd
        self.environment = dict(env) if env is not None else None
        self.starts = 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise RuntimeError(f"{self.name} was not started")
        return self._child.pid

    @property
    def returncode(self) -> int | None:
        return None if self._child is None else self._child.poll()

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def start(self) -> Self:
        if self.running:
            raise RuntimeError(f"{self.name} runs already")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.environment,
                cwd=self.cwd,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - calls prctl and nothing else
            )
        self.starts += 1
        return self

    def wait_ready(self, timeout_s: float) -> Self:
        """Wait until `is_ready`; raises ProcessDied or TimeoutError with the end of the log."""
        deadline = time.monotonic() + timeout_s
        while not self.is_ready():
            if not self.running:
                raise ProcessDied(f"{self.name} ended with {self.returncode}\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} not ready within {timeout_s} s\n{self.log_tail()}")
            time.sleep(self.poll_s)
        return self

    def is_ready(self) -> bool:
        return self.running

    def send(self, number: signal.Signals) -> None:
        """Signal the whole group; a group that is gone is not an error."""
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, number)

    def kill(self) -> None:
        """SIGKILL to the whole group, and reap."""
        self.send(signal.SIGKILL)
        if self._child is not None:
            self._child.wait(10)

    def pause(self) -> None:
        self.send(signal.SIGSTOP)

    def resume(self) -> None:
        self.send(signal.SIGCONT)

    def stop(self, timeout_s: float = 20.0) -> int:
        """SIGTERM to the leader, SIGKILL to what is left after `timeout_s`; the exit code."""
        if self._child is None:
            return 0
        if self.running:
            self.resume()
            self._child.terminate()
            try:
                self._child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        return self._child.wait(10)

    def restart(self, timeout_s: float = 15.0) -> Self:
        """SIGKILL, start again under the same arguments, wait until ready."""
        self.kill()
        return self.start().wait_ready(timeout_s)

    def log_tail(self, lines: int = 40) -> str:
        if not self.log.exists():
            return f"({self.log} is missing)"
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def rss_bytes(self) -> int:
        """Resident memory of the leader."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
