"""Whether weights are what their label says: this worker's fingerprint against the fleet's record.

The first worker to apply a version records what it found; what a cold load finds takes its place.  A
worker that differs from a cold record is wrong.  One that differs from another record may be right,
and loads cold to find out: what it finds then is the record, and the others compare again.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import NamedTuple

from rollgrid_contracts.checkpoints import Fingerprint, fingerprint_key
from rollgrid_contracts.topology import FINGERPRINTS
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict
from rollgrid_runtime.kv import Table

ATTEMPTS = 20


class Proof(StrEnum):
    PENDING = "pending"
    """Nobody has loaded it cold yet, and nobody differs."""
    CONFIRMED = "confirmed"
    """A cold load gave the same."""
    WRONG = "wrong"


class Finding(NamedTuple):
    """What this worker's probes gave for one version; `cold` = loaded by a process that held nothing before."""

    version: int
    fingerprint: str
    cold: bool
    digest: str = ""
    """That of the weights, "" = not known."""


def judge(mine: Finding, record: Fingerprint) -> Proof:
    """Against a record that holds (see `Fingerprints.prove` for whose does)."""
    if mine.fingerprint != record.fingerprint:
        return Proof.WRONG
    return Proof.CONFIRMED if record.cold or mine.cold else Proof.PENDING


def unmoved(before: Finding | None, after: Finding) -> bool:
    """Whether the label moved and the weights did not: another digest under the fingerprint there was."""
    return (
        before is not None
        and before.version != after.version
        and bool(before.digest and after.digest)
        and before.digest != after.digest
        and before.fingerprint == after.fingerprint
    )


class Fingerprints:
    """The records of one policy, as engines of one class see them.  All methods raise BusError."""

    def __init__(self, bus: Bus, tenant: str, policy: str, worker: str) -> None:
        self._table: Table[Fingerprint] = Table(bus, FINGERPRINTS, Fingerprint)
        self._tenant, self._policy, self._worker = tenant, policy, worker

    def subject(self) -> str:
        """On which every change of them is heard."""
        return f"$KV.{FINGERPRINTS.name}.{self._tenant}.{self._policy}.>"

    async def prove(self, mine: Finding, engine_class: str) -> Proof:
        """Record the finding where its word counts, and say what the record makes of it."""
        key = self._key(mine, engine_class)
        for _ in range(ATTEMPTS):
            found = await self._table.get(key)
            own = Fingerprint(fingerprint=mine.fingerprint, cold=mine.cold, worker=self._worker, taken_at=time.time())
            try:
                if found is None:
                    await self._table.create(key, own)
                    return judge(mine, own)
                if mine.cold and not found.value.cold:
                    await self._table.update(key, own, found.revision)
                    return judge(mine, own)
            except Conflict:
                continue
            return judge(mine, found.value)
        raise Conflict(f"{key}: {ATTEMPTS} attempts to record a fingerprint were overtaken")

    def _key(self, mine: Finding, engine_class: str) -> str:
        """The base (version 0) is another one when the policy's folder is: its digest names it too."""
        if mine.version == 0 and mine.digest:
            engine_class = f"{engine_class}-{mine.digest[:16]}"
        return fingerprint_key(self._tenant, self._policy, mine.version, engine_class)
