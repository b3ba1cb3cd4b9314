"""Random plays of two replicas with finishes in any order, copies, and a Redis that is emptied at any moment (I6).

The model knows only what was asked and what came back.  After every step Redis, whatever it has, is the fold of the
stream; no number comes twice; a branch is busy exactly while the model has a turn of it under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import ForkReason, SessionOpened, SessionOutcome, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.samples import SampleStatus
from rollgrid_runtime.errors import RollgridError

from tests.support.episodes import (
    TENANT,
    assert_kept_is_the_fold,
    ending,
    facts,
    finish_of,
    folded_stream,
    opening,
    store_finish,
)
from tests.support.servers import ValkeyServer

from .store_stage import TURN_S, Grid, Stage, stage

REPLICAS = st.integers(0, 1)
STATUSES = st.sampled_from([SampleStatus.SUCCEEDED, SampleStatus.SUCCEEDED, SampleStatus.FAILED])


class Play(RuleBasedStateMachine):
    on: ClassVar[Stage]
    loop: ClassVar[asyncio.AbstractEventLoop]

    def __init__(self) -> None:
        super().__init__()
        self.opened: SessionOpened
        self.heads: dict[str, int | None] = {"main": None}
        self.under_way: dict[int, tuple[SampleGroup, int]] = {}
        self.done: list[tuple[SampleGroup, int]] = []
        self.nodes: set[int] = set()
        self.numbers: list[int] = []
        self.ended: SessionOutcome | None = None

    def do(self, call: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(call, 30))

    def refusal(self, call: Coroutine[Any, Any, Any]) -> ErrorCode:
        with pytest.raises(RollgridError) as caught:
            self.do(call)
        return caught.value.code

    def busy(self, branch: str) -> bool:
        nodes = [job.session.node for job, _ in self.under_way.values() if job.session is not None]
        return any(node.branch == branch for node in nodes)

    @initialize()
    def open(self) -> None:
        self.opened = self.do(self.on.a.open(*opening()))

    @rule(by=REPLICAS, data=st.data(), observed=st.integers(0, 3))
    def begin(self, by: int, data: st.DataObject, observed: int) -> None:
        branch = data.draw(st.sampled_from(sorted(self.heads)), label="branch")
        node = TurnNode(parent=self.heads[branch], branch=branch, observation=TokenIds.of(range(observed)))
        call = self.on.replicas[by].store.begin_turn(TENANT, self.opened.session, node, time.time() + TURN_S)
        if self.ended is not None:
            assert self.refusal(call) is ErrorCode.SESSION_ENDED
        elif self.busy(branch):
            assert self.refusal(call) is ErrorCode.SESSION_BUSY
        else:
            begun = self.do(call)
            assert begun.turn not in self.numbers
            self.numbers.append(begun.turn)
            self.under_way[begun.turn] = self.do(self.on.dispatch(self.opened, begun, by=by))

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), status=STATUSES, folds=st.booleans(), by=REPLICAS)
    def finish(self, data: st.DataObject, status: SampleStatus, folds: bool, by: int) -> None:
        turn = data.draw(st.sampled_from(sorted(self.under_way)), label="turn")
        job, seq = self.under_way.pop(turn)
        failed: dict[str, Any] = {} if status is SampleStatus.SUCCEEDED else {"token_ids": TokenIds()}
        at = self.do(store_finish(self.on.bus, finish_of(job, seq, status=status, **failed)))
        self.done.append((job, seq))
        assert job.session is not None
        if status is SampleStatus.SUCCEEDED and self.ended is None:
            self.nodes.add(turn)
            self.heads[job.session.node.branch] = turn
        if folds:
            episode = self.do(self.on.replicas[by].store.read(TENANT, self.opened.session, at_least=at))
            assert turn in episode.tree.nodes or turn in episode.tree.lost or episode.ended is not None

    @precondition(lambda self: self.done)
    @rule(data=st.data())
    def finish_again(self, data: st.DataObject) -> None:
        """An owner that was thought dead ends the turn, too."""
        job, seq = data.draw(st.sampled_from(self.done), label="turn")
        self.do(store_finish(self.on.bus, finish_of(job, seq, text="late")))

    @rule(by=REPLICAS, data=st.data())
    def fork(self, by: int, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from([None, *sorted(self.nodes)]), label="parent")
        name = f"f{len(self.heads)}"  # a drawn name would be another in the next run
        call = self.on.replicas[by].store.fork(TENANT, self.opened.session, parent, ForkReason.EXPLORE, name=name)
        if self.ended is not None:
            assert self.refusal(call) is ErrorCode.SESSION_ENDED
        else:
            self.heads[self.do(call)] = parent

    @rule()
    def empty_redis(self) -> None:
        self.on.valkey.flush_all()

    @rule(by=REPLICAS)
    def read(self, by: int) -> None:
        episode = self.do(self.on.replicas[by].store.read(TENANT, self.opened.session))
        assert facts(episode.tree) == facts(self.do(folded_stream(self.on.bus, TENANT, self.opened.session)))
        assert set(episode.tree.nodes) == self.nodes
        if self.ended is None:
            assert set(episode.open_turns) == set(self.under_way)
            assert {name: branch.head for name, branch in episode.tree.branches.items()} == self.heads

    @precondition(lambda self: len(self.numbers) > 3)
    @rule(by=REPLICAS, outcome=st.sampled_from([SessionOutcome.CLOSED, SessionOutcome.FAILED]))
    def end(self, by: int, outcome: SessionOutcome) -> None:
        call = self.on.replicas[by].store.end(ending(self.opened, outcome))
        if self.ended not in (None, outcome):
            assert self.refusal(call) is ErrorCode.SESSION_ENDED
        else:
            assert self.do(call).outcome is outcome
            self.ended = outcome

    @invariant()
    def redis_is_the_fold(self) -> None:
        if hasattr(self, "opened"):
            self.do(assert_kept_is_the_fold(self.on.bus, self.on.valkey, TENANT, self.opened.session))


def test_whatever_two_replicas_play_redis_is_the_fold_of_the_stream(made: Grid, valkey: ValkeyServer) -> None:
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        entered = stage(made, valkey)
        Play.loop, Play.on = loop, loop.run_until_complete(entered.__aenter__())
        try:
            run_state_machine_as_test(
                Play,
                settings=settings(
                    max_examples=25,
                    stateful_step_count=25,
                    deadline=None,
                    derandomize=True,
                    phases=(Phase.generate,),  # shrinking plays on real servers for minutes
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            loop.run_until_complete(entered.__aexit__(None, None, None))
