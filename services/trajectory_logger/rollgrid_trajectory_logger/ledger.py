"""The ledger: a pure fold of jobs (RG_JOBS) and events (RG_SAMPLES) into closes.

It is the one authority on how a sample ends.  No I/O, no clock: times are passed in.  What must
be done comes back as decisions; a close counts only once it has been read back from its run's
subject (`closed`), so a rival or an earlier life of the same ledger can never be contradicted.

The result depends on the order of the events and on the set of jobs, not on how the two are
interleaved: an event whose job has not been read holds back every event behind it.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.episodes import SessionEnded, SessionForked, SessionOpened
from rollgrid_contracts.jobs import Job, OpenEpisode, SampleGroup
from rollgrid_contracts.samples import GroupsCancelled, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SamplesScored
from rollgrid_contracts.trajectories import CloseReason, GroupClosed, Superseded

from .closed_index import ClosedIndex, ClosedRead, has_missing
from .open_group import Ending, OpenGroup
from .open_sessions import OpenSessions, calls_of, seqs_of

Event = SamplesFinished | SamplesScored | GroupsCancelled | SessionOpened | SessionForked | SessionEnded

Unmet = Callable[[SampleGroup], str | None]
"""Why no worker may serve a job, None where one may or nobody can tell."""


def unknown(job: SampleGroup) -> str | None:
    """The answer of who cannot tell."""
    return None


SUPERSEDED_KEPT = 10_000
"""Superseded finishes remembered until somebody takes them; the counter counts all."""
ENDED_TIMERS = 1024
"""Deadlines of ended groups kept beyond as many as there are open ones."""


SESSIONS_REMEMBERED = 100_000
"""Sessions of closed groups whose events may be dropped before older ones are."""


class Close(NamedTuple):
    """Append the record of this group to its run's subject.

    The record is made when it is written: ten thousand groups of one cancel cost little until then.
    """

    group: OpenGroup

    @property
    def group_id(self) -> str:
        return self.group.source.group_id

    @property
    def subject(self) -> str:
        return self.group.subject

    @property
    def closed(self) -> GroupClosed:
        return self.group.record()


class Settle(NamedTuple):
    """Let go of jobs: acknowledge `ack`, delete `delete` from the stream, tell workers to abort `abort`.

    `turns` are turns of sessions to abort, by the name that workers know them by.
    """

    ack: tuple[int, ...] = ()
    delete: tuple[int, ...] = ()
    abort: str | None = None
    turns: tuple[str, ...] = ()


Decision = Close | Settle


class Waiting(NamedTuple):
    seq: int
    event: Event


class Ledger:
    """`live` turns True when a take-over has read everything: until then resurrected jobs are acknowledged.

    `folded_to` is how far RG_JOBS is known, `events_to` the last RG_SAMPLES sequence applied.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.live = False
        self.open: dict[str, OpenGroup] = {}
        self.index = ClosedIndex()
        self.folded_to = 0
        self.events_to = 0
        self.double_closes = 0
        self.superseded: Counter[str] = Counter()
        self.superseded_recent: deque[Superseded] = deque(maxlen=SUPERSEDED_KEPT)
        self.sessions_closed: deque[tuple[int, str]] = deque(maxlen=SESSIONS_REMEMBERED)
        """Subjects of sessions whose groups have closed since the take-over, with how far events were read by then."""
        self._waiting: deque[Waiting] = deque()
        self._deadlines: list[tuple[float, str]] = []
        self._refused: dict[str, int] = {}

    # -- inputs -------------------------------------------------------------------------------

    def job_read(self, seq: int, job: Job, now: float) -> list[Decision]:
        """A job was read from RG_JOBS (in stream order; again after a take-over)."""
        decisions: list[Decision] = []
        closed = self.index.groups.get(job.group_id)
        if isinstance(job, SampleGroup) and is_turn(job):
            group = self.open.get(job.group_id)
            if isinstance(group, OpenSessions) and not group.is_over(job):
                group.hold(seq, job)
            else:  # nobody waits for it, and no group of its own may come of it
                decisions.append(Settle(delete=(seq,), turns=(job.call_id,)))
        elif closed is not None:
            # The workers' copy of a job that came after its close must not start; one that a power
            # cut brought back is theirs to acknowledge.
            delete = self.live or has_missing(closed.counts)
            decisions.append(Settle(delete=(seq,)) if delete else Settle(ack=(seq,)))
        else:
            self._group_of(job).hold(seq, job)
        self.folded_to = max(self.folded_to, seq)
        return decisions + self._drain(now)

    def jobs_end(self, last: int, events_before: int, now: float) -> list[Decision]:
        """Every job up to RG_JOBS sequence `last` is read, and no event up to `events_before` can name a later one."""
        self.folded_to = max(self.folded_to, last)
        decisions = self._drain(now)
        while self._waiting and self._waiting[0].seq <= events_before:
            seq, event = self._waiting.popleft()
            self.events_to = seq
            self._supersede_all(seq, event, "names a job that does not exist")
            decisions += self._drain(now)
        return decisions

    def event_read(self, seq: int, event: Event, now: float) -> list[Decision]:
        """An event was read from RG_SAMPLES (in stream order)."""
        if seq <= self.read_to:
            return []
        self._waiting.append(Waiting(seq, event))
        return self._drain(now)

    def skip_event(self, seq: int, why: str, now: float) -> list[Decision]:
        """The message at `seq` is no event anybody can read."""
        self.superseded[why] += 1
        if not self._waiting:
            self.events_to = max(self.events_to, seq)
        return self._drain(now)

    def constrained(self, until: float) -> bool:
        """Whether a group is due by `until` that asks for certain versions and of which nothing has come."""
        if self.next_deadline is None or self.next_deadline > until:
            return False
        for deadline, group_id in self._deadlines:
            group = self.open.get(group_id)
            if deadline <= until and group is not None and group.waits_for_versions:
                return True
        return False

    def advance(self, until: float, now: float, unmet: Unmet = unknown) -> list[Decision]:
        """Every event stored before UNIX second `until` has been applied: expire what was due by then.

        `unmet` says of a job that asks for certain versions whether anybody could serve it.
        """
        decisions: list[Decision] = []
        while self._deadlines and self._deadlines[0][0] <= until:
            _, group_id = heapq.heappop(self._deadlines)
            group = self.open.get(group_id)
            if group is not None and group.ending is None:
                job = group.source
                why = unmet(job) if group.waits_for_versions and isinstance(job, SampleGroup) else None
                decisions.append(self._close(group, CloseReason.EXPIRED, now, unmet=why))
        return decisions

    def closed(self, read: ClosedRead) -> list[Decision]:
        """A close was read from RG_TRAJECTORIES, or its append was acknowledged."""
        group = self.open.pop(read.group_id, None)
        if not self.index.closed(read, group.finished if group else None):
            self.double_closes += 1
        self._refused.pop(read.group_id, None)
        if group is None:
            return []
        turns = list(group.turn_jobs.values()) if isinstance(group, OpenSessions) else []
        if isinstance(group, OpenSessions):
            self.sessions_closed += [(self.events_to, subject) for subject in group.subjects_read]
        if has_missing(read.counts):
            deleted = (*group.jobs, *seqs_of(turns))
            return [Settle(delete=deleted, abort=read.group_id, turns=calls_of(turns))]
        first, extra = _split_copies(group.jobs)
        return [Settle(ack=first, delete=extra + seqs_of(turns), turns=calls_of(turns))]

    # -- what others ask ----------------------------------------------------------------------

    @property
    def read_to(self) -> int:
        """The last RG_SAMPLES sequence taken in, applied or waiting."""
        return self._waiting[-1].seq if self._waiting else self.events_to

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def blocked_on(self) -> int | None:
        """The RG_JOBS sequence that the oldest waiting event names."""
        return self._waiting[0].event.job_seq if self._waiting else None

    @property
    def timers(self) -> int:
        """Deadlines kept: those of the open groups, and a bounded number of ended ones."""
        return len(self._deadlines)

    @property
    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def need(self) -> int:
        """The lowest RG_SAMPLES sequence that a refold of the open groups must still find."""
        lowest = self.events_to + 1
        return min((group.need for group in self.open.values() if group.need), default=lowest)

    def plain_need(self) -> int:
        """As `need`, of what lies on no session's subject."""
        lowest = self.events_to + 1
        return min((group.plain_need for group in self.open.values() if group.plain_need), default=lowest)

    def settled_to(self) -> int:
        """The RG_SAMPLES sequence up to which no event stands for itself, without a job held in RG_JOBS."""
        return min(self._refused.values(), default=self.events_to + 1) - 1

    def held(self) -> int:
        """Messages of RG_JOBS that open groups hold."""
        return sum(group.held for group in self.open.values())

    # -- the fold -----------------------------------------------------------------------------

    def _group_of(self, job: Job) -> OpenGroup:
        group = self.open.get(job.group_id)
        if group is None:
            kind = OpenSessions if isinstance(job, OpenEpisode) else OpenGroup
            group = self._open(kind(source=job, deadline=job.deadline))
            heapq.heappush(self._deadlines, (job.deadline, job.group_id))
            if len(self._deadlines) > 2 * len(self.open) + ENDED_TIMERS:
                self._forget_ended_timers()
        return group

    def _forget_ended_timers(self) -> None:
        """Most groups close long before their deadline: without this their timers stay until it passes."""
        self._deadlines = [timer for timer in self._deadlines if timer[1] in self.open]
        heapq.heapify(self._deadlines)

    def _open(self, group: OpenGroup) -> OpenGroup:
        source = group.source
        self.open[source.group_id] = group
        self.index.opened(source.group_id, source.batch_id, group.subject, group.n)
        return group

    def _drain(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        while self._waiting and self._waiting[0].event.job_seq <= self.folded_to:
            seq, event = self._waiting.popleft()
            self.events_to = seq
            decisions += self._apply(seq, event, now)
        return decisions

    def _apply(self, seq: int, event: Event, now: float) -> list[Decision]:
        if isinstance(event, GroupsCancelled):
            return self._cancel(seq, event, now)
        group = self.open.get(event.group_id)
        if group is None and isinstance(event, SamplesFinished) and self._is_refusal(event):
            group = self._open(OpenGroup(source=event, deadline=0.0))
            self._refused[event.group_id] = seq
        if group is None:
            why = "group has closed" if event.group_id in self.index.groups else "unknown group"
        elif (group.source.tenant, group.source.run) != (event.tenant, event.run):
            why = "another tenant's or run's group"
        elif group.ending is not None:
            why = "group has closed"
        else:
            return self._fold(group, seq, event, now)
        self._supersede_all(seq, event, why)
        return []

    def _fold(
        self,
        group: OpenGroup,
        seq: int,
        event: SamplesFinished | SamplesScored | SessionOpened | SessionForked | SessionEnded,
        now: float,
    ) -> list[Decision]:
        decisions: list[Decision] = []
        group.cause = event.traceparent or group.cause if not isinstance(event, SessionForked) else group.cause
        match event:
            case SamplesFinished():
                for sample in event.samples:
                    why = group.finish(seq, event, sample)
                    if why is not None:
                        self._supersede(seq, event, sample.index, sample.turn, sample.attempt, why)
                    elif not isinstance(group, OpenSessions):
                        self.index.finished(group.source.batch_id)
                if isinstance(group, OpenSessions):
                    decisions += _settled_by(group, event)
            case SamplesScored():
                for result in event.results:
                    why = group.score(event.finished_seq, result)
                    if why is not None:
                        self._supersede(seq, event, result.index, result.turn, result.attempt, why)
            case _:
                decisions += self._fold_session(group, seq, event)
        if group.is_complete():
            refused = isinstance(group.source, SamplesFinished)
            decisions.append(self._close(group, CloseReason.REJECTED if refused else CloseReason.COMPLETE, now))
        return decisions

    def _fold_session(
        self, group: OpenGroup, seq: int, event: SessionOpened | SessionForked | SessionEnded
    ) -> list[Decision]:
        before = group.finished
        why = group.tell(seq, event.index, event) if isinstance(group, OpenSessions) else "no group of sessions"
        if why is not None:
            self.superseded[why] += 1
        if not isinstance(group, OpenSessions) or group.finished == before:
            return []
        self.index.finished(group.source.batch_id)
        left = group.orphans()
        return [Settle(delete=seqs_of(left), turns=calls_of(left))] if left else []

    def _cancel(self, seq: int, event: GroupsCancelled, now: float) -> list[Decision]:
        """End what was published up to the cancel's `job_seq` (0 = whatever is open): later jobs are a new wish."""
        batch = self.index.batches.get(event.batch_id)
        wanted = event.group_ids or (sorted(batch.open) if batch else ())
        decisions: list[Decision] = []
        for group_id in wanted:
            group = self.open.get(group_id)
            if group is None or group.ending is not None:
                continue
            if (group.source.tenant, group.source.run) != (event.tenant, event.run):
                continue
            if event.job_seq and min(group.jobs, default=0) > event.job_seq:
                continue
            group.touch(seq)
            group.cancelled = seq
            decisions.append(self._close(group, CloseReason.CANCELLED, now, event.reason))
        return decisions

    def _close(
        self, group: OpenGroup, reason: CloseReason, now: float, message: str | None = None, unmet: str | None = None
    ) -> Close:
        group.ending = Ending(reason, now, self.epoch, message, unmet)
        return Close(group)

    def _is_refusal(self, event: SamplesFinished) -> bool:
        """Ingest refuses a queue job without ever making it a job: one event with n failed samples."""
        return (
            event.job_seq == 0
            and event.group_id not in self.index.groups
            and sorted(sample.index for sample in event.samples) == list(range(event.n))
            and all(sample.status is SampleStatus.FAILED for sample in event.samples)
        )

    # -- what lost ----------------------------------------------------------------------------

    def _supersede_all(self, seq: int, event: Event, why: str) -> None:
        match event:
            case SamplesFinished():
                for sample in event.samples:
                    self._supersede(seq, event, sample.index, sample.turn, sample.attempt, why)
            case SamplesScored():
                for result in event.results:
                    self._supersede(seq, event, result.index, result.turn, result.attempt, why)
            case _:
                self.superseded[why] += 1

    def _supersede(
        self,
        seq: int,
        event: SamplesFinished | SamplesScored,
        index: int,
        turn: int,
        attempt: int,
        why: str,
    ) -> None:
        self.superseded[why] += 1
        if not isinstance(event, SamplesFinished):
            return
        self.superseded_recent.append(
            Superseded(
                tenant=event.tenant,
                run=event.run,
                group_id=event.group_id,
                index=index,
                turn=turn,
                attempt=attempt,
                finished_seq=seq,
                worker=event.incarnation,
                why=why,
            )
        )


def is_turn(job: SampleGroup) -> bool:
    """Whether the job generates a turn of an episode; a session id of the caller's own only says where it should run."""
    if job.session is None:
        return False
    return any(job.session.session == ids.session_id(job.group_id, index) for index in job.indexes)


def _settled_by(group: OpenSessions, event: SamplesFinished) -> list[Decision]:
    """The turn's own job is done; copies of it need not start any more."""
    own, copies = group.settled_by(event)
    if not own and not copies:
        return []
    return [Settle(ack=own, delete=seqs_of(copies), turns=calls_of(copies))]


def _split_copies(jobs: dict[int, tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(the first job of each index set, later copies of the same): copies may never have been started."""
    seen: set[tuple[int, ...]] = set()
    first: list[int] = []
    extra: list[int] = []
    for seq, indexes in sorted(jobs.items()):
        (extra if indexes in seen else first).append(seq)
        seen.add(indexes)
    return tuple(first), tuple(extra)
