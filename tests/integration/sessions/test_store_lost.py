"""Redis emptied, restarted, stopped, and its lock's holder dead: the stream is the truth, nothing hangs (C36, I6)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from rollgrid_contracts import keys
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import ForkReason, SessionOpened, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.samples import SampleStatus
from rollgrid_ingest.session_rebuild import LEAP
from rollgrid_runtime.errors import RollgridError

from tests.support.episodes import TENANT, ending, facts, finish_of, folded_stream, kept, opening, store_finish
from tests.support.servers import ValkeyServer
from tests.support.waiting import until

from .store_stage import TURN_S, Grid, Stage, stage

HANG_S = 20.0


@pytest.fixture
async def on(made: Grid, valkey: ValkeyServer) -> AsyncIterator[Stage]:
    async with stage(made, valkey) as running:
        yield running


async def rebuilding(call: Awaitable[object]) -> None:
    """The call is refused with a typed 503 that says when to come again, and does not hang."""
    with pytest.raises(RollgridError) as caught:
        async with asyncio.timeout(HANG_S):
            await call
    assert (caught.value.code, caught.value.http_status) == (ErrorCode.EPISODE_REBUILDING, 503)
    assert caught.value.retry_after_s


async def played(on: Stage) -> tuple[SessionOpened, dict[str, int]]:
    """A tree with everything in it: two branches, a lost turn, and a turn under way on each of two branches."""
    opened = await on.open()
    first = await on.play(opened, TurnNode(observation=TokenIds.of([1, 2, 3])))
    lost = await on.play(opened, TurnNode(parent=first), status=SampleStatus.FAILED, token_ids=TokenIds())
    branch = await on.a.fork(TENANT, opened.session, first, ForkReason.EXPLORE)
    second = await on.play(opened, TurnNode(parent=first, branch=branch), by=1)
    return opened, {"first": first, "lost": lost, "second": second}


async def test_emptied_after_every_step_the_fold_is_that_of_the_stream(on: Stage) -> None:
    opened = await on.open()
    heads: dict[str, int | None] = {"main": None}
    numbers = list[int]()

    async def emptied(by: int) -> None:
        on.valkey.flush_all()
        episode = await on.checked(opened, by=by)
        assert facts(episode.tree) == facts(await folded_stream(on.bus, TENANT, opened.session))
        assert kept(on.valkey, TENANT, opened.session) is not None

    for step in range(3):
        for branch in list(heads):
            begun = await on.begin(opened, TurnNode(parent=heads[branch], branch=branch), by=step % 2)
            job, seq = await on.dispatch(opened, begun)
            numbers.append(begun.turn)
            await emptied(0)
            # the turn is still under way, on its branch and until its deadline, and on no other
            held = (await on.b.read(TENANT, opened.session)).open_turns
            assert {turn: (one.branch, one.deadline, one.job_seq) for turn, one in held.items()} == {
                begun.turn: (branch, job.deadline, seq)
            }
            with pytest.raises(RollgridError) as caught:
                await on.begin(opened, TurnNode(parent=heads[branch], branch=branch))
            assert caught.value.code is ErrorCode.SESSION_BUSY
            await store_finish(on.bus, finish_of(job, seq))
            await emptied(1)
            heads[branch] = begun.turn
        name = await on.b.fork(TENANT, opened.session, numbers[0], ForkReason.BEST_OF_N)
        heads[name] = numbers[0]
        await emptied(0)
    assert len(set(numbers)) == len(numbers) == 1 + 2 + 3
    await on.a.end(ending(opened, reward=0.5))
    await emptied(1)
    assert (await on.b.end(ending(opened, reward=0.5))).reward == 0.5


async def test_a_number_given_before_the_loss_is_not_given_again(on: Stage) -> None:
    opened = await on.open()
    begun = await on.begin(opened)  # and its replica is about to store the job
    on.valkey.flush_all()
    other = await on.begin(opened, by=1)
    assert other.turn >= begun.turn + LEAP
    # what the first replica does next finds another fold, and changes nothing in it
    job, seq = await on.dispatch(opened, begun)
    await store_finish(on.bus, finish_of(job, seq))
    job, seq = await on.dispatch(opened, other)
    await store_finish(on.bus, finish_of(job, seq))
    assert set((await on.checked(opened)).tree.nodes) == {begun.turn, other.turn}


async def test_restarted_in_mid_episode_every_call_answers_and_the_fold_comes_back(on: Stage) -> None:
    opened, turns = await played(on)
    begun = await on.begin(opened, TurnNode(parent=turns["first"]))
    job, seq = await on.dispatch(opened, begun)
    on.valkey.kill()
    await rebuilding(on.a.read(TENANT, opened.session))
    await store_finish(on.bus, finish_of(job, seq))  # samplers go on
    await rebuilding(on.b.read(TENANT, opened.session))
    on.valkey.start().wait_ready(10)
    episode = await on.checked(opened, by=1)
    assert (begun.turn in episode.tree.nodes, episode.open_turns) == (True, {})
    assert await on.play(opened, TurnNode(parent=begun.turn)) > begun.turn


async def test_while_redis_is_stopped_everything_is_a_typed_503_and_nothing_hangs(on: Stage) -> None:
    opened, turns = await played(on)
    tail = TurnNode(parent=turns["first"])
    begun = await on.begin(opened, tail)
    seen = await on.a.read(TENANT, opened.session)
    fresh = opening()
    on.valkey.pause()
    try:
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: on.a.read(TENANT, opened.session),
            lambda: on.b.begin_turn(TENANT, opened.session, tail, time.time() + TURN_S, seen=seen),
            lambda: on.a.fork(TENANT, opened.session, turns["first"], ForkReason.RETRY),
            lambda: on.b.end(ending(opened)),
            lambda: on.a.open(*fresh),
        ]
        await asyncio.gather(*(rebuilding(call()) for call in calls))
        async with asyncio.timeout(HANG_S):  # these have nobody to refuse
            await on.a.dispatched(TENANT, opened.session, begun.turn, 99)
            await on.a.abandon_turn(TENANT, opened.session, 99)
    finally:
        on.valkey.resume()
    await until(lambda: readable(on, opened), 10, "the session is read again")
    assert (await on.checked(opened)).ended is None
    assert (await on.b.open(*fresh)).session == fresh[0].session


async def readable(on: Stage, opened: SessionOpened) -> bool:
    with contextlib.suppress(RollgridError):
        await on.a.read(TENANT, opened.session)
        return True
    return False


async def test_a_lock_whose_holder_died_is_waited_for_and_then_expires(on: Stage) -> None:
    opened, _ = await played(on)
    on.valkey.flush_all()
    lock = keys.session_lock(TENANT, opened.session)
    with contextlib.closing(on.valkey.client()) as client:
        client.set(lock, "of a replica that died", px=30_000)
        await rebuilding(on.a.read(TENANT, opened.session))
        client.pexpire(lock, 1)
        await until(lambda: not client.exists(lock), 10, "the lock is gone")
    await on.checked(opened)


async def test_many_requests_at_once_rebuild_once(on: Stage) -> None:
    opened, _ = await played(on)
    on.valkey.flush_all()
    reads = [on.replicas[k % 2].store.read(TENANT, opened.session) for k in range(12)]
    found = await asyncio.gather(*reads, return_exceptions=True)
    generations = set()
    for one in found:
        if isinstance(one, BaseException):
            assert isinstance(one, RollgridError), one
            assert one.code is ErrorCode.EPISODE_REBUILDING
        else:
            generations.add(one.generation)
    assert len(generations) == 1


async def test_a_rebuilder_that_lost_its_lock_overwrites_nothing(on: Stage) -> None:
    opened, _ = await played(on)
    before = kept(on.valkey, TENANT, opened.session)
    assert before is not None
    name, lock = keys.session(TENANT, opened.session), keys.session_lock(TENANT, opened.session)
    install = on.a._episodes.rebuilder.install
    assert await install(TENANT, opened.session, {"gen": "late"}, "a token that expired") == "lost"
    with contextlib.closing(on.valkey.client()) as client:
        client.set(lock, "mine")
        assert await install(TENANT, opened.session, {"gen": "late"}, "mine") == "there"
        assert client.hget(name, "gen") == before.generation.encode()
        assert not client.exists(lock)


async def test_a_fold_that_is_behind_another_replicas_changes_nothing(on: Stage) -> None:
    opened, turns = await played(on)
    stale = await on.a.read(TENANT, opened.session)
    last = await on.play(opened, TurnNode(parent=turns["first"]), by=1)
    assert await on.a._episodes._catch_up(TENANT, opened.session, stale) is None
    assert last in (await on.checked(opened)).tree.nodes


async def test_a_fold_that_nobody_can_read_is_as_good_as_gone(on: Stage) -> None:
    opened, turns = await played(on)
    name = keys.session(TENANT, opened.session)
    with contextlib.closing(on.valkey.client()) as client:
        for field, value in (("opened", b"\xc1"), ("at", b"-"), ("n:9:9999", b"\x80"), ("f:x:9999", b"junk")):
            client.hset(name, field, value)
            assert turns["second"] in (await on.checked(opened, by=1)).tree.nodes
        client.hdel(name, "next")
        await on.checked(opened)


async def test_without_a_ledger_nobody_guesses_which_turns_are_open(made: Grid, on: Stage) -> None:
    opened, _ = await played(on)
    made.ledger.pause()
    try:
        await on.checked(opened)  # Redis has it
        on.valkey.flush_all()
        await rebuilding(on.a.read(TENANT, opened.session))
    finally:
        made.ledger.resume()
    await until(lambda: readable(on, opened), 30, "the ledger is back", every_s=0.2)
    await on.checked(opened)
