"""What is proven of the weights that are loaded, and what follows from it.

A version is pending from before its bytes are applied until its fingerprint was looked at: samples that
end on it wait so long.  Weights that are found wrong take the worker out of rotation (`Quarantined`); it
comes back by a clean load in a new process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection

from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from . import metrics
from .engines.base import EngineDead
from .fingerprints import Finding, Fingerprints, Proof, unmoved

log = get_logger(__name__)
LOOK_S = 10.0
"""Records of versions that are not confirmed yet are read so often, whatever was heard."""
RECORD_S = 3.0
"""A version is looked at locally at once; the fleet's record may take so long before it stays pending."""


REMEMBERED = 64
"""Findings kept of versions that are loaded no more."""


class Quarantined(EngineDead):
    """The weights are not what their label says."""


class Proofs:
    """Findings of what is loaded, by version.  `on_change` is called whenever a proof changes."""

    def __init__(self, bus: Bus, records: Fingerprints, on_change: Callable[[], None]) -> None:
        self._bus, self._records, self._on_change = bus, records, on_change
        self._findings: dict[int, Finding] = {}
        self._proofs: dict[int, Proof] = {}
        self._past: dict[int, Finding] = {}
        self._past_proofs: dict[int, Proof] = {}
        self._pending: set[int] = set()
        self._wrong: set[int] = set()
        self._judged = asyncio.Event()
        self._heard = asyncio.Event()
        self.engine_class = ""
        self.recording = False
        """False while the policy is unknown: nothing is compared or recorded."""

    def confirmed(self, version: int) -> bool:
        return self._proofs.get(version, self._past_proofs.get(version)) is Proof.CONFIRMED

    def finding(self, version: int) -> Finding | None:
        """Of a version that is loaded, or was a while ago: samples end after their version went."""
        return self._findings.get(version, self._past.get(version))

    # -- around a load ------------------------------------------------------------------------

    def expect(self, version: int) -> None:
        """The bytes of this version are about to be applied."""
        self._pending.add(version)

    def give_up(self, version: int) -> None:
        """They were not."""
        self._pending.discard(version)
        self._wake()

    async def look(self, finding: Finding, before: Finding | None = None) -> None:
        """What the probes gave after the load.  Raises Quarantined.

        `before` is what they gave before it; without it, or cold, only the fleet's record is asked.
        """
        self._findings[finding.version] = finding
        self._proofs[finding.version] = Proof.PENDING
        try:
            if unmoved(before, finding):
                self._condemn(finding, f"fingerprint is still that of version {before.version if before else '?'}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RECORD_S):
                    await self._prove(finding)
        finally:
            self._pending.discard(finding.version)
            self._wake()

    async def checked(self, cold: Finding) -> None:
        """A spare process loaded a version cold: its word is the record's.  Raises Quarantined."""
        if not self.recording:
            return
        try:
            await self._records.prove(cold, self.engine_class)
        except BusError as error:
            log.warning("fingerprint_not_recorded", version=cold.version, error=error.message)
        mine = self._findings.get(cold.version)
        if mine is not None:
            await self._prove(mine)

    def forget(self, loaded: Collection[int]) -> None:
        """Keep what was found of these versions only."""
        for version in [one for one in self._findings if one not in loaded]:
            self._past[version] = self._findings.pop(version)
            self._past_proofs[version] = self._proofs.pop(version, Proof.PENDING)
        for version in list(self._past)[:-REMEMBERED]:
            del self._past[version], self._past_proofs[version]

    # -- what others ask ----------------------------------------------------------------------

    async def settled(self, versions: Collection[int], timeout_s: float) -> bool:
        """Wait until none of these is pending; whether none of them was found wrong."""
        async with asyncio.timeout(timeout_s):
            while self._pending.intersection(versions):
                judged = self._judged
                await judged.wait()
        return not self._wrong.intersection(versions)

    async def watch(self) -> None:
        """Compare again whenever the records change.  Raises Quarantined."""

        async def heard(_: object) -> None:
            self._heard.set()

        subscription = await self._bus.subscribe_raw(self._records.subject(), heard)
        try:
            while True:
                timeout = LOOK_S if any(proof is not Proof.CONFIRMED for proof in self._proofs.values()) else None
                told = True
                try:
                    async with asyncio.timeout(timeout):
                        await self._heard.wait()
                except TimeoutError:
                    told = False
                self._heard.clear()
                for version, finding in list(self._findings.items()):
                    if (told or self._proofs.get(version) is not Proof.CONFIRMED) and version not in self._pending:
                        await self._prove(finding)
        finally:
            await self._bus.unsubscribe(subscription)

    async def _prove(self, finding: Finding) -> None:
        if not self.recording:
            return
        try:
            proof = await self._records.prove(finding, self.engine_class)
        except BusError as error:
            log.warning("fingerprint_not_recorded", version=finding.version, error=error.message)
            return
        if self._findings.get(finding.version) != finding:
            return  # other bytes are loaded meanwhile
        if proof is Proof.WRONG:
            self._condemn(finding, f"fingerprint {finding.fingerprint[:12]} is not the one on record")
        if self._proofs.get(finding.version) is not proof:
            self._proofs[finding.version] = proof
            self._on_change()

    def _condemn(self, finding: Finding, why: str) -> None:
        self._proofs[finding.version] = Proof.WRONG
        self._wrong.add(finding.version)
        metrics.QUARANTINES.inc()
        log.error("weights_wrong", version=finding.version, fingerprint=finding.fingerprint, why=why)
        raise Quarantined(f"version {finding.version}: {why}")

    def _wake(self) -> None:
        judged, self._judged = self._judged, asyncio.Event()
        judged.set()
