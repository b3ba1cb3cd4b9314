"""Sessions that keep one version and play here, and whether a version will ever be here again.

LoRA versions stay side by side while somebody holds a pin.  Full weights are replaced: between two turns of a
session that was played here, and whose pin is held, the swap waits within the grace, and the session's turns
are played meanwhile.  Sessions of other workers do not delay it.  A session's first turn settles its version, and
ingest writes the pin behind it: until that can be there the session counts as holding it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Iterator

from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, PolicyState
from rollgrid_contracts.jobs import SampleGroup, VersionRule
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from .desired import Wanted, adopted
from .pins import Pins

log = get_logger(__name__)
REMEMBERED = 20_000
PIN_WRITTEN_S = 3.0
"""Behind the end of a first turn, the pin is there after so long, or the turn made none."""
LOOK_S = 0.25
"""While a swap waits, the pins are looked at so often."""


class PinnedSessions:
    """Those that were played here, and their version."""

    def __init__(self, pins: Pins) -> None:
        self._pins = pins
        self._versions: OrderedDict[str, int] = OrderedDict()
        self._beginning: set[str] = set()
        """Sessions whose first turn is under way."""
        self._begun: dict[str, float] = {}
        """Sessions whose first turn has just ended, and until when (monotonic) their pin may yet come, in that order."""

    @contextlib.contextmanager
    def playing(self, job: SampleGroup, version: int) -> Iterator[None]:
        """A turn that this version must make."""
        if job.session is None:
            yield
            return
        session, first = job.session.session, job.weights.rule is not VersionRule.EXACT
        self._versions[session] = version
        self._versions.move_to_end(session)
        while len(self._versions) > REMEMBERED:
            self._versions.popitem(last=False)
        if not first:
            yield
            return
        self._beginning.add(session)
        try:
            yield
        finally:
            self._beginning.discard(session)
            self._begun.pop(session, None)
            self._begun[session] = time.monotonic() + PIN_WRITTEN_S
            self._forget_begun()

    def known(self, job: SampleGroup) -> bool:
        """Whether the job is a turn of such a session, on the same version."""
        if job.session is None or job.weights.rule is not VersionRule.EXACT:
            return False
        return self._versions.get(job.session.session) == job.weights.value

    async def released(self, version: int) -> None:
        """Return when none of them holds the version any more; unknown pins are held."""
        while True:
            self._forget_begun()
            mine = [session for session, kept in self._versions.items() if kept == version]
            for session in mine:
                if session in self._beginning or session in self._begun:
                    break
                try:
                    if await self._pins.holds(version, session):
                        break
                except BusError as error:
                    log.warning("pin_unreadable", session=session, error=error.message)
                    break
                self._versions.pop(session, None)
            else:
                return
            await asyncio.sleep(LOOK_S)

    def _forget_begun(self) -> None:
        now = time.monotonic()
        while self._begun and self._begun[first := next(iter(self._begun))] < now:
            del self._begun[first]


def lost(version: int, want: Wanted, state: PolicyState | None) -> bool:
    """Whether nothing in the policy's state would bring back a version that is not loaded."""
    if state is None or version > state.newest or version in {one.version for one in want.versions}:
        return False
    coming = {state.desired} if state.rollout is None else {state.desired, state.rollout.previous}
    if version in coming:
        return False
    bases = {want.full.version, *(_full(adopted(state, one)) for one in coming)}
    found = adopted(state, version)
    return found.kind is CheckpointKind.FULL or found.going or found.base_version not in bases


def _full(version: AdoptedVersion) -> int:
    """The full weights under it."""
    return version.version if version.kind is CheckpointKind.FULL else version.base_version
