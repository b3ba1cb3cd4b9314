"""Runs the whole stack: servers, then services; restarts what dies; stops in the order that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from rollgrid.errors import ConfigurationError, RollgridError

from . import processes
from .config import StackConfig
from .events import EventLog
from .home import Home, StackState
from .running import RunningPart
from .services import Ports, build_parts

REAPER = Path(__file__).with_name("reaper.py")
HOUSEKEEPING_S = 0.5
STALE_GRACE_S = 10.0
OnChange = Callable[[StackState], None]


class AlreadyRunning(RollgridError):
    """Another supervisor has this state folder."""


class StackFailed(RollgridError):
    """A part cannot be started; the message carries the end of its log."""


class Supervisor:
    """One stack.  `run` returns when it has been stopped by SIGINT, SIGTERM or `request_stop`."""

    def __init__(self, home: Home, config: StackConfig, on_change: OnChange | None = None) -> None:
        self.home, self.config = home, config
        self._on_change = on_change
        self._stop = asyncio.Event()
        self._parts: list[RunningPart] = []
        self._sessions: set[int] = set()
        self._run_id = secrets.token_hex(8)
        self._reaper: subprocess.Popen[bytes] | None = None
        self._state: StackState | None = None
        self._events = EventLog(home.log("events"))
        self._failed: str | None = None

    async def run(self) -> None:
        """Raises AlreadyRunning, ConfigurationError and StackFailed; all processes are gone afterwards."""
        self.home.create()
        with self.home.locked() as mine:
            if not mine:
                raise AlreadyRunning(f"a stack already runs in {self.home.root}")
            await asyncio.to_thread(end_leftovers, self.home)
            self.home.clear_state()
            self._prepare()
            self._take_signals()
            self._start_reaper()
            self._events.write("stack_starting", run=self._run_id, engine=self.config.engine, policy=self.config.policy)
            keeper = asyncio.create_task(self._housekeeping())
            try:
                await self._start_all()
                await self._stop.wait()
            finally:
                await self._stop_all()
                keeper.cancel()
                await asyncio.gather(keeper, return_exceptions=True)
                self._end_reaper()
                self.home.clear_state()
                self._events.write("stack_stopped", run=self._run_id, failed=self._failed)
            if self._failed:
                raise StackFailed(self._failed)

    def request_stop(self) -> None:
        """Drain and end; asked a second time, end at once."""
        if self._stop.is_set():
            for part in self._parts:
                part.kill()
        self._stop.set()

    def _prepare(self) -> None:
        credentials = self.home.credentials()
        ports = Ports(self.home)
        parts = build_parts(self.home, self.config, credentials, ports, os.environ, self._run_id)
        self._parts = [RunningPart(part, self.home, self._run_id, self._changed, self._tell) for part in parts]
        door = next(part.url for part in parts if part.name == "ingest")
        self._state = StackState(
            url=door,
            api_key=credentials.api_key,
            supervisor=processes.this_process(),
            run=self._run_id,
            started_at=time.time(),
            engine=self.config.engine,
            policy=self.config.policy,
            model=str(self.config.model),
            parts=tuple(part.state for part in self._parts),
            ports=ports.taken,
        )
        self._changed()

    async def _start_all(self) -> None:
        servers = [part for part in self._parts if part.part.stage == 0]
        services = [part for part in self._parts if part.part.stage > 0]
        for group in (servers, services):
            for part in group:
                part.begin()
            await self._until_ready(group)
            if self._stop.is_set():
                return

    async def _until_ready(self, group: list[RunningPart]) -> None:
        waits = [asyncio.create_task(part.ready.wait()) for part in group]
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(asyncio.wait(waits))
        try:
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (stop, ready, *waits):
                task.cancel()
            await asyncio.gather(stop, ready, *waits, return_exceptions=True)

    async def _stop_all(self) -> None:
        for stage in sorted({part.part.stage for part in self._parts}, reverse=True):
            await asyncio.gather(*(part.stop() for part in self._parts if part.part.stage == stage))

    async def _housekeeping(self) -> None:
        """Ends orphans, bounds logs, gives up a start that cannot succeed."""
        while True:
            self.home.trim_log(self.home.log("events"))
            for part in self._parts:
                part.check()
                self.home.trim_log(part.log)
                if part.given_up.is_set() and self._failed is None and not (self._state and self._state.ready_at):
                    self._failed = f"{part.part.name} cannot be started:\n{processes.tail(part.log)}\n(log: {part.log})"
                    self._stop.set()
            self._end_orphans()
            await asyncio.sleep(HOUSEKEEPING_S)

    def _end_orphans(self) -> None:
        """What a dead part left behind was handed to us by the kernel: end it and reap it."""
        known = {part.process.pid for part in self._parts if part.process is not None}
        if self._reaper is not None:
            known.add(self._reaper.pid)
        for pid in processes.orphans(known):
            if not processes.belongs(pid, self._sessions, self._run_id):
                continue
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)

    def _take_signals(self) -> None:
        processes.adopt_orphans()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.request_stop)

    def _start_reaper(self) -> None:
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(REAPER)], stdin=subprocess.PIPE, start_new_session=True
        )

    def _end_reaper(self) -> None:
        self._tell("done")
        if self._reaper is not None and self._reaper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._reaper.stdin.close()
            self._reaper.wait(10)

    def _tell(self, line: str) -> None:
        if line.startswith("+"):
            self._sessions.add(int(line[1:].split()[0]))
        if self._reaper is None or self._reaper.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError):
            self._reaper.stdin.write(line.encode() + b"\n")
            self._reaper.stdin.flush()

    def _changed(self) -> None:
        if self._state is None:
            return
        ready = bool(self._parts) and all(part.ready.is_set() for part in self._parts)
        self._state = msgspec.structs.replace(
            self._state,
            parts=tuple(part.state for part in self._parts),
            ready=ready,
            ready_at=self._state.ready_at or (time.time() if ready else 0.0),
            stopping=self._stop.is_set(),
        )
        self.home.write_state(self._state)
        self._events.parts(self._state.parts)
        if self._on_change is not None:
            self._on_change(self._state)


def end_leftovers(home: Home) -> list[int]:
    """End what a killed supervisor of this folder left running; never another's process."""
    state = home.read_state()
    if state is None or state.alive:
        return []
    known = [part.process for part in state.parts if part.process is not None]
    pids = processes.leftovers(known, state.run)
    processes.end_all(pids, STALE_GRACE_S)
    return pids


def stop_stack(home: Home, timeout_s: float, *, now: bool = False) -> bool:
    """Ask the supervisor of `home` to stop and wait; False when none ran.  Raises ConfigurationError on timeout."""
    state = home.read_state()
    if state is None:
        return False
    if not state.alive:
        ended = end_leftovers(home)
        home.clear_state()
        return bool(ended)
    signals = [signal.SIGTERM] * (2 if now else 1)
    for number in signals:
        with contextlib.suppress(ProcessLookupError):
            os.kill(state.supervisor.pid, number)
        time.sleep(0.1)
    if not processes.wait_end(state.supervisor, timeout_s):
        raise ConfigurationError(f"the stack in {home.root} has not stopped within {timeout_s:.0f} s; see {home.logs}")
    return True
