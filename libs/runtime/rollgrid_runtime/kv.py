"""Typed tables over NATS key-value buckets: compare-and-set by revision, and level-triggered views."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.errors import (
    APIError,
    BucketNotFoundError,
    KeyDeletedError,
    KeyNotFoundError,
    KeyWrongLastSequenceError,
)
from nats.js.kv import KeyValue
from rollgrid_contracts import codec
from rollgrid_contracts.topology import Bucket

from . import bus_metrics
from .bus import WRONG_LAST_SEQUENCE, Bus
from .errors import BusError, Conflict
from .logging import get_logger

V = TypeVar("V")
log = get_logger(__name__)
RELIST_S = 10.0
"""How often a view re-reads its bucket whole: deletions by TTL and lost wake-ups are healed then."""
BURST_S = 0.05
"""Writes of so long cost a view one listing."""


class Versioned(NamedTuple, Generic[V]):
    value: V
    revision: int


class Table(Generic[V]):
    """One bucket holding values of one struct type."""

    def __init__(self, bus: Bus, bucket: Bucket, kind: type[V]) -> None:
        self._bus, self.bucket, self._kind = bus, bucket, kind
        self._store: KeyValue | None = None

    async def _kv(self) -> KeyValue:
        if self._store is None:
            try:
                self._store = await self._bus.js.key_value(self.bucket.name)
            except (BucketNotFoundError, NatsError, TimeoutError) as error:
                raise BusError(f"bucket {self.bucket.name}: {error!r}") from error
        return self._store

    async def get(self, key: str) -> Versioned[V] | None:
        store = await self._kv()
        try:
            entry = await store.get(key)
        except (KeyNotFoundError, KeyDeletedError):
            return None
        except (APIError, NatsError, TimeoutError) as error:
            raise BusError(f"{self.bucket.name}/{key}: {error!r}") from error
        if entry.value is None or entry.revision is None:
            return None
        return Versioned(codec.decode(entry.value, self._kind), entry.revision)

    async def create(self, key: str, value: V) -> int:
        """Write a key that must not exist; its revision.  Raises Conflict when it does."""
        store = await self._kv()
        try:
            written = await store.create(key, codec.encode(value))
            bus_metrics.written()
            return written
        except KeyWrongLastSequenceError as error:
            raise Conflict(f"{self.bucket.name}/{key} exists") from error
        except (APIError, NatsError, TimeoutError) as error:
            raise BusError(f"{self.bucket.name}/{key}: {error!r}") from error

    async def update(self, key: str, value: V, revision: int) -> int:
        """Compare-and-set against `revision`; the new one.  Raises Conflict when it has moved."""
        store = await self._kv()
        try:
            written = await store.update(key, codec.encode(value), last=revision)
            bus_metrics.written()
            return written
        except KeyWrongLastSequenceError as error:
            raise Conflict(f"{self.bucket.name}/{key} is past revision {revision}") from error
        except (APIError, NatsError, TimeoutError) as error:
            raise BusError(f"{self.bucket.name}/{key}: {error!r}") from error

    async def put(self, key: str, value: V) -> int:
        store = await self._kv()
        try:
            written = await store.put(key, codec.encode(value))
            bus_metrics.written()
            return written
        except (APIError, NatsError, TimeoutError) as error:
            raise BusError(f"{self.bucket.name}/{key}: {error!r}") from error

    async def delete(self, key: str, revision: int | None = None) -> None:
        """With `revision` only as of that one: raises Conflict when it has moved."""
        store = await self._kv()
        try:
            await store.delete(key, last=revision)
            bus_metrics.written()
        except (APIError, NatsError, TimeoutError) as error:
            if isinstance(error, APIError) and error.err_code == WRONG_LAST_SEQUENCE:  # nats-py tells `update` alone
                raise Conflict(f"{self.bucket.name}/{key} is past revision {revision}") from error
            raise BusError(f"{self.bucket.name}/{key}: {error!r}") from error

    async def remove(self, key: str, revision: int) -> None:
        """Delete a key as of that revision, leaving nothing behind: for keys that never come again.

        `delete` leaves a marker, for ever in a bucket without a TTL; but only that wakes views.
        """
        await self._bus.purge_below(f"KV_{self.bucket.name}", revision + 1, f"$KV.{self.bucket.name}.{key}")

    async def keys(self, under: str = ">") -> list[str]:
        """Every key that matches `under` (as subjects do), those of deleted entries too.

        They come from the stream's own count of subjects: nats-py's `keys()` waits for ever when the
        server dies meanwhile, and can take messages still on their way for an empty bucket.
        """
        prefix = f"$KV.{self.bucket.name}."
        try:
            info = await self._bus.js.stream_info(f"KV_{self.bucket.name}", subjects_filter=prefix + under)
        except (APIError, NatsError, TimeoutError) as error:
            raise BusError(f"listing {self.bucket.name}: {error!r}") from error
        return [subject.removeprefix(prefix) for subject in info.state.subjects or {}]

    async def items(self, under: str = ">") -> dict[str, Versioned[V]]:
        """Every live key and its value."""
        found: dict[str, Versioned[V]] = {}
        for key in await self.keys(under):
            entry = await self.get(key)
            if entry is not None:
                found[key] = entry
        return found


class View(Generic[V]):
    """A local copy of a table, kept current by wake-ups and re-read whole every `RELIST_S`.

    Run `follow` as a task; read `values`.  `loaded` is set once the first listing is in.
    """

    def __init__(
        self, bus: Bus, table: Table[V], on_change: Callable[[], None] | None = None, *, burst_s: float = BURST_S
    ) -> None:
        self._bus, self._table, self._on_change, self._burst_s = bus, table, on_change, burst_s
        self.values: dict[str, Versioned[V]] = {}
        self.loaded = asyncio.Event()
        self.changed = asyncio.Event()
        self._wake = asyncio.Event()

    async def follow(self) -> None:
        prefix = f"$KV.{self._table.bucket.name}."

        async def on_write(msg: Msg) -> None:
            self._wake.set()

        subscription = await self._bus.subscribe_raw(prefix + ">", on_write)
        try:
            while True:
                self._wake.clear()
                await self._relist()
                started = time.monotonic()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(RELIST_S):
                        await self._wake.wait()
                # a burst of writes costs one listing
                await asyncio.sleep(max(0.0, self._burst_s - (time.monotonic() - started)))
        finally:
            with contextlib.suppress(NatsError):
                await subscription.unsubscribe()

    async def _relist(self) -> None:
        try:
            fresh = await self._table.items()
        except BusError as error:
            log.warning("view_relist_failed", bucket=self._table.bucket.name, error=error.message)
            await asyncio.sleep(0.5)
            self._wake.set()
            return
        moved = fresh != self.values
        self.values = fresh
        self.loaded.set()
        if moved:
            self.changed.set()
            if self._on_change is not None:
                self._on_change()
