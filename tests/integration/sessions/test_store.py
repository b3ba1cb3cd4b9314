"""The transitions of a session: two ingest replicas on real servers, racing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from rollgrid_contracts import keys, subjects
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import ForkReason, SessionOpened, SessionOutcome, TurnNode
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.fleet import GroupStatus, IdempotencyRecord
from rollgrid_contracts.ids import idempotency_key, new_key
from rollgrid_contracts.jobs import turn_call
from rollgrid_contracts.samples import GroupsCancelled, SampleStatus
from rollgrid_contracts.scoring import ScorerKind, ScorerSpec
from rollgrid_contracts.topology import IDEMPOTENCY, SAMPLES
from rollgrid_ingest.ledger_client import LedgerClient
from rollgrid_ingest.session_store import HOLD_S
from rollgrid_ingest.submission import Caller
from rollgrid_ingest.turn_keys import BEGINNING_S, TurnKeys
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Table

from tests.support.episodes import TENANT, ending, finish_of, folded_stream, job_of, opening, store_finish
from tests.support.servers import ValkeyServer, valkey_server
from tests.support.waiting import until

from .store_stage import TURN_S, Grid, Stage, stage


@pytest.fixture(scope="module")
def redis() -> Iterator[ValkeyServer]:
    """Emptied by nobody here: one for all tests of this module."""
    with valkey_server() as server:
        yield server


@pytest.fixture
async def on(made: Grid, redis: ValkeyServer) -> AsyncIterator[Stage]:
    async with stage(made, redis) as running:
        yield running


async def refused(call: Any) -> RollgridError:
    with pytest.raises(RollgridError) as caught:
        await call
    return caught.value


async def outcomes(calls: list[Any]) -> tuple[list[Any], Counter[ErrorCode]]:
    """(what came back, refusals by code) of calls at once."""
    found = await asyncio.gather(*calls, return_exceptions=True)
    errors = [one for one in found if isinstance(one, BaseException)]
    assert all(isinstance(error, RollgridError) for error in errors), errors
    codes = Counter(error.code for error in errors if isinstance(error, RollgridError))
    return [one for one in found if not isinstance(one, BaseException)], codes


async def test_one_turn_of_a_branch_at_a_time_whoever_is_asked(on: Stage) -> None:
    opened, numbers = await on.open(), list[int]()
    for _ in range(4):
        head = max(numbers, default=None)
        calls = [on.begin(opened, TurnNode(parent=head), by=turn % 2) for turn in range(10)]
        won, codes = await outcomes(calls)
        assert (len(won), codes) == (1, {ErrorCode.SESSION_BUSY: 9})
        job, seq = await on.dispatch(opened, won[0])
        await store_finish(on.bus, finish_of(job, seq))
        numbers.append(won[0].turn)
    assert numbers == [0, 1, 2, 3]
    episode = await on.checked(opened)
    assert (episode.open_turns, episode.tree.depth) == ({}, 4)


async def test_more_requests_at_once_than_connections_wait_for_one(on: Stage) -> None:
    opened = await on.open()
    found, codes = await outcomes([on.a.read(TENANT, opened.session) for _ in range(300)])
    assert (len(found), codes) == (300, {})


async def test_branches_run_side_by_side_and_no_number_comes_twice(on: Stage) -> None:
    opened = await on.open()
    root = await on.play(opened)
    names = await asyncio.gather(
        *(on.replicas[k % 2].store.fork(TENANT, opened.session, root, ForkReason.EXPLORE) for k in range(6))
    )
    assert len(set(names)) == 6
    nodes = [TurnNode(parent=root, branch=name) for name in names for _ in range(2)]
    won, codes = await outcomes([on.begin(opened, node, by=k % 2) for k, node in enumerate(nodes)])
    assert sorted(begun.node.branch for begun in won) == sorted(names)
    assert sorted(begun.turn for begun in won) == [1, 2, 3, 4, 5, 6]
    assert codes == {ErrorCode.SESSION_BUSY: 6}
    for begun in reversed(won):  # branches end in any order
        job, seq = await on.dispatch(opened, begun)
        await store_finish(on.bus, finish_of(job, seq))
    episode = await on.checked(opened, by=1)
    assert episode.tree.leaves() == (1, 2, 3, 4, 5, 6)
    assert all(fork.reason is ForkReason.EXPLORE for fork in episode.tree.forks.values())


async def test_where_the_terms_say_so_a_turn_at_the_same_time_is_a_branch_of_its_own(on: Stage) -> None:
    opened = await on.open(on_concurrent_turn="fork")
    root = await on.play(opened)
    won, codes = await outcomes([on.begin(opened, TurnNode(parent=root), by=k % 2) for k in range(4)])
    assert codes == {}
    branches = {begun.node.branch for begun in won}
    assert len(branches) == 4
    assert "main" in branches
    assert [begun.node.fork for begun in won].count(ForkReason.CONCURRENT_TURN) == 3
    for begun in won:
        job, seq = await on.dispatch(opened, begun)
        await store_finish(on.bus, finish_of(job, seq))
    episode = await on.checked(opened)
    assert episode.tree.children[root] == sorted(begun.turn for begun in won)
    assert {branch.reason for branch in episode.tree.branches.values()} == {None, ForkReason.CONCURRENT_TURN}


async def test_a_turn_planned_on_a_tree_that_has_moved_on_is_not_begun(on: Stage) -> None:
    opened = await on.open()
    seen = await on.b.read(TENANT, opened.session)
    first = await on.play(opened)
    late = on.b.begin_turn(TENANT, opened.session, TurnNode(), time.time() + TURN_S, seen=seen)
    assert (await refused(late)).code is ErrorCode.SESSION_BUSY
    edited = TurnNode(fork=ForkReason.EDITED_HISTORY)
    begun = await on.b.begin_turn(TENANT, opened.session, edited, time.time() + TURN_S, seen=seen)
    assert begun.turn > first


async def test_a_turn_that_failed_leaves_its_branch_where_it_was(on: Stage) -> None:
    opened = await on.open()
    first = await on.play(opened)
    lost = await on.play(opened, TurnNode(parent=first), status=SampleStatus.FAILED, token_ids=TokenIds())
    second = await on.play(opened, TurnNode(parent=first), by=1)
    episode = await on.checked(opened)
    assert (list(episode.tree.nodes), list(episode.tree.lost)) == ([first, second], [lost])


async def test_a_second_finish_of_a_turn_changes_nothing(on: Stage) -> None:
    opened = await on.open()
    begun = await on.begin(opened)
    job, seq = await on.dispatch(opened, begun)
    first = await store_finish(on.bus, finish_of(job, seq))
    before = await on.checked(opened)
    await store_finish(on.bus, finish_of(job, seq, text="of an owner that came back"))
    after = await on.checked(opened, by=1)
    assert (after.tree.nodes, after.tree.nodes[0].seq) == (before.tree.nodes, first)


async def test_a_turn_past_its_deadline_holds_its_branch_no_longer(on: Stage) -> None:
    opened = await on.open(deadline_s=3600.0)
    late = await on.begin(opened)
    job, seq = await on.dispatch(opened, late)
    assert (await refused(on.begin(opened))).code is ErrorCode.SESSION_BUSY
    on.clock.ahead = TURN_S + 1
    begun = await on.begin(opened, by=1)
    assert begun.turn > late.turn
    await store_finish(on.bus, finish_of(job, seq))  # it came after all: a node like any other
    assert set((await on.checked(opened)).tree.nodes) == {late.turn}


async def test_a_turn_whose_replica_died_before_it_was_stored_is_let_go(on: Stage) -> None:
    opened = await on.open()
    never = await on.begin(opened)
    assert (await refused(on.begin(opened, by=1))).code is ErrorCode.SESSION_BUSY
    on.clock.ahead = HOLD_S + 1
    begun = await on.begin(opened, by=1)
    assert begun.turn == never.turn + 1


async def test_a_turn_that_was_stored_by_a_replica_that_died_then_keeps_its_branch(on: Stage) -> None:
    opened = await on.open()
    begun = await on.begin(opened)
    job, seq = await on.dispatch(opened, begun)
    with on.valkey.client() as client:  # as if the replica had died before it noted the dispatch
        client.hdel(keys.session(TENANT, opened.session), f"d:{begun.turn}")
    on.clock.ahead = HOLD_S + 1
    assert (await refused(on.begin(opened, by=1))).code is ErrorCode.SESSION_BUSY
    assert (await on.b.read(TENANT, opened.session)).open_turns[begun.turn].job_seq == seq
    await store_finish(on.bus, finish_of(job, seq))
    assert (await on.begin(opened, TurnNode(parent=begun.turn), by=1)).turn == begun.turn + 1


async def test_a_turn_that_was_refused_by_the_queue_is_abandoned(on: Stage) -> None:
    opened = await on.open()
    begun = await on.begin(opened)
    await on.a.abandon_turn(TENANT, opened.session, begun.turn)
    assert (await on.begin(opened, by=1)).turn == begun.turn + 1


@pytest.mark.parametrize(
    ("node", "field"),
    [(TurnNode(parent=7), "parent"), (TurnNode(branch="nowhere"), "branch")],
    ids=["parent", "branch"],
)
async def test_a_turn_hangs_on_what_there_is(on: Stage, node: TurnNode, field: str) -> None:
    opened = await on.open()
    error = await refused(on.begin(opened, node))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, field)


async def test_there_is_no_session_that_was_not_opened(on: Stage) -> None:
    error = await refused(on.a.read(TENANT, "snever"))
    assert error.code is ErrorCode.NOT_FOUND
    opened = await on.open()
    assert (await refused(on.a.read("another", opened.session))).code is ErrorCode.NOT_FOUND


async def test_opening_again_is_the_same_session_with_other_terms_a_conflict(on: Stage) -> None:
    opened, episode = opening(metadata={"task": 1})
    calls = [on.replicas[k % 2].store.open(opened, episode) for k in range(6)]
    won, codes = await outcomes(calls)
    assert codes == {}
    assert {one.job_seq for one in won} == {won[0].job_seq}
    other, episode = opening(group=opened.group_id, metadata={"task": 2})
    assert (await refused(on.b.open(other, episode))).code is ErrorCode.IDEMPOTENCY_CONFLICT
    on.valkey.client().delete(keys.session(TENANT, opened.session))
    assert (await refused(on.b.open(other, episode))).code is ErrorCode.IDEMPOTENCY_CONFLICT
    assert (await on.checked(opened, by=1)).opened == won[0]


async def test_a_session_ends_once(on: Stage) -> None:
    opened = await on.open()
    turn = await on.play(opened)
    how: dict[str, Any] = {"reward": 1.0, "turn_rewards": {turn: 0.5}, "leaf": turn}
    ends = [ending(opened, **how), ending(opened, SessionOutcome.FAILED, detail="the tool broke")]
    won, codes = await outcomes([on.replicas[k % 2].store.end(ends[k // 2]) for k in range(4)])
    assert (len(won), codes) == (2, {ErrorCode.SESSION_ENDED: 2})
    assert len({one.outcome for one in won}) == 1
    tree = await folded_stream(on.bus, TENANT, opened.session)
    assert tree.ended == won[0]
    assert (await on.checked(opened)).ended == won[0]
    assert (await refused(on.begin(opened, TurnNode(parent=turn), by=1))).code is ErrorCode.SESSION_ENDED
    fork = on.b.fork(TENANT, opened.session, turn, ForkReason.RETRY)
    assert (await refused(fork)).code is ErrorCode.SESSION_ENDED


async def test_no_turn_begins_once_an_end_is_announced(on: Stage) -> None:
    opened = await on.open()
    assert await on.a._endings.announce(ending(opened), None) is None
    assert (await refused(on.begin(opened, by=1))).code is ErrorCode.SESSION_BUSY
    assert (await on.b.end(ending(opened))).outcome is SessionOutcome.CLOSED
    assert (await refused(on.begin(opened))).code is ErrorCode.SESSION_ENDED


async def test_an_end_that_its_replica_never_stored_holds_nobody_for_long(on: Stage) -> None:
    opened = await on.open()
    assert await on.a._endings.announce(ending(opened), None) is None
    assert (await refused(on.begin(opened, by=1))).code is ErrorCode.SESSION_BUSY
    on.clock.ahead = HOLD_S + 1
    assert (await on.begin(opened, by=1)).turn == 0


async def test_an_end_goes_to_the_scorers_that_must_act(on: Stage) -> None:
    scorers = (ScorerSpec(name="judge", type="judge", kind=ScorerKind.JUDGE), ScorerSpec(name="math", type="math"))
    opened = await on.open(group="", index=0, n=2)
    turn = await on.play(opened)
    await on.a.end(ending(opened, leaf=turn, scorers=scorers, text="4"))
    last = await on.bus.last_stored(SAMPLES.name, subjects.samples_of(TENANT, opened.session))
    assert last is not None
    assert last.subject == subjects.samples(ScorerKind.VERIFIER, TENANT, opened.session)
    failed = await on.open(n=2)
    await on.a.end(ending(failed, SessionOutcome.FAILED, scorers=scorers))
    last = await on.bus.last_stored(SAMPLES.name, subjects.samples_of(TENANT, failed.session))
    assert last is not None
    assert last.subject == subjects.samples(ScorerKind.DONE, TENANT, failed.session)


async def test_a_session_of_a_closed_group_is_not_opened_again(on: Stage) -> None:
    opened, episode = opening()
    await on.a.open(opened, episode)
    await on.a.end(ending(opened))
    ledger = LedgerClient(on.bus)

    async def closed() -> bool:
        status = await ledger.groups(TENANT, [opened.group_id])
        return status.get(opened.group_id, GroupStatus(group_id="")).closed_seq > 0

    await until(closed, 20, "the group of one session closed")
    assert (await on.b.open(opened, episode)).session == opened.session
    # when all is purged and forgotten, the ledger still knows
    on.valkey.client().delete(keys.session(TENANT, opened.session))
    await on.bus.purge_below(SAMPLES.name, 1 << 40, subjects.samples_of(TENANT, opened.session))
    assert (await refused(on.b.open(opened, episode))).code is ErrorCode.SESSION_ENDED


async def test_a_group_that_was_cancelled_has_no_more_turns(on: Stage) -> None:
    opened = await on.open()
    turn = await on.play(opened)
    episode = await on.a.read(TENANT, opened.session)
    assert not await on.a.group_closed(episode)
    batch = job_of(opened, 0, TurnNode(), 0.0).batch_id
    cancelled = GroupsCancelled(tenant=TENANT, run=opened.run, batch_id=batch, group_ids=(opened.group_id,))
    await on.bus.publish(subjects.samples(ScorerKind.DONE, TENANT), cancelled)
    await until(lambda: on.a.group_closed(episode), 20, "the group closed as cancelled")
    assert (await refused(on.begin(opened, TurnNode(parent=turn), by=1))).code is ErrorCode.SESSION_ENDED
    assert (await refused(on.b.end(ending(opened)))).code is ErrorCode.SESSION_ENDED
    late = on.b.begin_turn(TENANT, opened.session, TurnNode(parent=turn), time.time() + TURN_S, seen=episode)
    assert (await refused(late)).code is ErrorCode.SESSION_ENDED


async def test_named_forks_are_made_once(on: Stage) -> None:
    opened = await on.open()
    root = await on.play(opened)
    calls = [
        on.replicas[k % 2].store.fork(TENANT, opened.session, root, ForkReason.BEST_OF_N, name="x") for k in range(4)
    ]
    won, codes = await outcomes(calls)
    assert (set(won), codes) == ({"x"}, {})
    error = await refused(on.a.fork(TENANT, opened.session, None, ForkReason.RETRY, name="x"))
    assert (error.code, error.field) == (ErrorCode.IDEMPOTENCY_CONFLICT, "name")
    error = await refused(on.a.fork(TENANT, opened.session, 99, ForkReason.RETRY))
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "parent")
    assert list((await on.checked(opened)).tree.forks) == ["x"]


async def test_large_turns_are_followed_to_where_they_lie(on: Stage) -> None:
    opened = await on.open()
    observation = TokenIds.of(list(range(100_000)))
    turn = await on.play(opened, TurnNode(observation=observation))
    on.valkey.client().delete(keys.session(TENANT, opened.session))
    episode = await on.checked(opened, by=1)
    assert episode.tree.token_ids(turn).packed.startswith(observation.packed)
    assert episode.tree.tokens == 100_002


# -- caps -----------------------------------------------------------------------------------------


async def test_caps_of_a_session_are_refused_by_name_and_it_can_still_be_closed(
    made: Grid, redis: ValkeyServer
) -> None:
    async with stage(made, redis, session_max_turns=3, session_max_branches=3, session_max_tokens=1000) as on:
        opened = await on.open(max_turns=2)
        first = await on.play(opened)
        second = await on.play(opened, TurnNode(parent=first))
        error = await refused(on.begin(opened, TurnNode(parent=second)))
        assert (error.code, error.limit) == (ErrorCode.LIMIT_EXCEEDED, "max_turns")
        await on.a.end(ending(opened, reward=1.0))

        opened = await on.open(max_turns=50)  # the deployment's is lower
        root = await on.play(opened)
        calls = [on.replicas[k % 2].store.fork(TENANT, opened.session, root, ForkReason.EXPLORE) for k in range(5)]
        won, codes = await outcomes(calls)
        assert (len(won), codes) == (2, {ErrorCode.LIMIT_EXCEEDED: 3})
        turns = [on.begin(opened, TurnNode(parent=root, branch=branch), by=1) for branch in [*won, "main"]]
        begun, codes = await outcomes(turns)
        assert (len(begun), codes) == (2, {ErrorCode.LIMIT_EXCEEDED: 1})
        error = await refused(on.a.fork(TENANT, opened.session, root, ForkReason.EXPLORE))
        assert error.limit == "max_branches"

        opened = await on.open(max_tokens=10)
        turn = await on.play(opened, TurnNode(observation=TokenIds.of(range(7))))
        error = await refused(on.begin(opened, TurnNode(parent=turn, observation=TokenIds.of([1]))))
        assert (error.code, error.limit) == (ErrorCode.LIMIT_EXCEEDED, "max_tokens")


async def test_a_tenant_has_so_many_sessions_open(made: Grid) -> None:
    with valkey_server() as redis:
        async with stage(made, redis, max_open_sessions=3) as on:
            terms = [opening() for _ in range(8)]
            calls = [on.replicas[k % 2].store.open(*one) for k, one in enumerate(terms)]
            won, codes = await outcomes(calls)
            assert (len(won), codes) == (3, {ErrorCode.SESSION_LIMIT: 5})
            error = await refused(on.open())
            assert (error.limit, error.http_status) == ("max_open_sessions", 429)
            assert error.retry_after_s
            again: SessionOpened = won[0]
            await on.a.end(ending(again))
            await on.open()


# -- expiry ---------------------------------------------------------------------------------------


async def ends_in_stream(on: Stage, opened: SessionOpened) -> int:
    """Messages of a session in the stream, whatever counts."""
    return await on.bus.count(SAMPLES.name, subjects.samples_of(TENANT, opened.session))


async def sweep(on: Stage) -> None:
    await asyncio.gather(*(replica.expiry.sweep() for replica in on.replicas))


async def test_an_unused_session_ends_once_whoever_sweeps(made: Grid) -> None:
    with valkey_server() as redis:
        async with stage(made, redis) as on:
            many = [await on.open(ttl_s=60.0) for _ in range(5)]
            await sweep(on)
            assert [(await on.checked(one)).ended for one in many] == [None] * 5
            on.clock.ahead = 61
            await sweep(on)
            await sweep(on)
            for opened in many:
                ended = (await on.checked(opened)).ended
                assert ended is not None
                assert ended.outcome is SessionOutcome.EXPIRED
                assert await ends_in_stream(on, opened) == 2
            assert redis.client().zcard(keys.open_sessions(TENANT)) == 0
            assert redis.client().zcard(keys.session_expiry()) == 0


async def test_a_session_in_use_does_not_expire(made: Grid) -> None:
    with valkey_server() as redis:
        async with stage(made, redis) as on:
            opened = await on.open(ttl_s=60.0)
            begun = await on.begin(opened)
            job, seq = await on.dispatch(opened, begun)
            on.clock.ahead = 61  # its turn is still under way
            await sweep(on)
            assert (await on.checked(opened)).ended is None
            await store_finish(on.bus, finish_of(job, seq))
            on.clock.ahead = TURN_S + 1
            redis.flush_all()
            await on.a.read(TENANT, opened.session)  # whoever rebuilds it brings its end back
            await sweep(on)
            ended = (await on.checked(opened)).ended
            assert ended is not None
            assert ended.outcome is SessionOutcome.EXPIRED


async def test_a_sweeper_that_dies_leaves_its_claims(made: Grid) -> None:
    with valkey_server() as redis:
        async with stage(made, redis) as on:
            opened = await on.open(ttl_s=60.0)
            on.clock.ahead = 61
            assert redis.client().zrange(keys.session_expiry(), 0, -1) == [f"{TENANT}:{opened.session}".encode()]
            claimed: Any = on.replicas[0].expiry
            await claimed._claim([keys.session_expiry()], on.clock(), on.clock() + 60, 10)  # and no more
            assert await on.replicas[1].expiry.sweep() == 0
            on.clock.ahead += 61
            assert await on.replicas[1].expiry.sweep() == 1
            assert (await on.checked(opened)).ended is not None


async def test_a_key_that_somebody_took_over_is_not_released_by_its_first_holder(on: Stage) -> None:
    caller = Caller(tenant=TENANT, key=new_key(), idempotent=True, digest="d")
    one, other = (TurnKeys(replica.bus) for replica in on.replicas)
    first = await one.claim(caller, "s", "r1")
    assert first is not None
    table: Table[IdempotencyRecord] = Table(on.bus, IDEMPOTENCY, IdempotencyRecord)
    long_ago = replace(first.record, created_at=time.time() - 2 * BEGINNING_S)
    first = first._replace(revision=await table.update(first.name, long_ago, first.revision))
    second = await other.claim(caller, "s", "r1")  # the first one seems to have died at its beginning
    assert second is not None
    assert (await refused(one.names(first, turn_call("s", 0), 0.0))).code is ErrorCode.SESSION_BUSY
    await one.release(first)
    assert (await refused(one.claim(caller, "s", "r1"))).code is ErrorCode.SESSION_BUSY
    named = await other.names(second, turn_call("s", 1), 9.0)
    found = await one.claim(caller, "s", "r1")
    assert found is not None
    assert (found.call_id, found.deadline) == (turn_call("s", 1), 9.0)
    await other.release(named)
    begun = await one.claim(caller, "s", "r1")
    assert begun is not None
    assert begun.call_id == ""


async def test_a_claim_that_nobody_answered_for_holds_up_no_retry_of_its_request(made: Grid, on: Stage) -> None:
    """NATS stores it and the answer comes too late: the request ends with an error, and its client tries again."""
    caller = Caller(tenant=TENANT, key=new_key(), idempotent=True, digest="d")
    one, other = (TurnKeys(replica.bus) for replica in on.replicas)
    await one.claim(replace(caller, key=new_key()), "s", "r1")  # the bucket is at hand
    made.nats.pause()
    try:
        errors = await asyncio.gather(*(refused(one.claim(caller, "s", "r1")) for _ in range(2)))
        assert all(error.retryable for error in errors)  # one of the two claims will be there
    finally:
        made.nats.resume()
    table: Table[IdempotencyRecord] = Table(on.bus, IDEMPOTENCY, IdempotencyRecord)
    name = idempotency_key(TENANT, f"s\x1f{caller.key}")

    async def claimed() -> bool:
        return await table.get(name) is not None

    await until(claimed, 20, "the claim that got no answer is there")
    assert (await refused(other.claim(caller, "s", "r1"))).code is ErrorCode.SESSION_BUSY  # elsewhere nobody knows
    again = await one.claim(caller, "s", "r1")
    assert again is not None
    assert again.call_id == ""
    assert (await refused(one.claim(caller, "s", "r1"))).code is ErrorCode.SESSION_BUSY  # this one is alive
    await one.names(again, turn_call("s", 0), 9.0)
