"""Processes by identity, not by number: what may be killed, and how a whole session is ended.

A pid is reused; (boot, pid, start time) is not.  Every part is started as the leader of its own
session, so that what it leaves behind (engine workers) can be found and ended after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

LAUNCHER = Path(__file__).with_name("launch.py")
MARK = "ROLLGRID_STACK_RUN"
"""Environment variable that all parts of one run of a stack carry."""

_ENGINE_TITLES = (b"VLLM::",)
"""Processes that overwrite their own command line, and with it the environment the kernel shows."""


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """A process that can be told from a later one with the same number.

    `started` is in clock ticks since boot.
    """

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether this very process runs (a zombie does not)."""
        found = _stat(self.pid)
        return found is not None and found.started == self.started and found.state != "Z" and self.boot == boot_id()


class _Stat(msgspec.Struct, frozen=True):
    state: str
    parent: int
    session: int
    started: int


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, None when there is none."""
    found = _stat(pid)
    return None if found is None else ProcessId(pid=pid, started=found.started, boot=boot_id())


def this_process() -> ProcessId:
    found = identify(os.getpid())
    if found is None:
        raise RuntimeError("/proc is not mounted: the stack needs Linux")
    return found


def _stat(pid: int) -> _Stat | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    fields = text.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return _Stat(fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def _all_pids() -> Iterable[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def session_members(session: int) -> list[int]:
    """Living processes of a session, zombies left out."""
    return [pid for pid in _all_pids() if (found := _stat(pid)) and found.session == session and found.state != "Z"]


def end_session(session: int, number: signal.Signals = signal.SIGKILL) -> list[int]:
    """Signal every process of a session whose leader's number cannot have been reused; who got it."""
    members = session_members(session)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return members


def orphans(known: Iterable[int]) -> list[int]:
    """Children of this process's that it did not start: they lost their parent (see `adopt_orphans`)."""
    me, ours = os.getpid(), set(known)
    return [pid for pid in _all_pids() if pid not in ours and (found := _stat(pid)) and found.parent == me]


def adopt_orphans() -> None:
    """Descendants that lose their parent become children of this process instead of init's."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def belongs(pid: int, sessions: Iterable[int], run: str) -> bool:
    """Whether an orphan comes from one of our parts: by its session, else by the run's mark."""
    found = _stat(pid)
    return found is not None and (found.session in sessions or _is_marked(pid, run))


def leftovers(known: Iterable[ProcessId], run: str) -> list[int]:
    """What still runs of a dead supervisor's parts: provably theirs, or not in the list.

    A leader is theirs by identity.  Another member of its session is theirs by the mark in its
    environment, or as an engine process that has overwritten it.
    """
    here = boot_id()
    sessions = {part.pid: part for part in known if part.boot == here}
    found: list[int] = []
    for pid in _all_pids():
        stat = _stat(pid)
        if stat is None or stat.state == "Z" or stat.session not in sessions:
            continue
        leader = sessions[stat.session]
        if pid == leader.pid:
            if stat.started == leader.started:
                found.append(pid)
        elif stat.started >= leader.started and (leader.alive or _is_marked(pid, run)):
            found.append(pid)
    return found


def _is_marked(pid: int, run: str) -> bool:
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        title = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return f"{MARK}={run}".encode() in environ or title.startswith(_ENGINE_TITLES)


def end_all(pids: Sequence[int], timeout_s: float, first: signal.Signals = signal.SIGTERM) -> None:
    """Signal `pids`, wait, then SIGKILL those that stay; for processes that are not our children."""
    identities = [found for pid in pids if (found := identify(pid))]
    for number, wait_s in ((first, timeout_s), (signal.SIGKILL, 5.0)):
        for process in identities:
            if process.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline and any(process.alive for process in identities):
            time.sleep(0.02)


def wait_end(process: ProcessId, timeout_s: float) -> bool:
    """Wait for a process that is not a child; False when it still runs after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while process.alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def start(
    argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log: Path, with_parent: signal.Signals
) -> subprocess.Popen[bytes]:
    """Start a session leader that gets `with_parent` when this process dies.  Call it in the main thread."""
    tied = [sys.executable, "-I", "-S", "-B", str(LAUNCHER), str(int(with_parent)), str(os.getpid()), *argv]
    with log.open("ab") as out:
        return subprocess.Popen(
            tied, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
        )


def tail(log: Path, lines: int = 15, start: int = 0) -> str:
    """The end of a log file, of what was written behind byte `start`."""
    try:
        with log.open("rb") as handle:
            handle.seek(max(start, log.stat().st_size - 16384))
            return "\n".join(handle.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
