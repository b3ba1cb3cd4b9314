"""Slots: never more running than there are places, suspects alone, express places shared, everything freed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rollgrid_sampler.slots import Slots

TENANTS = st.sampled_from("abc")


class SlotsMachine(RuleBasedStateMachine):
    @initialize(total=st.integers(1, 12), express=st.integers(0, 6))
    def begin(self, total: int, express: int) -> None:
        self.slots = Slots(total, express)
        self.running: dict[int, int] = {}
        self.tenants: dict[int, str] = {}
        self.alone: int | None = None
        self.next_key = 0

    @rule(tenant=TENANTS, alone=st.booleans())
    def admit(self, tenant: str, alone: bool) -> None:
        key, self.next_key = self.next_key, self.next_key + 1
        room = self.slots.admissible(alone=alone)
        assert room is (not self.running if alone else self.alone is None)
        if not room:
            with pytest.raises(ValueError, match="without room"):
                self.slots.admit(key, tenant, alone=alone)
            return
        self.slots.admit(key, tenant, alone=alone)
        self.running[key], self.tenants[key] = 0, tenant
        self.alone = key if alone else None

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data(), hurried=st.booleans())
    def start(self, data: st.DataObject, hurried: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        busy = sum(self.running.values())
        room = self.slots.room(self.tenants[key], hurried=hurried)
        if busy < self.slots.total:
            assert room, "a free slot is anybody's"
        elif not hurried or busy >= self.slots.total + self.slots.express:
            assert not room
        if room:
            self.slots.start(key)
            self.running[key] += 1

    @precondition(lambda self: any(self.running.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from([k for k, count in self.running.items() if count]))
        self.slots.release(key)
        self.running[key] -= 1

    @precondition(lambda self: bool(self.running))
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.running)))
        self.slots.leave(key)
        del self.running[key]
        if self.alone == key:
            self.alone = None

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "slots"):
            return
        assert self.slots.busy == sum(self.running.values()) <= self.slots.total + self.slots.express
        assert self.slots.jobs == len(self.running)
        if self.alone is not None:
            assert set(self.running) == {self.alone}, "nothing beside a suspect"
        else:
            assert self.slots.free == max(0, self.slots.total - self.slots.busy)


TestSlots = SlotsMachine.TestCase
TestSlots.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(("express", "most"), [(1, 1), (2, 1), (3, 2), (4, 2), (8, 4)])
def test_i8_one_tenants_calls_leave_an_express_place_to_another(express: int, most: int) -> None:
    slots, held = Slots(2, express), Counter[str]()
    slots.admit(0, "flood")
    slots.start(0)
    slots.start(0)
    while slots.room("flood", hurried=True):
        slots.start(0)
        held["flood"] += 1
    assert held["flood"] == most
    assert not slots.room("calm"), "batches do not go by express"
    assert slots.room("calm", hurried=True) is (express > 1)
    slots.release(0)
    assert slots.room("flood", hurried=True)
