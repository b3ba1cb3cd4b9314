"""Who is the ledger: a lease in `rg_ledger`, renewed by compare-and-set.

The lease is for liveness.  Safety is the compare-and-set of every close: a ledger that has lost
its lease without knowing can do no harm.
"""

from __future__ import annotations

import asyncio
import time

from rollgrid_contracts.fleet import LedgerLease
from rollgrid_contracts.topology import LEDGER, LEDGER_LEASE_KEY, LEDGER_LEASE_S, ledger_consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, Conflict
from rollgrid_runtime.kv import Table, Versioned
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.provision import ensure_consumer

log = get_logger(__name__)
RENEW_S = LEDGER_LEASE_S / 4


class LeaseLost(Exception):
    """Another ledger has taken over."""


class Authority:
    """This process's claim to be the ledger.  `epoch` is 0 until it has been the ledger once."""

    def __init__(self, bus: Bus, holder: str) -> None:
        self._bus, self.holder = bus, holder
        self._table = Table(bus, LEDGER, LedgerLease)
        self._revision = 0
        self._fresh = True
        self._released = False
        self.epoch = 0
        self.renewed = time.monotonic()
        self.standing_by = False
        """The lease was read and is another's: nothing is wrong here, whatever ended the last session."""

    async def wait_turn(self) -> Versioned[LedgerLease] | None:
        """Return the lease to be replaced (None = there never was one) once it is free, stale or ours.

        A lease is stale when nobody has renewed it while this process watched for its whole length.
        The lease of an earlier life under the same name is ours, at this process's start only.
        """
        seen, since = -1, time.monotonic()
        self.standing_by = False
        while True:
            lease = await self._table.get(LEDGER_LEASE_KEY)
            if lease is None or lease.value.renewed_at == 0:
                return lease
            ours = lease.value.holder == self.holder and (self._fresh or lease.revision == self._revision)
            self._fresh = False
            if ours:
                return lease
            self.standing_by = True
            if lease.revision != seen:
                seen, since = lease.revision, time.monotonic()
            elif time.monotonic() - since > LEDGER_LEASE_S:
                log.info("lease_stale", holder=lease.value.holder, epoch=lease.value.epoch)
                return lease
            await asyncio.sleep(RENEW_S / 2)

    async def claim(self, lease: Versioned[LedgerLease] | None) -> int:
        """Become the ledger of the next epoch; raises Conflict when another was quicker.

        Its consumer exists before the lease names it, so a take-over never leaves RG_JOBS without
        a ledger's interest.
        """
        epoch = lease.value.epoch + 1 if lease else 1
        consumer = ledger_consumer(epoch)
        await ensure_consumer(self._bus, consumer)
        mine = self._lease(epoch)
        if lease is None:
            self._revision = await self._table.create(LEDGER_LEASE_KEY, mine)
        else:
            self._revision = await self._table.update(LEDGER_LEASE_KEY, mine, lease.revision)
        self.epoch, self.renewed, self._fresh, self._released = epoch, time.monotonic(), False, False
        return epoch

    async def keep(self) -> None:
        """Renew for ever; raises LeaseLost when another ledger holds the lease."""
        while True:
            await asyncio.sleep(RENEW_S)
            if self._released:
                continue
            try:
                self._revision = await self._table.update(LEDGER_LEASE_KEY, self._lease(self.epoch), self._revision)
                self.renewed = time.monotonic()
            except Conflict:
                await self.confirm()
            except BusError as error:
                log.warning("lease_not_renewed", error=error.message)

    async def confirm(self) -> None:
        """Make sure that the lease is still ours; raises LeaseLost, or BusError if that cannot be known."""
        lease = await self._table.get(LEDGER_LEASE_KEY)
        if lease is None or lease.value.epoch != self.epoch or lease.value.holder != self.holder:
            raise LeaseLost(f"lease is held by {lease.value.holder if lease else 'nobody'}")
        self._revision = lease.revision

    async def release(self) -> None:
        """Let the next ledger begin at once; losing this write only makes it wait for the lease to end."""
        self._released = True
        lease = self._lease(self.epoch, renewed_at=0.0)
        try:
            self._revision = await self._table.update(LEDGER_LEASE_KEY, lease, self._revision)
        except (Conflict, BusError) as error:
            log.info("lease_not_released", error=error.message)

    def _lease(self, epoch: int, renewed_at: float | None = None) -> LedgerLease:
        at = time.time() if renewed_at is None else renewed_at
        return LedgerLease(epoch=epoch, holder=self.holder, consumer=ledger_consumer(epoch).durable, renewed_at=at)
