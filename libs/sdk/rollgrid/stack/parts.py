"""What a supervisor runs: one value per process, made from the table of services and the servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

Probe = Callable[[], Awaitable[str]]
"""A real operation; returns the version, raises `probes.ProbeFailed`."""


def _nothing() -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One process, or an external server (empty `argv`).

    Parts start by `stage`, lowest first, and stop the other way round within `stop_s` seconds.
    `exports` are environment variables for later stages.  A service is ready by its `url`/readyz, a
    server by its `probe`; `instance` is the name by which a service shows that it is this one that answers,
    `facts` what it must say of itself beyond being ready.
    """

    name: str
    kind: str
    stage: int
    url: str = ""
    instance: str = ""
    facts: dict[str, str] = dataclasses.field(default_factory=dict)
    argv: tuple[str, ...] = ()
    env: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    cwd: Path = Path("/")
    exports: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)
    probe: Probe | None = None
    prepare: Callable[[], None] = _nothing
    after_clean_stop: Callable[[], None] = _nothing
    stop_s: float = 30.0

    @property
    def external(self) -> bool:
        return not self.argv
