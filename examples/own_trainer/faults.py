"""Faults for the study: samplers killed on schedule, and one publication of weights that are no numbers."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rollgrid.errors import RollgridError
from rollgrid.stack.home import Home

from .fleet import LIVE_TIMEOUT_S, Fleet, OwnStack, State


@contextlib.contextmanager
def kill_samplers(home: Path, every_s: float) -> Iterator[list[int]]:
    """SIGKILL to one sampler's process group after the other; what is given lists the pids that were killed."""
    killed: list[int] = []
    stop = threading.Event()

    def work() -> None:
        turn = 0
        while not stop.wait(every_s):
            state = Home(home).read_state()
            running = sorted((name, pid) for name, pid in (state.pids if state else {}).items() if "sampler" in name)
            if not running:
                continue
            _, pid = running[turn % len(running)]
            turn += 1
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # a sampler leads a session of its own, its engine included
                killed.append(pid)

    thread = threading.Thread(target=work, name="killer", daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join(every_s)


class BrokenPublisher(Fleet):
    """A fleet to which the trainer once publishes weights that are not numbers, before the right ones."""

    def __init__(self, stack: OwnStack, run: str, *, break_at: int) -> None:
        super().__init__(stack.client, stack.policy, run)
        self._break_at = break_at
        self.refusals: list[str] = []

    def publish(self, state: State, step: int) -> int:
        if step == self._break_at:
            self._publish_broken(dict(state), step)
        return super().publish(state, step)

    def _publish_broken(self, state: dict[str, Any], step: int) -> None:
        name = sorted(state)[0]
        broken = {**state, name: torch.full_like(state[name], float("nan"))}
        try:
            self.client.weights.publish(self.policy, broken, step=step).wait_live(timeout=LIVE_TIMEOUT_S)
        except RollgridError as error:
            self.refusals.append(f"{type(error).__name__}: {error}")
