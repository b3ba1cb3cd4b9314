"""Interactive calls: from accepted jobs back to finished samples, by reply or by record.

The reply subject is subscribed before the job is published; a reply comes only after its durable
event.  Whatever a lost reply leaves open is read from the record once the group has closed; of a session's turn, which goes
by its `call_id`, from the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from typing import Any, Protocol

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.failures import Boundary, ErrorCode, ErrorInfo
from rollgrid_contracts.samples import Sample, SampleReply, SampleStatus, StreamQuery, StreamState, TokenFrame
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import VERDICTS, RollgridError
from rollgrid_runtime.logging import get_logger

from . import metrics
from .ledger_client import LedgerClient

log = get_logger(__name__)


class Records(Protocol):
    """Reads a closed group by its RG_TRAJECTORIES sequence."""

    async def at(self, tenant: str, run: str, sequence: int) -> GroupClosed | None: ...


class Listener(Protocol):
    """Who streams: told of every frame and finished sample as it comes, asked what it has sent."""

    def on_frame(self, frame: TokenFrame) -> None: ...

    def on_sample(self, group_id: str, sample: Sample) -> None: ...

    def sent(self, group_id: str) -> StreamState | None:
        """None when somebody else answers for the group."""


class TurnRecord(Protocol):
    """Reads a turn from its session, for when its reply was lost: its one sample, None while it is open."""

    async def __call__(self) -> Sample | None: ...


class Collected:
    """What has come in for the groups of one call: group id → samples by index.

    Of a session's turn (`turn` reads its record) the one sample stands at index 0, whichever of its group it is.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        tell: Callable[[str, Sample], None] | None = None,
        turn: TurnRecord | None = None,
    ) -> None:
        self._sizes, self._tell, self.turn = dict(sizes), tell, turn
        self._samples: dict[str, dict[int, Sample]] = {group_id: {} for group_id in sizes}
        self._missing = sum(sizes.values())
        self.logprobs_mode = "processed_logprobs"
        self.complete = asyncio.Event()

    def add(self, group_id: str, sample: Sample) -> None:
        """The first answer for an index stands (every later one equals it)."""
        if self.turn is not None:
            sample = msgspec.structs.replace(sample, index=0)
        group = self._samples.get(group_id)
        if group is None or sample.index in group or not 0 <= sample.index < self._sizes[group_id]:
            return
        group[sample.index] = sample
        if self._tell is not None:
            self._tell(group_id, sample)
        self._missing -= 1
        if self._missing == 0:
            self.complete.set()

    def incomplete(self) -> list[str]:
        return [group_id for group_id, group in self._samples.items() if len(group) < self._sizes[group_id]]

    def samples(self, group_id: str) -> list[Sample]:
        """Those that are there, in index order."""
        return [sample for _, sample in sorted(self._samples[group_id].items())]

    def everything(self) -> list[Sample]:
        """Of all groups, in the order they were asked for."""
        return [sample for group_id in self._sizes for sample in self.samples(group_id)]

    def __len__(self) -> int:
        return len(self._sizes)


class Replies:
    def __init__(self, bus: Bus, ledger: LedgerClient, records: Records, *, poll_s: float, grace_s: float) -> None:
        self._bus, self._ledger, self._records = bus, ledger, records
        self._poll_s, self._grace_s = poll_s, grace_s

    @contextlib.asynccontextmanager
    async def listening(
        self, sizes: Mapping[str, int], listener: Listener | None = None, turn: TurnRecord | None = None
    ) -> AsyncIterator[Collected]:
        """Collect replies for these groups (id → n).  Enter it before their jobs are published.

        A `listener` also gets the frames, and answers workers that take over.  `turn` for a session's turn, the one
        group of which is its `call_id`.
        """
        collected = Collected(sizes, None if listener is None else listener.on_sample, turn)
        kind: Any = SampleReply if listener is None else SampleReply | TokenFrame

        async def on_reply(reply: SampleReply | TokenFrame, _: str) -> None:
            if isinstance(reply, TokenFrame):
                if listener is not None:
                    listener.on_frame(reply)
                return
            collected.logprobs_mode = reply.logprobs_mode
            for sample in reply.samples:
                collected.add(reply.group_id, sample)

        async with contextlib.AsyncExitStack() as exits:
            for group_id in sizes:
                subscription = await self._bus.subscribe(subjects.reply(group_id), kind, on_reply)
                exits.push_async_callback(self._bus.unsubscribe, subscription)
                if listener is not None:
                    await self._answer_take_overs(group_id, listener, exits)
            metrics.WAITING.inc(len(sizes))
            exits.callback(metrics.WAITING.dec, len(sizes))
            yield collected

    async def _answer_take_overs(self, group_id: str, listener: Listener, exits: contextlib.AsyncExitStack) -> None:
        async def on_query(query: StreamQuery, reply: str) -> None:
            state = listener.sent(query.group_id)
            if state is None:
                return
            try:
                await self._bus.respond(reply, state)
            except RollgridError as error:  # too much for one message: the worker begins again
                log.warning("take_over_not_answered", group=query.group_id, error=error.message)

        subscription = await self._bus.subscribe(subjects.resume(group_id), StreamQuery, on_query)
        exits.push_async_callback(self._bus.unsubscribe, subscription)

    async def wait(self, collected: Collected, tenant: str, deadline: float, *, ask_first: bool) -> None:
        """Return when every sample is there; `ask_first` for groups that may have ended long ago.

        Raises expired when neither a reply nor a record came by `deadline` (UNIX) and some grace.
        """
        give_up = (max(deadline, time.time()) if ask_first else deadline) + self._grace_s
        pause = 0.0 if ask_first else self._poll_s
        while True:
            left = give_up - time.time()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, min(pause, left))):
                    await collected.complete.wait()
            if collected.complete.is_set():
                metrics.REPLIES.labels("reply").inc(len(collected))
                return
            await self.read_records(collected, tenant)
            if collected.complete.is_set():
                metrics.REPLIES.labels("record").inc(len(collected))
                return
            if left <= 0:
                raise expired()
            pause = self._poll_s

    async def read_records(self, collected: Collected, tenant: str) -> None:
        """Add what closed groups say, or the session.  What is away is asked again later."""
        try:
            if collected.turn is not None:
                sample = await collected.turn()
                if sample is not None and (missing := collected.incomplete()):  # else its reply came meanwhile
                    collected.add(missing[0], sample)
                return
            statuses = await self._ledger.groups(tenant, collected.incomplete())
            for group_id, status in statuses.items():
                if status.closed_seq == 0:
                    continue
                record = await self._records.at(tenant, status.run, status.closed_seq)
                if record is None or record.group_id != group_id:
                    log.warning("record_not_found", group=group_id, sequence=status.closed_seq)
                    continue
                collected.logprobs_mode = record.logprobs_mode
                for entry in record.entries:
                    collected.add(group_id, entry.sample)
        except RollgridError as error:
            log.info("records_not_read", error=error.message)


def expired() -> RollgridError:
    """504: neither a reply nor a record came in time."""
    return RollgridError(
        ErrorCode.EXPIRED,
        "no result came before the deadline",
        boundary=Boundary.LEDGER,
        field="deadline_s",
        retry_after_s=1.0,
    )


def refuse_failed(samples: Collection[Sample], *, empty: bool = False) -> None:
    """Raise the first failure among `samples`: a call never answers with less than it was asked for.

    `empty`: no token was asked for.
    """
    for sample in samples:
        if sample.status is not SampleStatus.SUCCEEDED:
            raise _failure(sample)
        if not empty and not len(sample.token_ids):
            raise RollgridError(
                ErrorCode.EMPTY_COMPLETION, "the engine returned no token", boundary=Boundary.ENGINE, retry_after_s=1.0
            )


_BY_STATUS = {
    SampleStatus.CANCELLED: ErrorCode.CANCELLED,
    SampleStatus.EXPIRED: ErrorCode.EXPIRED,
    SampleStatus.FAILED: ErrorCode.ENGINE_ERROR,
}


def _failure(sample: Sample) -> RollgridError:
    info = sample.error or ErrorInfo(
        code=_BY_STATUS.get(sample.status, ErrorCode.INTERNAL), message=f"the sample {sample.status.value}"
    )
    retryable = VERDICTS[info.code].retryable
    return RollgridError(
        info.code,
        info.message,
        boundary=info.boundary,
        field=info.field,
        limit=info.limit,
        retry_after_s=1.0 if retryable else None,
    )
