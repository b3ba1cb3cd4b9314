"""What garbage collection may choose, and that no interleaving of collectors, crashes, pins and adoptions loses a file."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from rollgrid_checkpoint_sync import plan, retention
from rollgrid_contracts.checkpoints import (
    AdoptedVersion,
    CheckpointKind,
    PolicyState,
    Rollout,
    RolloutRequest,
)
from rollgrid_runtime.blobs import StoredObject
from rollgrid_weights.rollback import roll_back

from tests.property.test_rollout_plan import START

ROOT = "checkpoints/shared/m/"
NOW, TTL_S = 1_000_000.0, 3600.0
OLD = NOW - TTL_S
KEEP = 2


def version(number: int, base: int = 0) -> AdoptedVersion:
    kind = CheckpointKind.LORA if base else CheckpointKind.FULL
    return AdoptedVersion(version=number, kind=kind, base_version=base, prefix=f"{ROOT}{number}/up/")


def adopt(state: PolicyState, number: int, base: int = 0) -> PolicyState:
    asked = RolloutRequest(canary=1)
    state = plan.adopt(state, version(number, base), asked, NOW, deadline_s=60)
    return state


@given(
    bases=st.lists(st.integers(0, 3), max_size=12),
    needed=st.sets(st.integers(0, 14), max_size=4),
    back=st.integers(0, 14),
    keep=st.integers(1, 9),
)
def test_what_is_kept(bases: list[int], needed: set[int], back: int, keep: int) -> None:
    state = START
    for number, behind in enumerate(bases, start=1):
        base = number - behind if behind and plan.listed(state, number - behind) else 0
        state = adopt(state, number, base)
        kept = retention.kept(state, needed, keep)
        assert retention.trimmed(state, needed, keep).versions == retention.marked(state, needed, keep).versions
        state = retention.trimmed(retention.marked(state, needed, keep), needed, keep)
        listed = {one.version for one in state.versions}
        assert listed == kept
        assert retention.trimmed(state, needed, keep) == state, "a second round finds nothing"
        assert state.desired in listed
        assert state.rollout is not None
        assert {state.rollout.version, state.rollout.previous} - {0} <= listed
        assert {one.base_version for one in state.versions} - {0} <= listed, "what is kept has what it sits on"
        assert set(range(max(1, number - keep + 1), number + 1)) <= listed, "the newest"
    if back in state.history and (back == 0 or plan.listed(state, back)):
        state = roll_back(state, back)
        assert back == 0 or back in retention.kept(state, (), 1)


def test_pinned_and_running_versions_stay_with_their_bases() -> None:
    state = START
    for number, base in ((1, 0), (2, 1), (3, 0), (4, 0), (5, 0), (6, 0)):
        state = adopt(state, number, base)
    state = plan.adopt(state, version(7), RolloutRequest(), NOW, deadline_s=60)
    assert retention.kept(state, {2}, 1) == {1, 2, 7}
    assert retention.kept(state, {99}, 1) == {7}
    held = Rollout(version=7, previous=3)
    assert retention.kept(msgspec.structs.replace(state, rollout=held), (), 1) == {3, 7}


def objects(*named: str, modified: float = 0.0) -> list[StoredObject]:
    return [StoredObject(ROOT + name, 1, modified) for name in named]


def going(state: PolicyState, listing: list[StoredObject], **changes: object) -> list[str]:
    arguments = {"open_uploads": (), "old": OLD, **changes}
    return [one.key.removeprefix(ROOT) for one in retention.deletions(state, listing, **arguments)]  # type: ignore[arg-type]


def test_the_manifest_goes_first_and_a_refusal_stays() -> None:
    state = adopt(adopt(START, 1), 2)
    state = msgspec.structs.replace(state, rollout=None, versions=state.versions[1:])
    listing = objects("1/a.safetensors", "1/manifest.json", "1/refused.json", "2/manifest.json", "2/up/a.safetensors")
    assert going(state, listing) == ["1/manifest.json", "1/a.safetensors"]
    assert going(state, listing[:1]) == ["1/a.safetensors"], "after a crash between the two"
    assert retention.unlisted(state, listing) == []


def test_what_nobody_decided_about_is_never_touched_and_leftovers_go_by_age() -> None:
    state = adopt(START, 5)
    undecided = objects("4/manifest.json", "4/up/a", "7/manifest.json", "7/up/a", "notes.txt", "x/y")
    assert going(state, undecided) == []
    leftovers = ["5/lost/a", "6/up/a", "8/parts/a"]
    assert going(state, objects(*leftovers)) == leftovers, "of publishers that lost a number or died"
    assert going(state, objects(*leftovers, modified=OLD)) == []
    refused = ["9/manifest.json", "9/refused.json", "9/up/a"]
    assert going(state, objects(*refused)) == ["9/up/a"]
    assert going(state, objects(*refused, modified=OLD)) == []


def test_an_upload_goes_as_a_whole_when_nothing_of_it_is_young() -> None:
    one = objects("uploads/one/upload.json", "uploads/one/files/a")
    two = [*objects("uploads/two/upload.json"), *objects("uploads/two/files/a", modified=OLD)]
    assert going(START, one + two) == ["uploads/one/upload.json", "uploads/one/files/a"]
    assert going(START, one, open_uploads={"one"}) == []


def test_a_state_from_before_versions_were_listed() -> None:
    listing = objects("1/manifest.json", "1/up/a", "2/manifest.json", "2/up/a", "3/manifest.json")
    state = msgspec.structs.replace(START, history=(0, 1, 2), newest=2, desired=2)
    assert going(state, listing) == []
    assert retention.unlisted(state, listing) == [1, 2]
    listed = retention.relisted(state, [version(2), version(1), version(9)])
    assert [one.version for one in listed.versions] == [1, 2]
    assert not retention.predates(listed)
    assert retention.relisted(listed, [version(1)]) is listed
    assert going(listed, listing) == []


class World:
    """S3, `rg_policies` and `rg_pins`; each `yield` is a place where others may act, or the process dies."""

    def __init__(self) -> None:
        self.state, self.store, self.pins, self.promised = START, dict[str, float](), set[int](), set[int]()
        self.taken, self.holders = set[int](), 0

    def publish(self, number: int) -> Iterator[None]:
        if number in self.taken or number <= self.state.newest:
            return
        self.taken.add(number)
        self.store[f"{ROOT}{number}/up/a"] = NOW
        yield
        self.store[f"{ROOT}{number}/manifest.json"] = NOW

    def adopt_all(self) -> Iterator[None]:
        found = plan.open_versions(self.state, plan.stored("shared", "m", self.store))
        for number in found:
            yield
            if number > self.state.newest:
                self.state = plan.adopt(self.state, version(number), RolloutRequest(), NOW, deadline_s=60)

    def pin(self, number: int) -> Iterator[None]:
        self.holders += 10
        holder = self.holders + number
        self.pins.add(holder)
        yield
        found = plan.listed(self.state, number)
        if found is not None and not found.going:
            self.promised.add(holder)
        else:
            self.pins.discard(holder)

    def unpin(self, number: int) -> Iterator[None]:
        for holder in [holder for holder in self.promised if holder % 10 == number]:
            self.promised.discard(holder)
            self.pins.discard(holder)
            yield

    def needed(self) -> set[int]:
        return {holder % 10 for holder in self.pins}

    def collect(self) -> Iterator[None]:
        listing = [StoredObject(key, 1, modified) for key, modified in sorted(self.store.items())]
        yield
        needed = self.needed()
        yield
        self.state = retention.marked(self.state, needed, KEEP)
        yield
        read = self.state
        yield
        needed = self.needed()
        yield
        if self.state is read:  # the compare-and-set
            self.state = retention.trimmed(read, needed, KEEP)
        yield
        for one in retention.deletions(self.state, listing, (), OLD):
            yield
            self.store.pop(one.key, None)

    def check(self) -> None:
        for one in self.state.versions:
            assert f"{one.prefix}a" in self.store, f"{one.version} is listed"
        for holder in self.promised:
            assert f"{ROOT}{holder % 10}/up/a" in self.store, f"{holder} is pinned"
            assert plan.listed(self.state, holder % 10), f"{holder} is pinned"
        for number in plan.stored("shared", "m", self.store).published - set(self.state.history):
            assert f"{ROOT}{number}/up/a" in self.store, f"{number} exists"

    def run(self, *tasks: Iterator[None]) -> None:
        for task in tasks:
            for _ in task:
                self.check()
        self.check()


ACTIONS = st.one_of(
    st.tuples(st.just("collect"), st.just(0)),
    st.tuples(st.just("publish"), st.integers(1, 9)),
    st.tuples(st.just("adopt_all"), st.just(0)),
    st.tuples(st.sampled_from(["pin", "unpin"]), st.integers(1, 9)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, min_size=4, max_size=14), st.integers(0, 2**32))
def test_no_interleaving_loses_what_is_listed_pinned_or_new(actions: list[tuple[str, int]], seed: int) -> None:
    chance = random.Random(seed)
    world = World()
    for number in range(1, 5):
        world.run(world.publish(number), world.adopt_all())
    running: list[Iterator[None]] = []
    waiting = list(actions)
    while waiting or running:
        if waiting and (len(running) < 3 or chance.random() < 0.5):
            what, number = waiting.pop(0)
            call = getattr(world, what)
            running.append(call(number) if what in ("publish", "pin", "unpin") else call())
        task = chance.choice(running)
        if chance.random() < 0.05 or next(task, "over") == "over":
            running.remove(task)  # it ended, or died here
        world.check()
    world.promised.clear()
    world.pins.clear()
    world.run(world.collect(), world.collect())
    listed = {one.version for one in world.state.versions}
    left = {int(key.removeprefix(ROOT).partition("/")[0]) for key in world.store}
    assert left & set(world.state.history) == listed, "two rounds in peace leave nothing of what was collected"
    assert len(listed) <= KEEP


def test_a_pin_holds_wherever_it_falls_into_a_round() -> None:
    """Every way in which two collectors and one that pins may follow each other, as far as it matters."""
    steps, promised = 7, 0
    for pinning in itertools.combinations(range(steps + 2), 2):
        for other in range(steps + 1):
            world = World()
            for number in range(1, 5):
                world.run(world.publish(number), world.adopt_all())
            first, second, pin = world.collect(), world.collect(), world.pin(1)
            for step in range(steps + 2):
                next(pin if step in pinning else first, None)
                if step == other:
                    world.run(second)
                world.check()
            promised += bool(world.promised)
            world.run(first, world.collect())
    assert promised > 20
