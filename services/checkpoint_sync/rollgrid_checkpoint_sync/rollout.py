"""How a version reaches the workers of a pool: pure decisions over the policy's state and the leases.

A rollout names the workers that may apply its version; all others keep `previous`, the last version
that was everywhere.  Canaries come first.  Once each of them has run the version for `canary_s`
without a complaint it is proven, and `at_once` workers more are named at a time.  When every ready
worker runs it, the rollout is over.

- A canary that complains sends the version back at once.  So does a deadline that finds it unproven:
  what no canary has shown to work is given to nobody.  A proven version that is late goes back or,
  with `alarm`, is opened to all.
- A worker that is gone is dropped and, if it was a canary, replaced; one that joins must have the
  version like the others.  What leaves (draining) or is out of rotation counts for nothing, unless
  it was named while it was ready.
- `advance` reads levels only: twice is once, and whoever comes next continues from the state alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace
from rollgrid_contracts.checkpoints import OnDeadline, PolicyState, Rollout, RolloutRequest
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import LoadedVersion, WorkerState

Named = Mapping[str, WorkerState]


def begun(version: int, previous: int, asked: RolloutRequest, deadline_s: float, now: float) -> Rollout | None:
    """The rollout of a version; None when all workers may apply it at once."""
    if not asked.canary and not asked.at_once:
        return None
    return Rollout(
        version=version,
        previous=previous,
        canary=asked.canary,
        canary_s=asked.canary_s,
        at_once=asked.at_once,
        started_at=now,
        deadline=now + (asked.deadline_s or deadline_s),
        on_deadline=asked.on_deadline,
    )


def advance(state: PolicyState, workers: Iterable[WorkerState], now: float) -> PolicyState:
    """The state as it should be, given who is there.  A rollout that failed waits for `finished`."""
    rollout = state.rollout
    if rollout is None or rollout.failure is not None:
        return state
    there = {worker.worker: worker for worker in workers if worker.pool == state.pool}
    rollout = replace(rollout, workers=tuple(name for name in rollout.workers if name in there))
    if not rollout.proven_at:
        rollout = _proving(state, rollout, there, now)
    if rollout.proven_at:
        rollout = _widened(state, rollout, there)
    complaint = _complaint(rollout, there)  # of those just named too: they may have met this version before
    if complaint is not None:
        return replace(state, rollout=_failed(rollout, complaint))
    if rollout.proven_at and not _missing(state, rollout, there):
        return replace(state, rollout=None)
    if now < rollout.deadline:
        return replace(state, rollout=rollout)
    if rollout.proven_at and rollout.on_deadline is OnDeadline.ALARM:
        return replace(state, rollout=None)
    return replace(state, rollout=_failed(rollout, _late(state, rollout, there)))


def missing(state: PolicyState, workers: Iterable[WorkerState]) -> list[str]:
    """The workers that the rollout still waits for; without one, those that do not run what is desired."""
    there = {worker.worker: worker for worker in workers if worker.pool == state.pool}
    rollout = state.rollout or Rollout(version=state.desired, previous=state.desired)
    return _missing(state, rollout, there)


def loaded(state: PolicyState, worker: WorkerState) -> list[LoadedVersion]:
    """What the worker has of this policy."""
    return [one for one in worker.loaded if (one.tenant, one.policy) == (state.tenant, state.policy)]


def runs(state: PolicyState, worker: WorkerState) -> int | None:
    """The policy's version that the worker gives new requests; None while it has none."""
    return next((one.version for one in loaded(state, worker) if one.current), None)


def holds(state: PolicyState, worker: WorkerState, version: int) -> bool:
    """Whether it runs `version` and nothing is wrong with its weights."""
    return runs(state, worker) == version and worker.quarantined is None and worker.weights_problem is None


def ready(state: PolicyState, worker: WorkerState) -> bool:
    """In rotation, staying, and with some version of the policy."""
    return not worker.draining and worker.quarantined is None and bool(loaded(state, worker))


def _staying(rollout: Rollout, there: Named) -> list[str]:
    return [name for name in rollout.workers if not there[name].draining]


def _candidates(state: PolicyState, rollout: Rollout, there: Named) -> list[str]:
    """Who may be named next: those that left `previous` already, then in an order of the version's own."""

    def order(name: str) -> tuple[bool, bytes]:
        own = f"{state.tenant}.{state.policy}.{rollout.version}.{name}"
        return runs(state, there[name]) == rollout.previous, hashlib.sha256(own.encode()).digest()

    free = [name for name, worker in there.items() if ready(state, worker) and name not in rollout.workers]
    return sorted(free, key=order)


def _proving(state: PolicyState, rollout: Rollout, there: Named, now: float) -> Rollout:
    """Name canaries as far as there are workers, and see how long all of them have held the version."""
    canaries = _staying(rollout, there)
    wanted = max(0, rollout.canary - len(canaries))
    new = _candidates(state, rollout, there)[:wanted]
    canaries += new
    held = bool(canaries) and all(holds(state, there[name], rollout.version) for name in canaries)
    since = (rollout.held_since or now) if held else 0.0
    proven = not rollout.canary or (held and now - since >= rollout.canary_s)
    return replace(
        rollout, workers=(*rollout.workers, *new), held_since=since, proven_at=now if proven else rollout.proven_at
    )


def _widened(state: PolicyState, rollout: Rollout, there: Named) -> Rollout:
    """Name more workers while fewer than `at_once` of the named are still without the version."""
    candidates = _candidates(state, rollout, there)
    waiting = sum(not holds(state, there[name], rollout.version) for name in _staying(rollout, there))
    room = max(0, rollout.at_once - waiting) if rollout.at_once else len(candidates)
    new: list[str] = []
    for name in candidates:
        if holds(state, there[name], rollout.version):
            new.append(name)
        elif room:
            new.append(name)
            room -= 1
    return replace(rollout, workers=(*rollout.workers, *new))


def _missing(state: PolicyState, rollout: Rollout, there: Named) -> list[str]:
    named = set(rollout.workers)
    return sorted(
        name
        for name, worker in there.items()
        if not worker.draining and (name in named or ready(state, worker)) and not holds(state, worker, rollout.version)
    )


def _complaint(rollout: Rollout, there: Named) -> ErrorInfo | None:
    """What a canary says against the version, if one does."""
    for name in _staying(rollout, there)[: rollout.canary]:
        worker = there[name]
        said = worker.quarantined or worker.weights_problem
        if worker.quarantined is not None or (said and _is_about(said, rollout.version)):
            message = f"version {rollout.version} went back to {rollout.previous}: canary {name} says: {said}"
            return _reason(ErrorCode.ENGINE_ERROR, message[:1000])
    return None


def _is_about(problem: str, version: int) -> bool:
    """A verdict on the version begins with it; with anything else (it cannot be fetched, say) the deadline waits."""
    return problem.startswith(f"version {version}:")


def _late(state: PolicyState, rollout: Rollout, there: Named) -> ErrorInfo:
    seconds = f"deadline_s={rollout.deadline - rollout.started_at:g}"
    unproven = "" if rollout.proven_at else ": no canary has proven it"
    behind = _named_few(_missing(state, rollout, there))
    message = f"version {rollout.version} went back to {rollout.previous} after its deadline{unproven}; {behind}"
    return _reason(ErrorCode.EXPIRED, message, seconds)


def _named_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"without it: {', '.join(names[:5]) or 'no worker is there'}{more}"


def _reason(code: ErrorCode, message: str, limit: str | None = None) -> ErrorInfo:
    """Never retryable: the version is immutable and will not be desired again by itself."""
    return ErrorInfo(code=code, message=message, boundary=Boundary.WEIGHTS, field="rollout", limit=limit)


def _failed(rollout: Rollout, why: ErrorInfo) -> Rollout:
    return replace(rollout, workers=(), held_since=0.0, failure=why)
