"""One durable read with bounded work: heartbeats for all that is held, a drain that ends it."""

from __future__ import annotations

import asyncio
import contextlib

from rollgrid_contracts.topology import Consumer
from rollgrid_runtime import provision
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError, ConsumerGone
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.pulling import Delivery

from .handler import Handler

log = get_logger(__name__)
IDLE_S = 0.25


class Reader:
    """At most `limit` events are held.  `run` until `drain` or a cancellation; `cancel` gives back what is held."""

    def __init__(self, bus: Bus, consumer: Consumer, handler: Handler, limit: int) -> None:
        self._bus, self._consumer, self._handler, self._limit = bus, consumer, handler, limit
        self._held: dict[asyncio.Task[None], Delivery] = {}
        self._stopping = False
        self._fetched_last = asyncio.Event()

    @property
    def held(self) -> int:
        return len(self._held)

    async def ensure_consumer(self) -> None:
        await provision.ensure_consumer(self._bus, self._consumer)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            heart = group.create_task(self._heartbeat())
            await self._work()
            while self._held:
                await asyncio.wait(self._held)
            heart.cancel()

    async def drain(self) -> None:
        self._stopping = True
        await self._fetched_last.wait()
        while self._held:
            await asyncio.wait(self._held)

    async def cancel(self) -> None:
        for task in list(self._held):
            task.cancel()
        await asyncio.gather(*self._held, return_exceptions=True)

    async def _work(self) -> None:
        puller = self._bus.puller(self._consumer)
        while not self._stopping:
            free = self._limit - len(self._held)
            if free <= 0:
                await asyncio.wait(self._held, return_when=asyncio.FIRST_COMPLETED)
                continue
            try:
                deliveries = await puller.fetch(free, IDLE_S)
            except ConsumerGone:
                log.warning("consumer_gone", durable=self._consumer.durable)
                await self._restore_consumer()
                continue
            except BusError as error:
                log.warning("fetch_failed", error=error.message)
                await asyncio.sleep(IDLE_S)
                continue
            for delivery in deliveries:
                task = asyncio.create_task(self._handle(delivery))
                self._held[task] = delivery
                task.add_done_callback(self._held.pop)
        with contextlib.suppress(BusError):
            await puller.close()
        self._fetched_last.set()

    async def _handle(self, delivery: Delivery) -> None:
        try:
            await self._handler.handle(delivery)
        except asyncio.CancelledError:
            with contextlib.suppress(BusError):
                await delivery.nak()
            raise
        except BusError as error:  # the ack did not go out: the event comes again, its msg-id stays
            log.warning("ack_failed", sequence=delivery.sequence, error=error.message)

    async def _restore_consumer(self) -> None:
        try:
            await self.ensure_consumer()
        except BusError as error:
            log.warning("consumer_not_restored", error=error.message)
            await asyncio.sleep(1)

    async def _heartbeat(self) -> None:
        """Tell the server every third of the ack-wait that what is held is being worked on."""
        while True:
            await asyncio.sleep(self._bus.settings.ack_wait_s / 3)
            for delivery in list(self._held.values()):
                try:
                    await delivery.in_progress()
                except BusError as error:
                    log.warning("heartbeat_failed", error=error.message)
                    break
