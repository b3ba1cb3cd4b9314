"""The versions of a policy as its readers see them: what is kept, who runs it, and whether that is proven."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rollgrid_contracts.checkpoints import AdoptedVersion, CheckpointKind, PolicyState, staleness
from rollgrid_contracts.fleet import LoadedVersion, WorkerState


class LiveVersion(msgspec.Struct, kw_only=True):
    """A version whose files are kept, or that some worker still runs.

    `workers` hold it, `current_on` of them give it to new requests.  `fingerprints` are what they
    found it computes (one, unless workers of several engine classes or a wrong one run it), `confirmed` when each
    was equal to a cold load's.  `staleness` is its distance from what is desired now.  UNIX seconds, 0 = unknown.
    """

    version: int
    kind: str
    base_version: int
    step: int | None
    staleness: int
    desired: bool
    kept: bool
    workers: int
    current_on: int
    fingerprints: list[str]
    confirmed: bool
    committed_at: float
    adopted_at: float
    bytes: int
    weights_digest: str | None


def live_versions(state: PolicyState, workers: Sequence[WorkerState]) -> list[LiveVersion]:
    """Oldest first, the base (0) included."""
    kept = {0: AdoptedVersion(version=0), **{found.version: found for found in state.versions}}
    held: dict[int, list[LoadedVersion]] = {}
    for worker in workers:
        for loaded in worker.loaded:
            if (loaded.policy, loaded.tenant) == (state.policy, state.tenant):
                held.setdefault(loaded.version, []).append(loaded)
    return [
        _answer(state, version, kept.get(version), held.get(version, []))
        for version in sorted({*kept, *held, state.desired})
    ]


def _answer(
    state: PolicyState, version: int, adopted: AdoptedVersion | None, held: Sequence[LoadedVersion]
) -> LiveVersion:
    kind = adopted.kind if adopted is not None else held[0].kind if held else CheckpointKind.FULL
    base = adopted.base_version if adopted is not None else held[0].base_version if held else 0
    return LiveVersion(
        version=version,
        kind=kind.value,
        base_version=base,
        step=adopted.step if adopted is not None else None,
        staleness=staleness(state, version),
        desired=version == state.desired,
        kept=adopted is not None and not adopted.going,
        workers=len(held),
        current_on=sum(loaded.current for loaded in held),
        fingerprints=sorted({loaded.fingerprint for loaded in held if loaded.fingerprint is not None}),
        confirmed=bool(held) and all(loaded.confirmed for loaded in held),
        committed_at=adopted.committed_at if adopted is not None else 0.0,
        adopted_at=adopted.adopted_at if adopted is not None else 0.0,
        bytes=adopted.bytes if adopted is not None else 0,
        weights_digest=(adopted.weights_digest or None) if adopted is not None else None,
    )
