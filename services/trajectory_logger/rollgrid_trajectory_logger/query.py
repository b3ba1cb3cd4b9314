"""Answers to `rg.ledger.query`, from the folded state alone."""

from __future__ import annotations

from rollgrid_contracts.fleet import BatchStatus, GroupStatus, LedgerAnswer, LedgerQuery
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.subjects import run_of_trajectory

from .ledger import Ledger

OPEN_GROUPS_NAMED = 1000
"""Open groups named in a batch's status; the counts are always whole."""


def answer(ledger: Ledger, query: LedgerQuery) -> LedgerAnswer:
    """What the ledger knows; a group or batch of another tenant is unknown to the asker."""
    return LedgerAnswer(
        epoch=ledger.epoch,
        folded_to=ledger.folded_to,
        groups=tuple(group_status(ledger, group_id, query.tenant) for group_id in query.group_ids),
        batch=batch_status(ledger, query.batch_id, query.tenant) if query.batch_id else None,
    )


def group_status(ledger: Ledger, group_id: str, tenant: str | None) -> GroupStatus:
    group = ledger.open.get(group_id)
    if group is not None and tenant in (None, group.source.tenant):
        return group.status()
    closed = ledger.index.groups.get(group_id)
    if closed is not None:
        owner, run = run_of_trajectory(closed.subject)
        if tenant in (None, owner):
            return GroupStatus(
                group_id=group_id, batch_id=closed.batch_id, run=run, n=sum(closed.counts), closed_seq=closed.seq
            )
    return GroupStatus(group_id=group_id, known=False)


def batch_status(ledger: Ledger, batch_id: str, tenant: str | None) -> BatchStatus | None:
    batch = ledger.index.batches.get(batch_id)
    if batch is None:
        return None
    owner, run = run_of_trajectory(batch.subject)
    if tenant not in (None, owner):
        return None
    named = sorted(batch.open)[:OPEN_GROUPS_NAMED] if len(batch.open) <= 10 * OPEN_GROUPS_NAMED else ()
    return BatchStatus(
        batch_id=batch_id,
        run=run,
        tenant=owner,
        groups=len(batch.open) + batch.closed,
        closed=batch.closed,
        samples=batch.samples,
        finished=batch.finished,
        counts=dict(zip(SampleStatus, batch.counts, strict=True)),
        open_groups=tuple(named),
        last_closed_seq=batch.last_seq,
    )
