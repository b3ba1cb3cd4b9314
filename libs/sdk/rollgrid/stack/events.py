"""What the supervisor saw, one JSON object a line in logs/events.log, in the form of the services' own logs."""

from __future__ import annotations

import contextlib
import datetime
from pathlib import Path

import msgspec

from .home import PartState

ALARMING = frozenset({"restarting", "not_ready"})


class EventLog:
    """Appends; a disk that is full costs the line, never the stack."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: dict[str, PartState] = {}

    def parts(self, now: tuple[PartState, ...]) -> None:
        """Log each part whose state has changed since the last call."""
        for part in now:
            before = self._seen.get(part.name)
            self._seen[part.name] = part
            if before is None or (before.state, before.restarts) == (part.state, part.restarts):
                continue
            self.write(
                f"part_{part.state}",
                level="warning" if part.state in ALARMING else "info",
                part=part.name,
                pid=part.process.pid if part.process is not None else None,
                restarts=part.restarts,
                problems=part.problems,
            )

    def write(self, event: str, level: str = "info", **facts: object) -> None:
        at = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
        line = {"event": event, "service": "supervisor", "level": level, "timestamp": at, **facts}
        with contextlib.suppress(OSError), self._path.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
