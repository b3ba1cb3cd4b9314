"""Which requests vLLM has, under which weights, and the gate that holds back new ones while weights change.

Nothing here knows of vLLM.  Invariant: a flight begins with the gate open, and its salt names the
weights and the LoRA version applied at that moment; while the gate is shut none begins.  A flight
that is aborted for the weights' sake is marked `taken` first, so that its caller can tell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import NamedTuple

from rollgrid_contracts.jobs import OnRefresh, VersionSpan

from .base import GenerationRequest


class Taken(StrEnum):
    """Why a request was aborted."""

    SWAP = "swap"
    """Other weights come: it goes on under them."""
    ADAPTER = "adapter"
    """Its LoRA version goes: its caller decides."""


class Applied(NamedTuple):
    """What a request runs on."""

    version: int
    adapter: int | None

    def salt(self, own: str | None) -> str:
        """Prefix caches are shared under equal salts only: what the request brings, and what computes for it."""
        lora = "" if self.adapter is None else f"@{self.adapter}"
        return f"{own or ''}|{self.version}{lora}"


class Flight:
    """One engine request.  `versions` are those of the weights while it runs, oldest first."""

    def __init__(self, request: GenerationRequest, applied: Applied) -> None:
        self.request = request
        self.applied = applied
        self.versions = [applied.version]
        self.taken: Taken | None = None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def salt(self) -> str:
        return self.applied.salt(self.request.cache_salt)

    def mode(self, default: OnRefresh) -> OnRefresh:
        return self.request.on_refresh or default

    def spans(self, found: tuple[VersionSpan, ...]) -> tuple[VersionSpan, ...]:
        """vLLM's spans in the request's terms; it labels by the weights alone.

        Raises ValueError when they name weights that this request never ran under.
        """
        strange = {span.version for span in found} - set(self.versions)
        if strange:
            raise ValueError(f"tokens are labelled with weights {sorted(strange)}, it ran under {self.versions}")
        if self.applied.adapter is None or not found:
            return found
        return (VersionSpan(version=self.applied.adapter, start=found[0].start, end=found[-1].end),)


class Flights:
    """All of them, and the gate."""

    def __init__(self) -> None:
        self._flying: dict[str, Flight] = {}
        self._open = asyncio.Event()
        self._landed = asyncio.Event()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def gate(self) -> None:
        """Returns with the gate open: until the caller next suspends it stays so."""
        while not self._open.is_set():
            await self._open.wait()

    @contextmanager
    def flight(self, request: GenerationRequest, applied: Applied) -> Iterator[Flight]:
        flight = self._flying[request.request_id] = Flight(request, applied)
        try:
            yield flight
        finally:
            del self._flying[request.request_id]
            self._landed.set()

    def __len__(self) -> int:
        return len(self._flying)

    def those(self, which: Callable[[Flight], bool] = lambda _: True) -> list[Flight]:
        return [flight for flight in self._flying.values() if which(flight)]

    def applied(self, version: int) -> None:
        """Whatever flies now goes on under these weights."""
        for flight in self._flying.values():
            flight.versions.append(version)

    async def landed(self, which: Callable[[Flight], bool], deadline_s: float) -> bool:
        """Whether all of them ended in time."""
        try:
            async with asyncio.timeout(deadline_s):
                while any(which(flight) for flight in self._flying.values()):
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            return False
        return True
