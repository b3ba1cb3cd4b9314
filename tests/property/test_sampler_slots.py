"""Slots: never more running than there are, nobody lost, suspects alone, everything freed at the end."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollgrid_sampler.slots import Slots


class SlotsMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 12))
    def begin(self, total: int) -> None:
        self.slots = Slots(total)
        self.running: dict[int, int] = {}
        self.waiting: list[int] = []
        self.alone: int | None = None
        self.next_key = 0

    @rule(samples=st.integers(1, 20), alone=st.booleans())
    def admit(self, samples: int, alone: bool) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        room = self.slots.admissible(alone=alone)
        busy = sum(self.running.values())
        expected = not self.running if alone else (self.alone is None and not self.waiting and busy < self.slots.total)
        assert room is expected
        if not room:
            with pytest.raises(ValueError, match="without room"):
                self.slots.admit(key, samples, alone=alone)
            return
        started = self.slots.admit(key, samples, alone=alone)
        assert started == min(samples, self.slots.total - busy)
        self.running[key] = started
        self.waiting += [key] * (samples - started)
        if alone:
            self.alone = key

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, count in self.running.items() if count]))
        successor = self.slots.release(key)
        self.running[key] -= 1
        assert successor == (self.waiting[0] if self.waiting else None), "those who wait go first, in order"
        if successor is not None:
            self.waiting.pop(0)
            self.running[successor] += 1

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.waiting = [other for other in self.waiting if other != key]
        freed = self.running.pop(key)
        successors = self.slots.leave(key)
        assert successors == self.waiting[:freed]
        for successor in successors:
            self.waiting.pop(0)
            self.running[successor] += 1
        if self.alone == key:
            self.alone = None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert self.slots.busy == sum(self.running.values()) <= self.slots.total
        assert self.slots.waiting == len(self.waiting)
        assert self.slots.jobs == len(self.running)
        if self.alone is not None:
            assert set(self.running) == {self.alone}, "nothing beside a suspect"
        if self.waiting:
            assert self.slots.busy == self.slots.total, "nobody waits while a slot is free"


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
