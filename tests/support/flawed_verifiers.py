"""Verifiers with one fault each that the kit must see, one without any, and one that disagrees with it."""

from __future__ import annotations

import contextlib
import socket
import time
from itertools import count

from rollgrid_scorer.rewards.base import ScoreInput, Verdict


class Sound:
    """1 when the text holds the answer; nothing written is unreadable.  Judges lines as turns."""

    name = "sound"
    version = "3"

    def score(self, task: ScoreInput) -> Verdict:
        if not task.text.strip():
            return Verdict(0.0, "nothing", invalid_output=True)
        lines = task.text.splitlines()[:8]
        answer = str(task.task["answer"])
        turns = tuple(None if not line.strip() else float(answer in line) for line in lines)
        return Verdict(1.0 if answer in task.text else 0.0, turn_values=turns)


class Contrary(Sound):
    """Another revision that thinks the opposite, where it can judge."""

    version = "4"

    def score(self, task: ScoreInput) -> Verdict:
        verdict = super().score(task)
        return verdict if verdict.invalid_output else Verdict(1.0 - verdict.value, turn_values=verdict.turn_values)


class HashOrder(Sound):
    """What a set gives first decides."""

    def score(self, task: ScoreInput) -> Verdict:
        return Verdict(super().score(task).value, next(iter({*map(str, range(50)), task.text})))


class Counting(Sound):
    """Every call changes the next."""

    def __init__(self) -> None:
        self._calls = count()

    def score(self, task: ScoreInput) -> Verdict:
        return Verdict(super().score(task).value, f"call {next(self._calls)}")


class Phoning(Sound):
    """Asks the network and hides it."""

    def score(self, task: ScoreInput) -> Verdict:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", 9), timeout=1).close()
        return super().score(task)


class Fragile(Sound):
    """Raises on what a model may write, and gives no finite number for the rest."""

    def score(self, task: ScoreInput) -> Verdict:
        if "\x00" in task.text:
            raise ValueError("a control character")
        return Verdict(float("nan")) if "[" in task.text else super().score(task)


class Sleeping(Sound):
    """Long texts take for ever."""

    def score(self, task: ScoreInput) -> Verdict:
        if len(task.text) > 100_000:
            time.sleep(60)
        return super().score(task)


class Nameless(Sound):
    version = ""
