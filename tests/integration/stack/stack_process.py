"""A stack of a test's own: `rollgrid up` in a temporary state folder, with the scripted engine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollgrid import Client
from rollgrid.stack.home import StackState, find_stack
from rollgrid.stack.processes import ProcessId, session_members

from tests.support.processes import free_port
from tests.support.servers import scratch
from tests.support.waiting import wait_until

ROLLGRID = str(Path(sys.executable).parent / "rollgrid")
START_S, STOP_S = 180.0, 90.0


class Stack:
    """The `rollgrid` command under one state folder."""

    def __init__(self, home: Path, **env: str) -> None:
        self.home = home
        clean = {name: value for name, value in os.environ.items() if not name.startswith("ROLLGRID_")}
        self.env = clean | {"ROLLGRID_HOME": str(home), "ROLLGRID_MODELS": str(home.parent / "models")} | env

    def run(self, *words: str, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [ROLLGRID, *words], env=self.env, capture_output=True, text=True, timeout=timeout_s, cwd=self.home.parent
        )

    def up(self, *words: str) -> StackState:
        answer = self.run("up", "--engine", "scripted", "--port", str(free_port()), "--detach", *words)
        assert answer.returncode == 0, answer.stderr + self.logs()
        return self.state()

    def down(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run("down", *words, timeout_s=STOP_S + 30)

    def status(self) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(self.run("status", "--json", timeout_s=30).stdout)
        return report

    def state(self) -> StackState:
        found = find_stack(self.home)
        assert found is not None, "no stack runs\n" + self.logs()
        return found

    def client(self) -> Client:
        state = self.state()
        return Client(state.url, state.api_key)

    def process(self, name: str) -> ProcessId | None:
        return next(part.process for part in self.state().parts if part.name == name)

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            found = find_stack(self.home)
            return found is not None and found.ready

        wait_until(ready, timeout_s, "the stack is ready", every_s=0.1)

    def logs(self, lines: int = 8) -> str:
        texts = []
        for path in sorted((self.home / "logs").glob("*.log")):
            tail = path.read_text(errors="replace").splitlines()[-lines:]
            texts.append(f"--- {path.name}\n" + "\n".join(tail))
        return "\n".join(texts)


@contextlib.contextmanager
def stack(**env: str) -> Iterator[Stack]:
    """Not started; whatever runs at the end is stopped, by force if need be, and the folder removed."""
    with scratch("stack") as folder:
        found = Stack(folder / "home", **env)
        try:
            yield found
        finally:
            left = find_stack(found.home)
            if left is not None:
                found.down("--now")


def sessions_of(state: StackState) -> list[int]:
    return [part.process.pid for part in state.parts if part.process is not None]


def living(sessions: list[int]) -> list[int]:
    """Processes left in any of these sessions."""
    return [pid for session in sessions for pid in session_members(session)]
