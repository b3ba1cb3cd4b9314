"""A client's idempotency key on a turn: the same key and body is the same turn, not a second one.

The key is claimed before the turn has its number and says which turn it became as soon as it has one, before the job is
stored.  Whoever finds it without a number meets the first request at its beginning, or one that died there.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.topology import IDEMPOTENCY
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import Conflict, RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger

from .idempotency import Idempotency
from .submission import Caller

log = get_logger(__name__)
BEGINNING_S = 30.0
"""A claim without a turn is its dead holder's after so long."""


class TurnKey(NamedTuple):
    """A claimed key.  `call_id` and `deadline` of the turn that it already names, empty for a new one."""

    name: str
    record: IdempotencyRecord
    revision: int

    @property
    def call_id(self) -> str:
        return self.record.batch_id

    @property
    def deadline(self) -> float:
        return self.record.deadline


class TurnKeys:
    def __init__(self, bus: Bus) -> None:
        self._claims = Idempotency(bus)
        self._table: Table[IdempotencyRecord] = Table(bus, IDEMPOTENCY, IdempotencyRecord)
        self._left: dict[tuple[str, float], float] = {}
        """Claims of requests that have ended here without taking them back, by name and the second of the claim."""

    async def claim(self, caller: Caller, session: str, run: str) -> TurnKey | None:
        """None without a key.  Raises idempotency_conflict (another body), session_busy (it is being begun), BusError."""
        if not caller.idempotent:
            return None
        key = f"{session}\x1f{caller.key}"
        name = ids.idempotency_key(caller.tenant, key)
        now = time.time()
        fresh = IdempotencyRecord(
            body_sha256=caller.digest, run=run, batch_id="", key=key, groups=1, cursor=0, created_at=now
        )
        try:
            found = await self._claims.claim(caller.tenant, fresh)
            left = (name, found.record.created_at) in self._left
            if not left:
                if found.fresh or found.record.batch_id:
                    return TurnKey(name, found.record, found.revision)
                if now - found.record.created_at < BEGINNING_S:
                    raise beginning()
            return TurnKey(name, fresh, await self._table.update(name, fresh, found.revision))
        except Conflict as error:
            raise beginning() from error
        except BaseException:  # no answer, and the claim may be there
            self._leave(name, fresh)
            raise

    async def names(self, key: TurnKey, call_id: str, deadline: float) -> TurnKey:
        """The key stands for this turn from now on.  Raises session_busy when somebody took it over, BusError."""
        record = msgspec.structs.replace(key.record, batch_id=call_id, deadline=deadline)
        try:
            return TurnKey(key.name, record, await self._table.update(key.name, record, key.revision))
        except Conflict as error:
            raise beginning() from error

    async def release(self, key: TurnKey) -> None:
        """No turn came of it: the next request begins one.  Somebody else's since: it stays his.

        Never fails; a claim ends by itself.
        """
        self._leave(key.name, key.record)
        try:
            await self._table.delete(key.name, key.revision)
        except RollgridError as error:
            log.info("turn_key_not_released", error=error.message)

    def _leave(self, name: str, record: IdempotencyRecord) -> None:
        """Whoever comes here with this key next need not wait until the claim has ended."""
        now = time.time()
        while self._left and next(iter(self._left.values())) < now:
            del self._left[next(iter(self._left))]
        self._left[name, record.created_at] = now + BEGINNING_S


def beginning() -> RollgridError:
    return RollgridError(
        ErrorCode.SESSION_BUSY,
        "the first request with this Idempotency-Key is beginning its turn",
        field="Idempotency-Key",
        retry_after_s=1.0,
    )
