"""Which worker a session's turns go to, so that its KV cache is where they are.

Rendezvous hashing over the ready workers of the pool, weighted by their slots, with bounded load: no session is bound
to a worker that would then have more than `factor` times its share of the bound sessions.  The binding is kept in
Redis, where one script decides for all replicas; it lasts as long as turns come.  It is broken when its worker is gone,
draining, quarantined or without the version asked for, and to relieve it: it has no free slot, and either as many samples
wait there as it has slots or it is beyond its bound (workers came, sessions elsewhere ended), and another worker has a
free slot and room within its bound.  While its worker has a free slot nothing is gained by moving a session.

Redis away: the pure hash, which is right most of the time and needs nobody.  No ready worker: the pool, where
whoever comes first takes the turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

from rollgrid_contracts import keys, subjects
from rollgrid_contracts.checkpoints import PolicyState, staleness
from rollgrid_contracts.fleet import WorkerState
from rollgrid_contracts.jobs import Priority, VersionRule, WeightConstraint
from rollgrid_runtime.logging import get_logger
from rollgrid_runtime.rendezvous import ranked
from rollgrid_runtime.state import State, StateError

from . import metrics
from .affinity_lua import BOUND_TO, LOADS, PLACE, RELEASE
from .submission import Submission

log = get_logger(__name__)
AWAY_S = 1.0
"""After an answer that did not come, Redis is left alone for so long: a turn waits for it once, not each time."""
COUNT_EVERY_S = 5.0
LONGEST_NAME = 128
"""A session's own name goes into keys up to so many characters, a longer one as its digest."""
CALLS = "~"
"""Before the names that callers give (X-Session-Id): none of them is a session's."""
ANY_VERSION = WeightConstraint()


class Need(NamedTuple):
    """What a worker must have loaded for a turn."""

    policy: PolicyState
    weights: WeightConstraint = ANY_VERSION


class Placed(NamedTuple):
    """Where to publish a turn; `worker` None = to the pool, for anybody."""

    worker: str | None
    subject: str


class Affinity:
    """`alive` gives the workers with a lease (`rollgrid_runtime.leases`).  Run `count` as a task, for the metrics."""

    def __init__(
        self,
        alive: Callable[[], Mapping[str, WorkerState]],
        state: State,
        *,
        factor: float = 1.25,
        saturation: float = 1.0,
    ) -> None:
        self._alive, self._factor, self._saturation = alive, factor, saturation
        self._place, self._release, self._loads = state.script(PLACE), state.script(RELEASE), state.script(LOADS)
        self._bound_to = state.script(BOUND_TO)
        self._away_until = 0.0
        self._placed_at = float("-inf")

    async def place(
        self,
        pool: str,
        tenant: str,
        session: str,
        need: Need,
        *,
        priority: Priority = Priority.INTERACTIVE,
        last: str | None = None,
    ) -> Placed:
        """Where this turn goes.  Whoever publishes it makes sure of the subject's durable first (`durables`).

        `last` is the worker that had the session's last turn, where the caller knows it: it is tried first when no
        binding is left, so that a Redis that lost everything moves nobody.
        """
        workers = {name: one for name, one in self._alive().items() if one.pool == pool}
        fit = {name: one for name, one in workers.items() if unfit(one, need) is None}
        if not fit:
            metrics.PLACED.labels("pool").inc()
            return Placed(None, subjects.jobs_pool(pool, priority, tenant))
        name, self._placed_at = _short(session), time.monotonic()
        order = ranked(f"{tenant}:{name}", {one: state.slots for one, state in fit.items()})
        if last in fit:
            order = [last, *(one for one in order if one != last)]
        worker = await self._bound(pool, tenant, name, need, workers, order)
        return Placed(worker, subjects.jobs_worker(worker))

    async def _bound(
        self, pool: str, tenant: str, name: str, need: Need, workers: Mapping[str, WorkerState], order: list[str]
    ) -> str:
        """The worker of the binding, old or new; without Redis the first of the order."""
        if time.monotonic() < self._away_until:
            metrics.PLACED.labels("hash").inc()
            return order[0]
        named = [keys.affinity(pool, tenant, name), *(keys.bound(pool, one) for one in order)]
        facts = [fact for one in order for fact in (one, workers[one].slots, self._load(workers[one]))]
        member, prefix = f"{tenant}:{name}", keys.bound(pool, "")
        try:
            answer = await self._place(named, keys.AFFINITY_TTL_S, member, self._factor, prefix, *facts)
        except StateError as error:
            self._away_until = time.monotonic() + AWAY_S
            log.warning("affinity_by_hash", error=error.message)
            metrics.PLACED.labels("hash").inc()
            return order[0]
        worker, what, before = (part.decode() for part in answer)
        metrics.PLACED.labels(what).inc()
        if what == "moved":
            state = workers.get(before)
            metrics.REBINDS.labels(("gone" if state is None else unfit(state, need)) or "saturated").inc()
        return str(worker)

    async def of_call(self, submission: Submission) -> str | None:
        """The worker of a call that names an affinity; None = any."""
        if submission.affinity is None:
            return None
        need, policy = Need(submission.policy, submission.weights), submission.policy
        return (await self.place(policy.pool, submission.tenant, CALLS + submission.affinity, need)).worker

    async def bound_to(self, pool: str, tenant: str, session: str) -> str | None:
        """The worker of the session's binding, None = it has none, or Redis is away."""
        try:
            found: bytes | None = await self._bound_to([keys.affinity(pool, tenant, _short(session))])
        except StateError:
            return None
        return None if found is None else found.decode()

    async def release(self, pool: str, tenant: str, session: str) -> None:
        """The session has ended.  Redis away: the binding ends by itself."""
        name = _short(session)
        try:
            await self._release([keys.affinity(pool, tenant, name)], f"{tenant}:{name}", keys.bound(pool, ""))
        except StateError as error:
            log.warning("affinity_not_released", error=error.message)

    def _load(self, worker: WorkerState) -> str:
        if worker.waiting >= self._saturation * worker.slots:
            return "saturated"
        return "idle" if worker.busy < worker.slots and not worker.waiting else "full"

    async def count(self) -> None:
        """Until cancelled.  Where no session was placed for as long as bindings live, Redis is not asked."""
        while True:
            await asyncio.sleep(COUNT_EVERY_S)
            if time.monotonic() - self._placed_at > keys.AFFINITY_TTL_S + COUNT_EVERY_S:
                continue
            pools: dict[str, list[str]] = {}
            for name, state in self._alive().items():
                pools.setdefault(state.pool, []).append(name)
            try:
                found = [
                    count
                    for pool, names in pools.items()
                    for count in await self._loads([keys.bound(pool, one) for one in names])
                ]
                metrics.BOUND.set(sum(found))
                metrics.BOUND_MOST.set(max(found, default=0))
            except StateError as error:
                log.debug("bound_sessions_not_counted", error=error.message)


def unfit(worker: WorkerState, need: Need) -> str | None:
    """Why a turn may not go to this worker now, None = it may."""
    if worker.draining:
        return "draining"
    if worker.quarantined is not None:
        return "quarantined"
    return None if any(_serves(version, need) for version in _versions(worker, need.policy)) else "version"


def _versions(worker: WorkerState, policy: PolicyState) -> list[int]:
    return [one.version for one in worker.loaded if (one.policy, one.tenant) == (policy.policy, policy.tenant)]


def _serves(version: int, need: Need) -> bool:
    match need.weights.rule:
        case VersionRule.LATEST:
            return True
        case VersionRule.EXACT:
            return version == need.weights.value
        case VersionRule.MIN:
            return version >= need.weights.value
        case VersionRule.MAX_STALENESS:
            return staleness(need.policy, version) <= need.weights.value


def _short(session: str) -> str:
    return session if len(session) <= LONGEST_NAME else blake2b(session.encode(), digest_size=16).hexdigest()
