"""One part of the stack while it runs: started, watched, restarted with backoff, stopped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

import msgspec

from . import processes
from .home import Home, PartState
from .parts import Part
from .probes import ProbeFailed, http_json
from .processes import MARK, ProcessId

FAST_POLL_S = 0.15
UNREADY_POLL_S = 0.6
READY_POLL_S = 5.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
STEADY_S = 30.0
"""A part that ran so long has its backoff forgiven."""

FAILED_STARTS = 4
"""Deaths before a part was ever ready after which the start of the stack is given up."""


class RunningPart:
    """Runs one part until `stop`.  `changed` is called whenever `state` has changed."""

    def __init__(
        self, part: Part, home: Home, run: str, changed: Callable[[], None], tell: Callable[[str], None]
    ) -> None:
        self.part = part
        self.log = home.log(part.name)
        self.state = PartState(name=part.name, kind=part.kind, url=part.url, log="" if part.external else str(self.log))
        self.ready = asyncio.Event()
        self.given_up = asyncio.Event()
        self.process: ProcessId | None = None
        self._run, self._changed, self._tell = run, changed, tell
        self._child: subprocess.Popen[bytes] | None = None
        self._exited = asyncio.Event()
        self._stop = asyncio.Event()
        self._deaths = 0
        self._tasks: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        if not self.part.external:
            self._tasks.append(asyncio.create_task(self._keep(), name=f"keep {self.part.name}"))
        self._tasks.append(asyncio.create_task(self._watch(), name=f"watch {self.part.name}"))

    def check(self) -> None:
        """Raise what one of the tasks failed with: a bug, not a state of the part."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()):
                raise error

    async def stop(self) -> None:
        """End the part in its own time (`stop_s`), then by force.  Its session is empty afterwards."""
        self._stop.set()
        if self._child is not None and self._child.returncode is None:
            self._set(state="stopping", problems={})
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, signal.SIGTERM)
                os.kill(self._child.pid, signal.SIGCONT)
            try:
                async with asyncio.timeout(self.part.stop_s):
                    await self._exited.wait()
            except TimeoutError:
                self.kill()
        for task in self._tasks:
            if task.get_name().startswith("watch"):
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.ready.clear()
        self._set(state="stopped", process=None, problems={})

    def kill(self) -> None:
        """SIGKILL to the whole session, now."""
        self._stop.set()
        if self._child is not None and self._child.returncode is None:
            processes.end_session(self._child.pid)

    async def _keep(self) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._stop.is_set():
            await asyncio.to_thread(self.part.prepare)
            if self._stop.is_set():
                return
            started = time.monotonic()
            code = await self._run_once()
            if self._stop.is_set():
                if code in (0, 1, -signal.SIGTERM):
                    self.part.after_clean_stop()
                return
            ran = time.monotonic() - started
            was_ready = self.ready.is_set()
            self.ready.clear()
            self._deaths = 0 if was_ready else self._deaths + 1
            if self._deaths >= FAILED_STARTS:
                self.given_up.set()
            backoff = FIRST_BACKOFF_S if ran > STEADY_S else backoff
            cause = f"ended with {_meaning(code)}; next start in {backoff:.1f} s"
            self._set(state="restarting", process=None, restarts=self.state.restarts + 1, problems={"process": cause})
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(backoff):
                    await self._stop.wait()
            backoff = min(MAX_BACKOFF_S, backoff * 2)

    async def _run_once(self) -> int:
        """Start, wait for the end, end what is left of the session, reap; the exit code."""
        self._exited.clear()
        last_words = signal.SIGTERM if self.part.kind == "server" else signal.SIGKILL
        child = processes.start(
            self.part.argv, env={**self.part.env, MARK: self._run}, cwd=self.part.cwd, log=self.log,
            with_parent=last_words,
        )  # fmt: skip
        self._child = child
        self.process = processes.identify(child.pid)
        self._tell(f"+{child.pid} {int(last_words)}")
        self._set(state="starting", process=self.process, problems={})
        loop = asyncio.get_running_loop()
        watcher = os.pidfd_open(child.pid)
        loop.add_reader(watcher, self._exited.set)
        try:
            await self._exited.wait()
        finally:
            loop.remove_reader(watcher)
            os.close(watcher)
        # Until it is reaped its number cannot be another's, so the session is still ours alone.
        processes.end_session(child.pid)
        code = child.wait()
        self._tell(f"-{child.pid}")
        return code

    async def _watch(self) -> None:
        """Ask the part whether it is ready, often until it is, seldom afterwards."""
        while True:
            running = self.part.external or (self._child is not None and self._child.returncode is None)
            if running and self.state.state != "stopping":
                asked = self.process
                problems, version = await self._ask()
                if asked == self.process and not self._stop.is_set():
                    self._answered(problems, version)
            if not self.ready.is_set():
                await asyncio.sleep(UNREADY_POLL_S if self.state.state == "not_ready" else FAST_POLL_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(READY_POLL_S):
                    await self._exited.wait()
            await asyncio.sleep(FAST_POLL_S)

    def _answered(self, problems: dict[str, str], version: str) -> None:
        if not problems:
            self.ready.set()
            self._set(state="ready", problems={}, version=version or self.state.version)
        elif self.state.state == "restarting":
            return
        elif self.ready.is_set() or self.state.state == "not_ready":
            self.ready.clear()
            self._set(state="not_ready", problems=problems)
        else:
            self._set(state="starting", problems=problems)

    async def _ask(self) -> tuple[dict[str, str], str]:
        if self.part.probe is not None:
            try:
                return {}, await self.part.probe()
            except ProbeFailed as error:
                return {"probe": str(error)}, ""
        status, body = await http_json(f"{self.part.url}/readyz")
        name = body.get("instance", self.part.instance)
        if status and name != self.part.instance:
            return {"port": f"another program has it: {name}"}, ""
        if status == 200:
            return {name: str(body.get(name)) for name, value in self.part.facts.items() if body.get(name) != value}, ""
        found = body.get("problems") or {"door": body.get("error", f"HTTP {status}")}
        return {str(name): str(cause) for name, cause in found.items()}, ""

    def _set(self, **changes: object) -> None:
        state = msgspec.structs.replace(self.state, **changes)
        if state != self.state:
            self.state = state
            self._changed()


def _meaning(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
