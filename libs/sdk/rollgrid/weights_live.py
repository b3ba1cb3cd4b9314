"""From a committed version to one that the fleet runs: what to ask, when it is so, and why it never will be."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from rollgrid_contracts.fleet import LoadedVersion, WorkerState

from . import calls
from .answers import Policy, Version
from .errors import DeadlineExceeded, VersionRefused, VersionRolledBack
from .transport import Call

if TYPE_CHECKING:
    from .transport import AsyncTransport, SyncTransport

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 0.5


def in_rotation(worker: WorkerState) -> bool:
    return not worker.draining and worker.quarantined is None


def serves(policy: Policy, worker: WorkerState, version: int) -> bool:
    """Whether requests that may take `version` get it, or a later one, from this worker."""
    loaded = [one for one in worker.loaded if (one.tenant, one.policy) == (policy.tenant, policy.policy)]
    if any(one.version == version for one in loaded):
        return True
    return policy.desired != version and any(one.current and one.version > version for one in loaded)


def live_on(policy: Policy, version: int, min_workers: int | None = None) -> bool:
    """`min_workers` workers in rotation serve it; without a number all that are there, and there is one."""
    ready = [worker for worker in policy.workers if in_rotation(worker) and runs_policy(policy, worker.loaded)]
    serving = sum(serves(policy, worker, version) for worker in ready)
    return serving >= min_workers if min_workers is not None else 0 < len(ready) == serving


def runs_policy(policy: Policy, loaded: tuple[LoadedVersion, ...]) -> bool:
    return any((one.tenant, one.policy) == (policy.tenant, policy.policy) for one in loaded)


class LiveWait:
    """The decisions of one wait: `next_call` says what to ask, `accept` what the answer means."""

    def __init__(self, policy: str, version: int, timeout: float, min_workers: int | None, revision: int = 0) -> None:
        """Answers older than `revision` of the policy say nothing: servers learn of a write a moment after it."""
        self._policy, self._version, self._timeout, self._min_workers = policy, version, timeout, min_workers
        self._revision = revision
        self.deadline = time.monotonic() + timeout
        self._seen: Policy | None = None
        self._asked = False
        self._pause_s = _FIRST_PAUSE_S

    def next_call(self) -> Call[Any]:
        """The policy; and the version itself while the policy does not desire it."""
        if self._is_doubtful() and not self._asked:
            return calls.version(self._policy, self._version)
        return calls.policy(self._policy)

    def accept(self, answer: Policy | Version) -> bool:
        """True once the version is live.

        Raises VersionRefused, VersionRolledBack.
        """
        if isinstance(answer, Version):
            _raise_ended(answer)
            self._asked = True
        else:
            self._seen, self._asked = answer, False
            if answer.revision < self._revision:
                self._asked = True
                return False
            if self._is_doubtful():
                return False  # the next call asks why
            if live_on(answer, self._version, self._min_workers):
                return True
        return False

    def pause(self) -> float:
        """Seconds until the next call."""
        if self._is_doubtful() and not self._asked:
            return 0.0
        self._pause_s = min(self._pause_s * 1.3, _MAX_PAUSE_S)
        return min(self._pause_s, max(0.0, self.deadline - time.monotonic()))

    def _is_doubtful(self) -> bool:
        return self._seen is not None and self._seen.desired < self._version

    def late(self, error: DeadlineExceeded) -> DeadlineExceeded:
        """What to raise when the time is over: where the version was seen last."""
        policy = self._seen
        if policy is None:
            return error
        running = {
            worker.worker: [one.version for one in worker.loaded if one.policy == policy.policy]
            for worker in policy.workers
        }
        troubles = {w.worker: trouble for w in policy.workers if (trouble := w.quarantined or w.weights_problem)}
        wanted = "" if self._min_workers is None else f" on {self._min_workers} workers"
        return DeadlineExceeded(
            f"{policy.policy}@{self._version} is not live{wanted} after {self._timeout:g} s: desired {policy.desired}, "
            f"newest {policy.newest}, running {running or 'nowhere'}" + (f", troubles {troubles}" if troubles else "")
        )


def _raise_ended(state: Version) -> None:
    error = state.error
    if state.status == "refused" and error is not None:
        raise VersionRefused(state.policy, state.version, error.code, error.message, error.field, error.limit)
    if state.status == "rolled_back":
        code, message = (
            (error.code, error.message) if error is not None else ("version_unavailable", "somebody went back")
        )
        raise VersionRolledBack(
            state.policy, state.version, code, message, error.field if error else None, error.limit if error else None
        )


class PublishedVersion:
    """A committed version; samples may run on it from now on."""

    def __init__(self, transport: SyncTransport, policy: str, version: int, revision: int = 0) -> None:
        """`revision`: of the policy, as far as a write of ours has moved it."""
        self._transport, self._revision = transport, revision
        self.policy = policy
        self.version = version

    def wait_live(self, timeout: float = 120.0, *, min_workers: int | None = None) -> PublishedVersion:
        """Return once `min_workers` workers serve it, or without a number all that are in rotation.

        A LoRA version is served once it is loaded beside the base.  A later version counts as well, once
        it is what should run.

        Raises:
            DeadlineExceeded: they do not after `timeout` seconds.
            VersionRefused: its bytes were examined and refused.
            VersionRolledBack: it was desired, and the fleet has gone back to an earlier one.
        """
        wait = LiveWait(self.policy, self.version, timeout, min_workers, self._revision)
        try:
            while not wait.accept(self._transport.send(wait.next_call(), deadline=wait.deadline, budget_s=timeout)):
                time.sleep(wait.pause())
        except DeadlineExceeded as error:
            raise wait.late(error) from error
        return self

    def __repr__(self) -> str:
        return f"PublishedVersion({self.policy}@{self.version})"


class AsyncPublishedVersion:
    """As `PublishedVersion`."""

    def __init__(self, transport: AsyncTransport, policy: str, version: int, revision: int = 0) -> None:
        """`revision`: of the policy, as far as a write of ours has moved it."""
        self._transport, self._revision = transport, revision
        self.policy = policy
        self.version = version

    async def live(self, timeout: float = 120.0, *, min_workers: int | None = None) -> AsyncPublishedVersion:
        """As `PublishedVersion.wait_live`."""
        wait = LiveWait(self.policy, self.version, timeout, min_workers, self._revision)
        while True:
            try:
                answer = await self._transport.send(wait.next_call(), deadline=wait.deadline, budget_s=timeout)
            except DeadlineExceeded as error:
                raise wait.late(error) from error
            if wait.accept(answer):
                return self
            await asyncio.sleep(wait.pause())

    def __repr__(self) -> str:
        return f"AsyncPublishedVersion({self.policy}@{self.version})"
