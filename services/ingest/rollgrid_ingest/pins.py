"""Versions that accepted jobs need: held against garbage collection until their batch is over.

Written before the jobs, so there is no moment at which a job waits for a version that nobody keeps.
The list of versions is read once more behind the pin: one that is going by then is gone, one that is not
stays, because whoever deletes looks at the pins after the list.  A session's pin is dropped when it ends here;
checkpoint-sync drops what is left once its batch has closed, or its time has passed.
"""

from __future__ import annotations

from collections import OrderedDict

from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import Pin, PolicyState, pin_key
from rollgrid_contracts.jobs import VersionRule
from rollgrid_contracts.topology import PINS, POLICIES
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger

from .availability import gone, is_collected
from .submission import Submission

log = get_logger(__name__)
MARGIN_S = 120.0
"""Behind the last deadline: the ledger may close a while after it."""
REMEMBERED_PINS = 50_000


class Pins:
    def __init__(self, bus: Bus) -> None:
        self._table: Table[Pin] = Table(bus, PINS, Pin)
        self._policies: Table[PolicyState] = Table(bus, POLICIES, PolicyState)
        self._held: OrderedDict[str, None] = OrderedDict()

    async def hold(self, submission: Submission, batch_id: str, deadline: float) -> None:
        """One write for a batch that asks for an exact version, none for others.  Raises version_gone, BusError."""
        await self._hold(submission, batch_id, batch_id, deadline)

    async def hold_turn(self, submission: Submission, until: float) -> None:
        """As `hold`, for a turn: its session needs the version until `until`, or until its group has closed.

        One write per session, whose holder is the session."""
        place = submission.turn
        if place is None or submission.weights.rule is not VersionRule.EXACT:
            return
        key = _key(submission, place.session.session)
        if key in self._held:
            return
        await self._hold(submission, place.session.session, place.batch_id, until)
        self._held[key] = None
        while len(self._held) > REMEMBERED_PINS:
            self._held.popitem(last=False)

    async def drop_session(self, policy: PolicyState, version: int, session: str) -> None:
        """It has ended: no swap waits for it any more.  Never fails; without this the pin ends with its group."""
        key = pin_key(policy.tenant, policy.policy, version, session)
        try:
            if (pin := await self._table.get(key)) is not None:
                await self._table.remove(key, pin.revision)
        except BusError as error:
            log.info("pin_not_dropped", holder=session, error=error.message)

    async def _hold(self, submission: Submission, holder: str, batch_id: str, deadline: float) -> None:
        asked, policy = submission.weights, submission.policy
        if asked.rule is not VersionRule.EXACT:
            return
        pin = Pin(until=deadline + MARGIN_S, batch_id=batch_id, tenant=submission.tenant)
        await self._table.put(_key(submission, holder), pin)
        found = await self._policies.get(ids.policy_key(policy.tenant, policy.policy))
        if found is not None and is_collected(found.value, asked.value):
            await self.drop(submission, holder)
            raise gone(found.value, asked.value, submission.weights_field)

    async def drop(self, submission: Submission, holder: str) -> None:
        """The batch was given up; without this the pin ends by itself."""
        if submission.weights.rule is VersionRule.EXACT:
            try:
                await self._table.delete(_key(submission, holder))
            except BusError as error:
                log.info("pin_not_dropped", holder=holder, error=error.message)


def _key(submission: Submission, holder: str) -> str:
    policy = submission.policy
    return pin_key(policy.tenant, policy.policy, submission.weights.value, holder)
