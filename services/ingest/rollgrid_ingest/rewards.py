"""Rewards that a customer posts onto ended samples: checked against the group's record, then stored.

A post changes no terminal entry.  It lies beside the closes of its run, under a sequence of its own,
and of two under one name the later one counts; all of them stay recorded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

from rollgrid_contracts import codec, ids, subjects
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.topology import TRAJECTORIES, Header
from rollgrid_contracts.trajectories import Entry, GroupClosed, PostedReward, RewardsPosted
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.group_commit import GroupCommit

from .admission import too_much
from .idempotency import Idempotency
from .ledger_client import LedgerClient
from .posted_rewards import PostReader
from .results import Results, not_found
from .rewards_schema import GroupRewards, RewardItem
from .settings import Limits
from .submission import Caller
from .terms import bounded_text, payload
from .wire import at_most, invalid

CATCH_UP_S = 3.0
READS_AT_ONCE = 8
POSTS_SHARE = 0.9
"""Share of RG_TRAJECTORIES that posts may fill: behind it there is room for closes only."""
ROOM_AGE_S = 1.0
MAX_ID_CHARS = 64


class Posted(NamedTuple):
    """A post is stored at `cursor`; `duplicate` when it was before this call."""

    group_id: str
    run: str
    cursor: int
    duplicate: bool


class _Prepared(NamedTuple):
    event: RewardsPosted
    msg_id: str


class Rewards:
    """`run` works as a task beside those who call `post`."""

    def __init__(self, bus: Bus, ledger: LedgerClient, results: Results, reader: PostReader, limits: Limits) -> None:
        self._bus, self._ledger, self._results, self._reader, self._limits = bus, ledger, results, reader, limits
        self._idempotency = Idempotency(bus)
        self._commit = GroupCommit(bus)
        self._looked_at, self._last, self._full = float("-inf"), 0, False

    async def run(self) -> None:
        """Store for ever what is posted; posts of one moment share their flushes."""
        await self._commit.run()

    async def post(
        self, caller: Caller, asked: Sequence[GroupRewards], source: str | None, run: str | None = None
    ) -> list[Posted]:
        """Store one post per group, in order, all of them checked first; groups of `run` only, if given.

        A repeated idempotency key stores only what is missing.

        Raises RollgridError: not_found, group_open, invalid_request and limits naming the field,
        idempotency_conflict, queue_full, not_ready.
        """
        path = "groups[{}]." if run is not None else ""
        closes = await self._closes(caller.tenant, asked, path, run)
        prepared = [
            self._prepared(caller, position, item, sequence, close, source, path.format(position))
            for position, (item, (sequence, close)) in enumerate(zip(asked, closes, strict=True))
        ]
        await self._look()
        if self._full:
            limit = f"{POSTS_SHARE:.0%} of {TRAJECTORIES.name}"
            raise too_much("the trajectory stream is nearly full: what is left is for closes", limit, 5.0)
        known = await self._repeated(caller, prepared)
        return list(await asyncio.gather(*(self._store(item, known) for item in prepared)))

    # -- what is posted onto ----------------------------------------------------------------------

    async def _closes(
        self, tenant: str, asked: Sequence[GroupRewards], path: str, run: str | None
    ) -> list[tuple[int, GroupClosed]]:
        """Sequence and record of every group's close."""
        unnamed = [item.group_id for item in asked if item.cursor is None and len(item.group_id) <= MAX_ID_CHARS]
        found = await self._ledger.groups(tenant, unnamed)
        if len(found) < len(set(unnamed)):  # perhaps it has not come to the newest
            found = await self._ledger.caught_up(tenant, unnamed, within_s=CATCH_UP_S)
        gate = asyncio.Semaphore(READS_AT_ONCE)

        async def one(position: int, item: GroupRewards) -> tuple[int, GroupClosed]:
            field = f"{path.format(position)}group_id" if path else "group_id"
            status = found.get(item.group_id)
            sequence = item.cursor
            if sequence is None:
                if status is None:
                    raise not_found("group", item.group_id, field)
                if status.closed_seq == 0:
                    raise _open(item.group_id, field)
                sequence = status.closed_seq
            async with gate:
                close = await self._results.at(tenant, None, sequence)
            if close is None or close.group_id != item.group_id or run not in (None, close.run):
                raise not_found("group", item.group_id, field)
            return sequence, close

        return list(await asyncio.gather(*(one(position, item) for position, item in enumerate(asked))))

    def _prepared(
        self,
        caller: Caller,
        position: int,
        item: GroupRewards,
        sequence: int,
        close: GroupClosed,
        source: str | None,
        path: str,
    ) -> _Prepared:
        event = RewardsPosted(
            tenant=caller.tenant,
            run=close.run,
            group_id=close.group_id,
            closed_seq=sequence,
            rewards=checked_rewards(item.rewards, close.entries, f"{path}rewards", self._limits),
            source=checked_label(source, "source", "customer"),
            metadata=payload(item.metadata, f"{path}metadata", self._limits),
            posted_at=time.time(),
            traceparent=caller.traceparent,
        )
        try:  # what JSON let through must also fit the wire between services
            codec.encode((event.metadata, event.rewards))
        except (OverflowError, UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
            raise invalid(f"{path}metadata cannot be stored: {error}", f"{path}metadata") from error
        return _Prepared(event, ids.post_id(caller.tenant, caller.key, position))

    # -- storing ----------------------------------------------------------------------------------

    async def _look(self) -> None:
        """How far the stream goes and whether it has room for more than closes, as of a second ago."""
        if time.monotonic() - self._looked_at > ROOM_AGE_S:
            info = await self._bus.stream_info(TRAJECTORIES.name)
            bound = int(info.config.max_bytes or 0)
            self._last, self._full = int(info.state.last_seq), 0 < POSTS_SHARE * bound < int(info.state.bytes)
            self._looked_at = time.monotonic()

    async def _repeated(self, caller: Caller, prepared: Sequence[_Prepared]) -> dict[str, int]:
        """What an earlier request under the same idempotency key has stored: sequences by message id."""
        if not caller.idempotent:
            return {}
        record = IdempotencyRecord(
            body_sha256=caller.digest,
            run=prepared[0].event.run,
            batch_id="",
            key=caller.key,
            groups=len(prepared),
            cursor=self._last,
            created_at=time.time(),
        )
        claim = await self._idempotency.claim(caller.tenant, record)
        if claim.fresh:
            return {}
        run_of = {item.msg_id: item.event.run for item in prepared}
        known: dict[str, int] = {}
        for run in set(run_of.values()):
            known |= await self._reader.find(caller.tenant, run, set(run_of), claim.record.cursor)
        return known

    async def _store(self, item: _Prepared, known: dict[str, int]) -> Posted:
        event = item.event
        if item.msg_id in known:
            return Posted(event.group_id, event.run, known[item.msg_id], True)
        headers = {Header.GROUP.value: event.group_id}
        if event.traceparent is not None:
            headers[Header.TRACEPARENT.value] = event.traceparent
        subject = subjects.run_rewards(event.tenant, event.run)
        ack = await self._commit.publish(subject, codec.encode(event), msg_id=item.msg_id, headers=headers)
        return Posted(event.group_id, event.run, ack.sequence, ack.duplicate)


def checked_rewards(
    items: Sequence[RewardItem], entries: Sequence[Entry], path: str, limits: Limits
) -> tuple[PostedReward, ...]:
    """The rewards as they are stored.  Raises RollgridError naming the field."""
    if not items:
        raise invalid(f"{path} is empty", path)
    at_most(len(items), path, "max_rewards", limits.max_rewards)
    by_index = {entry.sample.index: entry for entry in entries}
    found: list[PostedReward] = []
    for i, item in enumerate(items):
        entry = by_index.get(item.index)
        if entry is None:
            limit = f"0<=index<{len(entries)}"
            raise invalid(
                f"{path}[{i}].index is {item.index}, the group has {len(entries)} samples",
                f"{path}[{i}].index",
                limit=limit,
            )
        found.append(_checked(item, entry, f"{path}[{i}]", limits))
    names = [(reward.index, reward.name) for reward in found]
    if len(set(names)) != len(names):
        raise invalid(f"{path}: two rewards have one index and name", path)
    return tuple(found)


def _checked(item: RewardItem, entry: Entry, path: str, limits: Limits) -> PostedReward:
    turns = [turn for turn in entry.turns if len(turn.token_ids)]
    if not turns and not len(entry.sample.token_ids):
        status = entry.sample.status.value
        raise invalid(f"{path}.index: sample {item.index} {status} without a token: nothing to reward", f"{path}.index")
    if (item.value is None) == (item.turn_values is None):
        raise invalid(f"{path} needs exactly one of value and turn_values", path)
    values = [item.value] if item.turn_values is None else item.turn_values
    field = f"{path}.value" if item.turn_values is None else f"{path}.turn_values"
    if not all(value is None or math.isfinite(value) for value in values):
        raise invalid(f"{field} is not finite", field)
    if all(value is None for value in values):
        raise invalid(f"{field} holds no number", field)
    generations = max(1, len(entry.turns))
    if item.turn_values is not None and len(item.turn_values) > generations:
        limit = f"turns={generations}"
        raise invalid(f"{field} has {len(item.turn_values)} numbers for {generations} turns", field, limit=limit)
    return PostedReward(
        index=item.index,
        name=checked_label(item.name, f"{path}.name", "reward"),
        kind=checked_label(item.kind, f"{path}.kind", "scalar" if item.turn_values is None else "turns"),
        value=item.value,
        turn_values=tuple(item.turn_values or ()),
        detail=bounded_text(item.detail, f"{path}.detail", limits.max_detail_chars),
    )


def checked_label(text: str | None, field: str, default: str) -> str:
    found = default if text is None else text
    if not ids.is_label(found):
        raise invalid(f"{field} is not a usable name", field, limit=ids.LABEL_PATTERN)
    return found


def _open(group_id: str, field: str) -> RollgridError:
    return RollgridError(
        ErrorCode.GROUP_OPEN,
        f"group {group_id} has not closed yet",
        boundary=Boundary.LEDGER,
        field=field,
        retry_after_s=1.0,
    )
