"""How much may be in flight: requests and bodies of this process, jobs and samples of one tenant."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.topology import JOBS, TRAJECTORIES, Header
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, RollgridError
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.reading import Tail, read_after

log = get_logger(__name__)
RECOUNT_S = 30.0
REMEMBERED_CLOSES = 50_000
LOOK_AGE_S = 1.0
LOOK_FROM = 0.1
"""Share of RG_JOBS below which nobody's share of it is asked for."""


def too_much(message: str, limit: str, retry_after_s: float = 1.0) -> RollgridError:
    """429: come again."""
    return RollgridError(ErrorCode.QUEUE_FULL, message, limit=limit, retry_after_s=retry_after_s)


class Gate:
    """Counts what this process holds at once, by tenant; refuses instead of growing.

    A tenant may hold at most `share` / (1 - `share`) times what is left free: alone it gets `share` of
    the limit, with others less, and whatever the busy ones hold, who comes new finds room.
    """

    def __init__(self, name: str, limit: int, share: Callable[[], float] = lambda: 1.0) -> None:
        """`share` is asked each time; 1 = tenants are not told apart."""
        self.name, self.limit, self._share = name, limit, share
        self.held = 0
        self._tenants: Counter[str] = Counter()

    def check(self, tenant: str, amount: int = 1) -> None:
        """Raises queue_full when there is no room for `amount` more of `tenant`'s."""
        free, limit = self.limit - self.held, f"{self.name}={self.limit}"
        if amount > free:
            raise too_much(f"this server holds {self.held} of {limit}", limit)
        share = self._share()
        if share < 1 and (self._tenants[tenant] + amount) * (1 - share) > free * share:
            held = f"this tenant holds {self._tenants[tenant]} of {limit}"
            raise too_much(f"{held}: what is left is for others", f"{limit}, tenant_share={share:g}")

    def take(self, tenant: str, amount: int = 1) -> None:
        """Raises queue_full."""
        self.check(tenant, amount)
        self.held += amount
        self._tenants[tenant] += amount

    def give(self, tenant: str, amount: int = 1) -> None:
        self.held -= amount
        self._tenants[tenant] -= amount
        if not self._tenants[tenant]:
            del self._tenants[tenant]

    @contextlib.contextmanager
    def holding(self, tenant: str, amount: int = 1) -> Iterator[None]:
        self.take(tenant, amount)
        try:
            yield
        finally:
            self.give(tenant, amount)


class JobsShare:
    """How much of RG_JOBS one tenant may fill, by the rule of `Gate`: a flood leaves room for others.

    The stream says now and then how many jobs of each tenant it holds (their size is taken to be the
    mean); what this process adds in between is counted here.
    """

    def __init__(self, bus: Bus, share: Callable[[], float]) -> None:
        self._bus, self._share = bus, share
        self._bound, self._bytes, self._mean, self._looked_at = 0, 0, 0.0, float("-inf")
        self._held: dict[str, float] = {}
        self._added: Counter[str] = Counter()

    async def check(self, tenant: str, size: int) -> None:
        """Take room for jobs of `size` bytes.  Raises queue_full when the tenant has its share already, BusError."""
        share = self._share()
        if share >= 1:
            return
        if time.monotonic() - self._looked_at > LOOK_AGE_S:
            await self._look()
        free = self._bound - self._bytes - self._added.total()
        if self._bound > 0 and free < (1 - LOOK_FROM) * self._bound:
            if tenant not in self._held:
                self._held[tenant] = self._mean * await self._bus.count(JOBS.name, subjects.jobs_of(tenant))
            if (self._held[tenant] + self._added[tenant] + size) * (1 - share) > free * share:
                limit = f"max_bytes of {JOBS.name}={self._bound}, tenant_share={share:g}"
                raise too_much("this tenant's jobs fill its share of the queue: what is left is for others", limit)
        self._added[tenant] += size

    async def _look(self) -> None:
        self._looked_at = time.monotonic()
        info = await self._bus.stream_info(JOBS.name)
        self._bound, self._bytes = int(info.config.max_bytes or 0), int(info.state.bytes)
        self._mean = self._bytes / max(1, int(info.state.messages))
        self._held.clear()
        self._added.clear()


class _OpenJob(msgspec.Struct):
    """What counting needs of a job."""

    group_id: str
    n: int


class TenantGauge:
    """Open samples of one tenant: jobs in RG_JOBS without a close in RG_TRAJECTORIES.

    Counted anew from the stream at start and now and then, so it survives restarts and sees the
    jobs of other ingest processes with that delay; in between, own submissions and every close count.
    """

    def __init__(self, bus: Bus, tenant: str, limit: int) -> None:
        self._bus, self._tenant, self._limit = bus, tenant, limit
        self._open: dict[str, int] = {}
        self._pending: dict[str, int] = {}
        self._stored_meanwhile: dict[str, int] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self.counted = asyncio.Event()

    @property
    def samples(self) -> int:
        return sum(self._open.values()) + sum(self._pending.values())

    def reserve(self, groups: Mapping[str, int]) -> None:
        """Take room for these groups (id → samples), all or none; known ones cost nothing.

        Raises queue_full naming the limit.
        """
        fresh = {g: n for g, n in groups.items() if g not in self._open and g not in self._pending}
        wanted = sum(fresh.values())
        if wanted > self._limit:
            raise RollgridError(
                ErrorCode.LIMIT_EXCEEDED,
                f"{wanted} samples in one request, the limit is max_inflight_samples={self._limit}",
                field="n",
                limit=f"max_inflight_samples={self._limit}",
            )
        if self.samples + wanted > self._limit:
            limit = f"max_inflight_samples={self._limit}"
            raise too_much(f"{self.samples} samples of this tenant are in flight, the limit is {limit}", limit)
        self._pending.update(fresh)

    def settle(self, groups: Mapping[str, int], stored: bool) -> None:
        """The groups' jobs are in the stream, or are not."""
        for group_id, n in groups.items():
            if self._pending.pop(group_id, None) is not None and stored and group_id not in self._closed:
                self._open[group_id] = n
                self._stored_meanwhile[group_id] = n

    async def follow(self) -> None:
        """Count, then follow closes, for ever."""
        subject = subjects.closes_of(self._tenant)
        async with Tail(self._bus, TRAJECTORIES.name, subject, self._on_close) as tail:
            while True:
                try:
                    await self._recount()
                except BusError as error:
                    log.warning("inflight_not_counted", tenant=self._tenant, error=error.message)
                    await asyncio.sleep(1.0)
                    continue
                epoch, waited = self._bus.connection_epoch, 0.0
                loop = asyncio.get_running_loop()
                started = loop.time()
                while waited < RECOUNT_S and epoch == self._bus.connection_epoch:
                    await tail.wait(RECOUNT_S)
                    waited = loop.time() - started

    def _on_close(self, headers: Mapping[str, str]) -> None:
        group_id = headers.get(Header.GROUP.value)
        if group_id is None:
            return
        self._open.pop(group_id, None)
        self._closed[group_id] = None
        while len(self._closed) > REMEMBERED_CLOSES:
            self._closed.popitem(last=False)

    async def _recount(self) -> None:
        subject = subjects.jobs_of(self._tenant)
        found: dict[str, int] = {}
        self._stored_meanwhile.clear()
        sequence, more = 0, True
        while more:
            page = await read_after(self._bus, JOBS.name, subject, sequence, 256)
            for stored in page.messages:
                sequence = stored.sequence
                job = msgspec.msgpack.decode(await self._bus.resolve(stored.data, stored.headers), type=_OpenJob)
                if job.group_id not in self._closed:
                    found[job.group_id] = job.n
            more = page.pending > 0 and bool(page.messages)
        # closes that arrived while counting have left `_open` and stand in `_closed`
        found |= self._stored_meanwhile
        self._stored_meanwhile.clear()
        self._open = {group_id: n for group_id, n in found.items() if group_id not in self._closed}
        self.counted.set()


class TenantGauges:
    """One gauge per tenant that submits, made at its first submission; none without a limit."""

    def __init__(self, bus: Bus, limit: int | None) -> None:
        self._bus, self._limit = bus, limit
        self._gauges: dict[str, TenantGauge] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def of(self, tenant: str) -> TenantGauge | None:
        """Raises not_ready when the first count does not come in time."""
        if self._limit is None:
            return None
        gauge = self._gauges.get(tenant)
        if gauge is None:
            gauge = self._gauges[tenant] = TenantGauge(self._bus, tenant, self._limit)
            self._tasks.add(asyncio.create_task(gauge.follow()))
        try:
            async with asyncio.timeout(5):
                await gauge.counted.wait()
        except TimeoutError as error:
            raise RollgridError(
                ErrorCode.NOT_READY, "the tenant's open samples are not counted yet", retry_after_s=1.0
            ) from error
        return gauge

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
