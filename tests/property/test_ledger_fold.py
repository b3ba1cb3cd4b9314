"""I1, I5: whatever the interleaving, the copies and the take-overs, each group closes once, the same way, with n entries."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.jobs import Job, SampleGroup, SamplingParams
from rollgrid_contracts.samples import GroupsCancelled, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerSpec, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, GroupClosed, count_statuses
from rollgrid_trajectory_logger.closed_index import ClosedRead
from rollgrid_trajectory_logger.ledger import Close, Decision, Event, Ledger, Settle

FAR = 1e12
SCORERS = (ScorerSpec(name="exact", type="exact"), ScorerSpec(name="gate", type="fmt", gate=True))


def job(group: int, n: int, indexes: tuple[int, ...], scored: bool, deadline: float = 100.0) -> SampleGroup:
    return SampleGroup(
        tenant="acme",
        run="r1",
        batch_id=f"b{group % 2}",
        group_id=f"g{group}",
        n=n,
        indexes=indexes,
        policy="p",
        pool="pool",
        prompt_token_ids=TokenIds.of([1, 2, 3]),
        sampling=SamplingParams(max_tokens=4),
        scorers=SCORERS if scored else (),
        created_at=1.0,
        deadline=deadline,
    )


@dataclass
class World:
    """The two streams, in their final order, and what happened to them."""

    jobs: list[tuple[int, Job]] = field(default_factory=list)
    events: list[tuple[int, Event]] = field(default_factory=list)


def make_world(rng: random.Random) -> World:
    """Groups with shards and republished copies; finishes with duplicates, scores of winners and losers, cancels."""
    world = World()
    groups = []
    for group in range(rng.randint(1, 5)):
        n, scored = rng.randint(1, 4), rng.random() < 0.5
        cut = rng.randint(1, n)
        shards = [tuple(range(cut)), tuple(range(cut, n))] if cut < n else [tuple(range(n))]
        groups += [(group, n, shard, scored) for shard in shards for _ in range(rng.choice([1, 1, 2]))]
    rng.shuffle(groups)
    seq = 0
    for spec in groups:
        seq += rng.randint(1, 3)  # other jobs come and go between them
        world.jobs.append((seq, job(*spec)))
    actions: list[tuple[str, int, Job, int]] = []
    for seq, item in world.jobs:
        assert isinstance(item, SampleGroup)
        for index in item.indexes:
            actions += [("finish", seq, item, index)] * rng.choice([0, 1, 1, 2])
    for _ in range(rng.choice([0, 0, 1, 2])):
        seq, item = rng.choice(world.jobs)
        actions.append(("cancel", rng.choice([seq, world.jobs[-1][0]]), item, rng.randint(0, 1)))
    rng.shuffle(actions)
    scores: list[SamplesScored] = []
    position, attempt = 0, 0
    for kind, job_seq, item, index in actions:
        position += rng.randint(1, 2)
        who: dict[str, Any] = {"tenant": item.tenant, "run": item.run, "job_seq": job_seq}
        if kind == "cancel":
            only = (item.group_id,) if index else ()
            world.events.append((position, GroupsCancelled(**who, batch_id=item.batch_id, group_ids=only)))
        else:
            attempt += 1
            status = SampleStatus.SUCCEEDED if rng.random() < 0.8 else SampleStatus.FAILED
            sample = Sample(index=index, attempt=attempt, status=status, logprobs=Floats.of([-0.5]))
            finished = SamplesFinished(
                **who, batch_id=item.batch_id, group_id=item.group_id, n=item.n, policy="p", samples=(sample,)
            )
            world.events.append((position, finished))
            if item.scorers and rng.random() < 0.9:
                verdict = Score(scorer="exact", status=ScoreStatus.SCORED, value=float(attempt))
                gate = Score(scorer="gate", status=ScoreStatus.SCORED, value=1.0)
                result = SampleScores(index=index, attempt=attempt, scores=(verdict, gate))
                scores.append(SamplesScored(**who, group_id=item.group_id, finished_seq=position, results=(result,)))
        while scores and rng.random() < 0.5:
            position += 1
            world.events.append((position, scores.pop(rng.randrange(len(scores)))))
    world.events += [(position + 1 + extra, event) for extra, event in enumerate(scores)]
    return world


def expected(world: World) -> dict[str, tuple[Any, ...]]:
    """What each group must end as, worked out the slow and obvious way, group by group."""
    outcome = {}
    for group_id in {item.group_id for _, item in world.jobs}:
        first, item = next((seq, item) for seq, item in world.jobs if item.group_id == group_id)
        won: dict[int, tuple[int, Sample]] = {}
        rewards: dict[int, float] = {}
        reason = CloseReason.EXPIRED
        for seq, event in world.events:
            if isinstance(event, GroupsCancelled):
                aimed = event.batch_id == item.batch_id and event.group_ids in ((), (group_id,))
                if aimed and first <= event.job_seq:
                    reason = CloseReason.CANCELLED
                    break
                continue
            if event.group_id != group_id:
                continue
            if isinstance(event, SamplesFinished):
                won.setdefault(event.samples[0].index, (seq, event.samples[0]))
            elif isinstance(event, SamplesScored):
                result = event.results[0]
                if result.index in won and won[result.index][0] == event.finished_seq:
                    rewards[result.index] = float(result.attempt)
            wanting = [i for i, (_, s) in won.items() if item.scorers and s.status is SampleStatus.SUCCEEDED]
            if len(won) == item.n and all(i in rewards for i in wanting):
                reason = CloseReason.COMPLETE
                break
        missing = SampleStatus.CANCELLED if reason is CloseReason.CANCELLED else SampleStatus.EXPIRED
        entries = tuple(
            (
                won[i][1].status,
                won[i][1].attempt,
                rewards.get(i) if won[i][1].status is SampleStatus.SUCCEEDED else None,
            )
            if i in won
            else (missing, 1, None)
            for i in range(item.n)
        )
        outcome[group_id] = (reason, entries)
    return outcome


def told(closed: GroupClosed) -> tuple[Any, ...]:
    assert [entry.sample.index for entry in closed.entries] == list(range(closed.n))
    return closed.reason, tuple((e.sample.status, e.sample.attempt, e.reward) for e in closed.entries)


class Run:
    """One life after another of the ledger over a world, with compare-and-set appends."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.stream: list[ClosedRead] = []
        self.records: dict[str, GroupClosed] = {}
        self.settled: set[int] = set()
        self.aborted: set[str] = set()
        self.begin(epoch=1)

    def begin(self, epoch: int) -> None:
        """Take over: closes, then the jobs still there (a power cut may bring settled ones back), then events."""
        self.ledger = Ledger(epoch)
        self.pending: list[Close] = []
        for read in self.stream:
            assert self.ledger.closed(read) == []
        self.job_at = self.event_at = 0
        if epoch == 1:
            return
        last = self.published
        for seq, item in self.world.jobs:
            if seq <= last and (seq not in self.settled or self.rng.random() < 0.3):
                self.take(self.ledger.job_read(seq, item, 1.0))
                self.job_at = max(self.job_at, seq)
        self.take(self.ledger.jobs_end(last, self.ledger.read_to, 1.0))
        self.job_at = max(self.job_at, last)

    @property
    def published(self) -> int:
        return getattr(self, "_published", 0)

    def take(self, decisions: list[Decision]) -> None:
        for decision in decisions:
            if isinstance(decision, Close):
                self.pending.append(decision)
            else:
                self.settle(decision)

    def settle(self, decision: Settle) -> None:
        by_seq = dict(self.world.jobs)
        for seq in decision.ack + decision.delete:
            assert by_seq[seq].group_id in self.records, "a job was let go before its group closed"
            self.settled.add(seq)
        if decision.abort:
            self.aborted.add(decision.abort)

    def read_job(self) -> None:
        ahead = [(seq, item) for seq, item in self.world.jobs if seq > self.job_at]
        if ahead:
            self.job_at = ahead[0][0]
            self._published = max(self.published, self.job_at)
            self.take(self.ledger.job_read(*ahead[0], 1.0))

    def read_event(self) -> None:
        """Events exist once their job was published, whether or not this ledger has read it."""
        ahead = [(seq, event) for seq, event in self.world.events if seq > self.event_at]
        if ahead:
            self.event_at = ahead[0][0]
            self._published = max(self.published, ahead[0][1].job_seq)
            self.take(self.ledger.event_read(*ahead[0], 1.0))

    def append(self) -> None:
        if not self.pending:
            return
        close = self.pending.pop(self.rng.randrange(len(self.pending)))
        closed = close.closed
        assert close.group_id not in self.records, "closed twice"
        counts = tuple(count_statuses(closed.entries).values())
        assert sum(counts) == closed.n
        read = ClosedRead(close.group_id, closed.batch_id, close.subject, len(self.stream) + 1, counts, 1.0)
        self.stream.append(read)
        self.records[close.group_id] = closed
        if self.rng.random() < 0.8:
            self.take(self.ledger.closed(read))
        else:  # killed between the append and what follows it
            self.begin(self.ledger.epoch + 1)

    def play(self, steps: list[str]) -> None:
        """Reads of jobs (j) and events (e), closes (c), take-overs (t)."""
        for step in steps:
            match step:
                case "j":
                    self.read_job()
                case "e":
                    self.read_event()
                case "c":
                    self.append()
                case "t":
                    self.begin(self.ledger.epoch + 1)

    def forget_what_is_not_needed(self, cut: float) -> None:
        """All jobs and a part of the events, then a take-over that finds no event below `need`."""
        for _ in self.world.jobs:
            self.read_job()
        for _ in range(int(len(self.world.events) * cut)):
            self.read_event()
            if self.rng.random() < 0.5:
                self.append()
        need = self.ledger.need()
        kept = [(seq, event) for seq, event in self.world.events if seq >= need]
        self.world = World(jobs=self.world.jobs, events=kept)
        self.begin(self.ledger.epoch + 1)

    def check_batches(self) -> None:
        closes = list(self.records.values())
        for batch_id in {closed.batch_id for closed in closes}:
            mine = [closed for closed in closes if closed.batch_id == batch_id]
            batch = self.ledger.index.batches[batch_id]
            assert (batch.closed, len(batch.open)) == (len(mine), 0)
            assert batch.samples == batch.finished == sum(batch.counts) == sum(closed.n for closed in mine)

    def finish(self) -> None:
        for _ in self.world.jobs:
            self.read_job()
        for _ in self.world.events:
            self.read_event()
        self.take(self.ledger.jobs_end(10_000, self.ledger.read_to, 1.0))
        if not self.rng.random() < 0.5:
            self.take(self.ledger.advance(99.0, 1.0))
        self.take(self.ledger.advance(FAR, 1.0))
        while self.pending:
            epoch = self.ledger.epoch
            self.append()
            if self.ledger.epoch != epoch:
                return self.finish()
        return None


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from("jjjeeeecct"), max_size=60))
def test_every_group_closes_once_as_the_event_order_says(seed: int, steps: list[str]) -> None:
    rng = random.Random(seed)
    world = make_world(rng)
    run = Run(world, rng)
    run.play(steps)
    run.finish()
    assert {group_id: told(closed) for group_id, closed in run.records.items()} == expected(world)
    assert run.ledger.open == {}
    assert run.ledger.double_closes == 0
    for group_id, (_, entries) in expected(world).items():
        missing = {SampleStatus.CANCELLED, SampleStatus.EXPIRED} & {status for status, *_ in entries}
        assert not missing or group_id in run.aborted or run.ledger.epoch > 1


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_a_refold_needs_only_what_need_says(seed: int, cut: float) -> None:
    """Events below `need` may be purged: a take-over from there decides the same."""
    rng = random.Random(seed)
    world = make_world(rng)
    run = Run(world, rng)
    run.forget_what_is_not_needed(cut)
    run.finish()
    assert {group_id: told(closed) for group_id, closed in run.records.items()} == expected(world)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_batch_counts_add_up(seed: int) -> None:
    rng = random.Random(seed)
    world = make_world(rng)
    run = Run(world, rng)
    run.finish()
    run.check_batches()
