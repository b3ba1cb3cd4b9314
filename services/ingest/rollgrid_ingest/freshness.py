"""How stale closed groups are when they are read: staleness at consumption.

Counted where a reader is answered over HTTP, each time; who follows by NATS reads past ingest.  Only the few
fields that matter are decoded, the record itself goes on as it is stored.
"""

from __future__ import annotations

import time

import msgspec
from rollgrid_contracts.checkpoints import PolicyState, staleness
from rollgrid_contracts.jobs import VersionSpan
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Versioned

from . import metrics
from .catalog import Catalog
from .results import Record


class _Sample(msgspec.Struct, frozen=True):
    version_spans: tuple[VersionSpan, ...] = ()


class _Entry(msgspec.Struct, frozen=True):
    sample: _Sample
    turns: tuple[_Sample, ...] = ()


class _Close(msgspec.Struct, frozen=True):
    policy: str
    entries: tuple[_Entry, ...]


_DECODER = msgspec.msgpack.Decoder(_Close)


class Freshness:
    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def consumed(self, tenant: str, record: Record) -> int | None:
        """The group's staleness now, by its oldest version; None where it has no tokens, or its policy has gone.

        Counted, unless it comes from the archive: who reads that looks back.
        """
        policy, versions = versions_of(record)
        found = self._policy(tenant, policy) if versions else None
        if found is None:
            return None
        behind = max(staleness(found.value, version) for version in versions)
        if not record.archived:
            metrics.CONSUMED_STALENESS.observe(behind)
            committed = committed_at(found.value, max(versions))
            if committed:
                metrics.CONSUMED_LAG.observe(max(0.0, time.time() - committed))
        return behind

    def of(self, tenant: str, group: GroupClosed) -> int | None:
        """As `consumed`, of a group that is looked up; nothing is counted."""
        versions = {version for entry in group.entries for version in entry.versions}
        found = self._policy(tenant, group.policy) if versions else None
        return None if found is None else max(staleness(found.value, version) for version in versions)

    def _policy(self, tenant: str, name: str) -> Versioned[PolicyState] | None:
        try:
            return self._catalog.policy(tenant, name)
        except RollgridError:  # not read yet
            return None


def versions_of(record: Record) -> tuple[str, set[int]]:
    """The policy of a closed group, and the versions that made any of its tokens."""
    if record.read is not None:
        return record.read.policy, {version for entry in record.read.entries for version in entry.versions}
    close = _DECODER.decode(record.packed or b"")
    samples = (sample for entry in close.entries for sample in (entry.turns or (entry.sample,)))
    return close.policy, {span.version for sample in samples for span in sample.version_spans}


def committed_at(state: PolicyState, version: int) -> float:
    """UNIX seconds, 0 where that is not known."""
    return next((found.committed_at for found in state.versions if found.version == version), 0.0)
