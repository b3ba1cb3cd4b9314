"""Durable publishes that share their flushes.

JetStream flushes once per publish, and about four times per atomic batch whatever its size
(measured).  What is asked for while a round is on its way goes out together in the next one: an
idle sender waits for nobody, a busy one pays a fraction of a flush per message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollgrid_contracts.topology import DEDUPE_HEADER

from .bus import ATOMIC_BATCH_MIN, Bus, Outgoing, PubAck
from .errors import RollgridError

ROUND_ITEMS = 64
ROUND_BYTES = 2 * 1024 * 1024


@dataclass(slots=True, eq=False)
class _Asked:
    subject: str
    payload: bytes
    msg_id: str
    headers: Mapping[str, str]
    answer: asyncio.Future[PubAck]


class GroupCommit:
    """For messages of one stream.  `run` works as a task beside those who call `publish`."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._asked: list[_Asked] = []
        self._under_way: list[_Asked] = []
        self._wake = asyncio.Event()

    async def publish(
        self, subject: str, payload: bytes, *, msg_id: str, headers: Mapping[str, str] | None = None
    ) -> PubAck:
        """Store an encoded message once per `msg_id`; raises as `Bus.publish`."""
        answer: asyncio.Future[PubAck] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked(subject, payload, msg_id, headers or {}, answer))
        self._wake.set()
        return await answer

    async def run(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._asked:
                    self._under_way = self._take()
                    await self._round(self._under_way)
        finally:
            for asked in (*self._under_way, *self._asked):
                asked.answer.cancel()

    def _take(self) -> list[_Asked]:
        size, count = 0, 0
        for asked in self._asked[:ROUND_ITEMS]:
            size += len(asked.payload)
            if count and size > ROUND_BYTES:
                break
            count += 1
        taken, self._asked = self._asked[:count], self._asked[count:]
        return [asked for asked in taken if not asked.answer.done()]

    async def _round(self, asked: list[_Asked]) -> None:
        if len(asked) >= ATOMIC_BATCH_MIN:
            try:
                items = [Outgoing(a.subject, a.payload, {**a.headers, DEDUPE_HEADER: a.msg_id}) for a in asked]
                sequences = await self._bus.publish_batch(items)
            except RollgridError:
                # a duplicate or a full stream refuses the batch whole: let each have its own answer
                await self._singly(asked)
            else:
                for one, sequence in zip(asked, sequences, strict=True):
                    _settle(one, PubAck(sequence, False))
        else:
            await self._singly(asked)

    async def _singly(self, asked: list[_Asked]) -> None:
        async def one(a: _Asked) -> PubAck:
            return await self._bus.publish(a.subject, a.payload, msg_id=a.msg_id, headers=a.headers)

        for a, outcome in zip(asked, await asyncio.gather(*map(one, asked), return_exceptions=True), strict=True):
            _settle(a, outcome)


def _settle(asked: _Asked, outcome: Any) -> None:
    if asked.answer.done():
        return
    if isinstance(outcome, BaseException):
        asked.answer.set_exception(outcome)
    else:
        asked.answer.set_result(outcome)
