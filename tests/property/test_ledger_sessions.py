"""I1, I5, I6 with sessions: whatever the interleaving of branches, copies and take-overs, the event order decides alone."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    MAIN_BRANCH,
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.jobs import OpenEpisode, SampleGroup, SamplingParams, Session, turn_call
from rollgrid_contracts.samples import GroupsCancelled, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerSpec, ScoreStatus
from rollgrid_contracts.trajectories import CloseReason, GroupClosed
from rollgrid_trajectory_logger.ledger import Event, Settle

from .test_ledger_fold import Run, World

SCORERS = (ScorerSpec(name="exact", type="exact"),)
BRANCHES = (MAIN_BRANCH, "b", "c")


def who(group: int) -> dict[str, Any]:
    return {"tenant": "acme", "run": "r1", "group_id": f"g{group}"}


def opening(group: int, n: int, scored: bool) -> OpenEpisode:
    return OpenEpisode(
        **who(group), batch_id=f"b{group % 2}", n=n, policy="p", scorers=SCORERS if scored else (),
        created_at=1.0, deadline=100.0,
    )  # fmt: skip


def turn_job(group: int, index: int, turn: int, n: int) -> SampleGroup:
    return SampleGroup(
        **who(group), batch_id="", n=n, indexes=(index,), policy="p", pool="pool", prompt_token_ids=TokenIds(),
        sampling=SamplingParams(max_tokens=4), created_at=1.0, deadline=100.0,
        session=Session(session=ids.session_id(f"g{group}", index), turn=turn),
    )  # fmt: skip


class Maker:
    """Draws the two streams: jobs in order, each session's events in an order of their own, all interleaved."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.world = rng, World()
        self.attempt = 0

    def make(self) -> World:
        rng = self.rng
        sessions: list[list[Event]] = []
        batches: list[list[Any]] = []
        plans = [(group, rng.randint(1, 3), rng.random() < 0.5) for group in range(rng.randint(1, 3))]
        for group, n, scored in plans:
            turns = [(index, turn) for index in range(n) for turn in range(rng.randint(0, 5))]
            copies = [turn_job(group, *turn, n) for turn in turns for _ in range(rng.choice([1, 1, 2]))]
            rng.shuffle(copies)
            batches.append([opening(group, n, scored), *copies])
            batches[-1].insert(rng.randint(1, len(batches[-1])), opening(group, n, scored))
        seq = 0
        for item in self.interleaved(batches):
            seq += rng.randint(1, 2)
            self.world.jobs.append((seq, item))
        for group, n, scored in plans:
            sessions += [self.session(group, index, n, scored) for index in range(n)]
        last = self.world.jobs[-1][0]
        for group, _, _ in plans:
            if rng.random() < 0.2:
                cancel = GroupsCancelled(
                    tenant="acme", run="r1", batch_id=f"b{group % 2}", group_ids=(f"g{group}",), job_seq=last
                )
                sessions.append([cancel])
        position = 0
        ends: dict[tuple[str, int], list[int]] = {}
        for event in self.interleaved(sessions):
            position += rng.randint(1, 2)
            if isinstance(event, SamplesScored):  # of one of the session's ends, or of something else
                told = ends.get((event.group_id, event.results[0].index), [1])
                event = SamplesScored(**{**as_dict(event), "finished_seq": rng.choice([*told, told[0]])})
            elif isinstance(event, SessionEnded):
                ends.setdefault((event.group_id, event.index), []).append(position)
            self.world.events.append((position, event))
        return self.world

    def interleaved(self, lists: list[list[Any]]) -> list[Any]:
        """Each list keeps its order."""
        found, left = [], [list(items) for items in lists if items]
        while left:
            items = self.rng.choice(left)
            found.append(items.pop(0))
            left = [items for items in left if items]
        return found

    def session(self, group: int, index: int, n: int, scored: bool) -> list[Event]:
        rng, name = self.rng, ids.session_id(f"g{group}", index)
        first = next(seq for seq, item in self.world.jobs if item.group_id == f"g{group}")
        own: dict[str, Any] = {**who(group), "index": index, "session": name, "job_seq": first}
        opened = SessionOpened(**own, n=n, terms=SessionTerms(policy="p"), opened_at=float(rng.randint(1, 9)))
        events: list[Event] = [opened] if rng.random() < 0.9 else []
        mine = [(seq, item) for seq, item in self.world.jobs if is_turn_of(item, group, index)]
        actions: list[Any] = [(seq, item) for seq, item in mine for _ in range(rng.choice([0, 1, 1, 2]))]
        actions += [SessionForked(**own, branch=rng.choice("bc"), parent=rng.choice([None, 0, 1])) for _ in range(rng.randint(0, 2))]  # fmt: skip
        actions += [opened] * rng.choice([0, 0, 1])
        rng.shuffle(actions)
        if rng.random() < 0.7:  # mostly as it really goes: turns in their order
            actions.sort(key=lambda action: action[1].session.turn if isinstance(action, tuple) else rng.randint(0, 4))
        events += [self.finish(own, n, *action) if isinstance(action, tuple) else action for action in actions]
        turns = [item.session.turn for _, item in mine if isinstance(item, SampleGroup) and item.session]
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            ended = SessionEnded(
                **own, outcome=rng.choice([SessionOutcome.CLOSED] * 3 + [SessionOutcome.FAILED]),
                reward=rng.choice([None, 0.5]), leaf=rng.choice([None, *turns]), ended_at=float(rng.randint(1, 9)),
            )  # fmt: skip
            events.insert(rng.randint(len(events) * 2 // 3, len(events)), ended)
        for turn in turns if scored else ():
            self.attempt += 1
            verdict = Score(scorer="exact", status=ScoreStatus.SCORED, value=float(self.attempt))
            results = (SampleScores(index=index, turn=turn, scores=(verdict,)),)
            events.append(SamplesScored(**who(group), job_seq=first, finished_seq=0, results=results))
        return events

    def finish(self, own: dict[str, Any], n: int, seq: int, item: SampleGroup) -> SamplesFinished:
        rng, turn = self.rng, item.session.turn if item.session else 0
        self.attempt += 1
        node = TurnNode(
            parent=rng.choice([None, *range(turn)]) if turn else None,
            branch=rng.choice(BRANCHES) if rng.random() < 0.3 else MAIN_BRANCH,
        )
        sample = Sample(
            index=own["index"], turn=turn, attempt=self.attempt, node=node,
            status=rng.choice([SampleStatus.SUCCEEDED] * 4 + [SampleStatus.FAILED, SampleStatus.CANCELLED]),
            token_ids=TokenIds.of([1] * rng.choice([0, 2])), logprobs=Floats(),
        )  # fmt: skip
        return SamplesFinished(
            **{name: own[name] for name in ("tenant", "run", "group_id")}, batch_id="", n=n, policy="p", job_seq=seq,
            fence=rng.choice([0, seq, max(1, seq - 1)]), session=item.session, samples=(sample,),
        )  # fmt: skip


def as_dict(event: SamplesScored) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def is_turn_of(item: Any, group: int, index: int) -> bool:
    return isinstance(item, SampleGroup) and (item.group_id, item.indexes) == (f"g{group}", (index,))


class Played:
    """One session worked out the slow and obvious way."""

    def __init__(self) -> None:
        self.opened = False
        self.nodes: dict[int, int] = {}
        self.lost: dict[int, tuple[int, bool]] = {}
        self.branches: list[str] = []
        self.end: tuple[int, SessionEnded] | None = None
        self.value: float | None = None

    def tell(self, seq: int, event: Any) -> None:
        if isinstance(event, SessionOpened):
            self.opened = True
        elif not self.opened or (self.end is not None and not isinstance(event, SamplesScored)):
            return
        elif isinstance(event, SessionEnded):
            self.end = (seq, event)
        elif isinstance(event, SessionForked):
            if event.branch not in self.branches and (event.parent is None or event.parent in self.nodes):
                self.branches.append(event.branch)
        elif isinstance(event, SamplesFinished):
            self._finish(event.samples[0])
        elif self.end is not None and self.leaf is not None and self.value is None:
            result = event.results[0]
            if (event.finished_seq, result.turn) == (self.end[0], self.leaf):
                self.value = result.scores[0].value

    def _finish(self, sample: Sample) -> None:
        node = sample.node or TurnNode()
        known = node.branch in (MAIN_BRANCH, *self.branches) and (node.parent is None or node.parent in self.nodes)
        if sample.turn in self.nodes or sample.turn in self.lost or not known:
            return
        if sample.status is SampleStatus.SUCCEEDED:
            self.nodes[sample.turn] = sample.attempt
        else:
            self.lost[sample.turn] = (sample.attempt, len(sample.token_ids) > 0)

    @property
    def leaf(self) -> int | None:
        closed = self.end is not None and self.end[1].outcome is SessionOutcome.CLOSED
        return self.end[1].leaf if self.end and closed and self.end[1].leaf in self.nodes else None

    def is_over(self, scored: bool) -> bool:
        return self.end is not None and (not scored or self.leaf is None or self.value is not None)

    def entry(self, scored: bool, missing: SampleStatus) -> tuple[Any, ...]:
        kept = {turn: attempt for turn, (attempt, tokens) in self.lost.items() if tokens}
        turns = tuple(sorted((self.nodes | kept).items()))
        if self.end is None:
            return missing, turns, None, tuple(self.branches)
        ended = self.end[1]
        closed = ended.outcome is SessionOutcome.CLOSED
        reward = (self.value if scored else ended.reward) if closed else None
        return (SampleStatus.SUCCEEDED if closed else SampleStatus.FAILED), turns, reward, tuple(self.branches)


def expected(world: World) -> dict[str, tuple[Any, ...]]:
    outcome = {}
    for job in {item.group_id: item for _, item in reversed(world.jobs) if isinstance(item, OpenEpisode)}.values():
        scored, reason = bool(job.scorers), CloseReason.EXPIRED
        sessions = [Played() for _ in range(job.n)]
        for seq, event in world.events:
            if isinstance(event, GroupsCancelled):
                if job.group_id in event.group_ids:
                    reason = CloseReason.CANCELLED
                    break
                continue
            if event.group_id != job.group_id:
                continue
            index = event.samples[0].index if isinstance(event, SamplesFinished) else event.results[0].index if isinstance(event, SamplesScored) else event.index  # fmt: skip
            sessions[index].tell(seq, event)
            if all(session.is_over(scored) for session in sessions):
                reason = CloseReason.COMPLETE
                break
        missing = SampleStatus.CANCELLED if reason is CloseReason.CANCELLED else SampleStatus.EXPIRED
        outcome[job.group_id] = (reason, tuple(session.entry(scored, missing) for session in sessions))
    return outcome


def told(closed: GroupClosed) -> tuple[Any, ...]:
    assert [entry.sample.index for entry in closed.entries] == list(range(closed.n))
    entries = tuple(
        (
            entry.sample.status,
            tuple((turn.turn, turn.attempt) for turn in entry.turns),
            entry.reward,
            tuple(fork.branch for fork in entry.branches),
        )
        for entry in closed.entries
    )
    return closed.reason, entries


class SessionRun(Run):
    """Checks what is let go: a group's opening with its close, a turn once nobody waits for it."""

    def settle(self, decision: Settle) -> None:
        by_seq = dict(self.world.jobs)
        for seq in decision.ack + decision.delete:
            item = by_seq[seq]
            if isinstance(item, OpenEpisode):
                assert item.group_id in self.records, "a group's opening was let go before its close"
            else:
                assert isinstance(item, SampleGroup)
                assert item.session is not None
                done = seq in self.finished or item.group_id in self.records
                assert done or self.is_pointless(item), "a turn was let go that somebody waits for"
            self.settled.add(seq)
        for seq in decision.delete:
            item = by_seq[seq]
            assert not isinstance(item, SampleGroup) or item.call_id in decision.turns, "its worker was not told"

    @property
    def finished(self) -> set[int]:
        return {event.job_seq for seq, event in self.read if isinstance(event, SamplesFinished)}

    @property
    def read(self) -> list[tuple[int, Event]]:
        return [(seq, event) for seq, event in self.world.events if seq <= self.event_at]

    def is_pointless(self, item: SampleGroup) -> bool:
        """Its session has ended, or the turn has its finish, as far as events have been read in any life."""
        for _, event in self.read:
            if isinstance(event, SessionEnded) and (event.group_id, event.index) == (item.group_id, item.indexes[0]):
                return True
            if isinstance(event, SamplesFinished) and event.session is not None and item.session is not None:
                turn = turn_call(event.session.session, event.session.turn)
                if turn == item.call_id:
                    return True
        return False


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.lists(st.sampled_from("jjjeeeecct"), max_size=60))
def test_i1_i5_i6_every_group_of_sessions_closes_once_as_the_event_order_says(seed: int, steps: list[str]) -> None:
    rng = random.Random(seed)
    world = Maker(rng).make()
    run = SessionRun(world, rng)
    run.play(steps)
    run.finish()
    assert {group_id: told(closed) for group_id, closed in run.records.items()} == expected(world)
    assert run.ledger.open == {}
    assert run.ledger.double_closes == 0
    assert run.ledger.held() == 0
    if run.ledger.epoch == 1:
        assert run.settled == {seq for seq, _ in world.jobs}, "jobs were left over"


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), cut=st.floats(0, 1))
def test_nothing_that_a_refold_of_sessions_needs_is_below_need(seed: int, cut: float) -> None:
    rng = random.Random(seed)
    world = Maker(rng).make()
    run = SessionRun(world, rng)
    run.forget_what_is_not_needed(cut)
    run.finish()
    assert {group_id: told(closed) for group_id, closed in run.records.items()} == expected(world)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_batch_counts_of_sessions_add_up(seed: int) -> None:
    rng = random.Random(seed)
    run = SessionRun(Maker(rng).make(), rng)
    run.finish()
    run.check_batches()
