"""Verifiers of ill will, for the scorer's tests: what they do is written in the sample's text."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from rollgrid_scorer.rewards.base import ScoreInput, Verdict


class Obedient:
    """Does what the text says; anything else scores 0.5."""

    name = "obedient"
    version = "7"

    def __init__(self, *, marks: str | None = None) -> None:
        self.marks = None if marks is None else Path(marks)

    def score(self, task: ScoreInput) -> Any:
        match task.text.split():
            case ["crash"]:
                ctypes.string_at(0)
            case ["crash-once"]:
                self._once()
            case ["exit"]:
                os._exit(3)
            case ["leave"]:
                raise SystemExit(4)
            case ["hang"]:
                time.sleep(3600)
            case ["hang-with-child"]:
                child = subprocess.Popen(["sleep", "3600"])
                assert self.marks is not None
                (self.marks / "child").write_text(str(child.pid))
                time.sleep(3600)
            case ["nan"]:
                return float("nan")
            case ["infinite"]:
                return Verdict(float("inf"))
            case ["text"]:
                return "1"
            case ["nothing"]:
                return None
            case ["raise"]:
                raise ValueError("a message that cannot be encoded: \ud800")
            case ["memory"]:
                return len(bytearray(1 << 44))
            case ["secrets"]:
                return Verdict(1.0, ",".join(sorted(os.environ)))
            case ["invalid"]:
                return Verdict(0.0, "no answer", invalid_output=True)
            case ["slow", seconds]:
                if self.marks is not None:
                    (self.marks / f"began-{os.getpid()}").touch()
                time.sleep(float(seconds))
        return Verdict(0.5, "fine")

    def _once(self) -> None:
        """Ends the process the first time only."""
        assert self.marks is not None
        try:
            (self.marks / "crashed").touch(exist_ok=False)
        except FileExistsError:
            return
        os._exit(9)


def broken_factory(**_: Any) -> Obedient:
    raise RuntimeError("this factory never works")


def deadly_factory(**_: Any) -> Obedient:
    os._exit(5)


class Attentive:
    """Says what it was shown of a session; 1 for every turn whose text has "good", 0.5 over all.

    A last answer of "too many" gets a value more than there are turns.
    """

    name = "attentive"
    version = "1"

    def score(self, task: ScoreInput) -> Verdict:
        roles = ",".join(message["role"] for message in task.messages or ())
        values = tuple(float("good" in text) for text in task.turn_texts)
        if task.text == "too many":
            values += (1.0,)
        return Verdict(
            0.5, f"{roles}|{'/'.join(task.turn_texts)}|{task.tokens}|{task.finish_reason}", turn_values=values
        )
