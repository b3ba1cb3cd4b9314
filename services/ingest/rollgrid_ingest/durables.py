"""The durables of RG_JOBS that samplers read: made before their first job, for nobody else would keep it for them."""

from __future__ import annotations

from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import LaneOpened
from rollgrid_contracts.topology import Consumer
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import ensure_consumer


class Durables:
    """Asks the server once for each durable and connection."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._known: set[str] = set()
        self._epoch = bus.connection_epoch

    async def ensure(self, consumer: Consumer) -> None:
        """Raises BusError."""
        if self._epoch != self._bus.connection_epoch:
            self._epoch = self._bus.connection_epoch
            self._known.clear()
        if consumer.durable not in self._known:
            await ensure_consumer(self._bus, consumer)
            await self._bus.publish_core(subjects.LANES_CONTROL, LaneOpened(durable=consumer.durable))
            self._known.add(consumer.durable)
