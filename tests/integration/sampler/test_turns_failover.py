"""A turn outlives its worker: killed, frozen, with Redis and without it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from rollgrid_contracts import codec, keys
from rollgrid_contracts.jobs import Reply, Resume, SampleGroup, SamplingParams
from rollgrid_contracts.samples import Sample, SampleStatus
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_runtime.state import State
from rollgrid_sampler.partials import SCRIPT

from tests.support.servers import ValkeyServer, scratch
from tests.support.services import ServiceProcess

from .frames import Stream, listening, until
from .stage import Stage, sampler
from .test_kills import process
from .turns import LANE, Kept, check_turn, ended, finishes, make_turn

BOUND = 16
"""Tokens between two checkpoints here."""
RATE = 25
"""Tokens a second and turn: a write under way for half a second is overtaken by less than the bound again."""
SLOW = SamplingParams(max_tokens=100, ignore_eos=True)
OPTIONS = {"scripted_token_rate": float(RATE), "slots": 64, "partial_tokens": BOUND, "partial_interval_s": 0.3}


@contextlib.contextmanager
def victim(stack_env: dict[str, str], **changes: object) -> Iterator[ServiceProcess]:
    """A sampler process, ready; it takes everything until another one starts."""
    env = {f"ROLLGRID_SAMPLER_{name.upper()}": str(value) for name, value in {**OPTIONS, **changes}.items()}
    with scratch("victim") as folder, process(folder, stack_env, **env) as one:
        yield one.start().wait_ready(30)


@contextlib.contextmanager
def kept_in(valkey: ValkeyServer) -> Iterator[Kept]:
    with contextlib.closing(valkey.client()) as client:
        yield Kept(client)


@contextlib.asynccontextmanager
async def peer(nats: NatsSettings, s3: S3Settings, valkey: ValkeyServer, **changes: object) -> AsyncIterator[None]:
    nats = nats.model_copy(update={"ack_wait_s": 1.5})
    async with sampler(nats, s3, redis=valkey.settings(), **{**OPTIONS, **changes}):
        yield


def many_turns(name: str, count: int, **changes: object) -> list[SampleGroup]:
    """The first turns of as many sessions of one group."""
    return [make_turn(name, 0, index=i, n=count, **{"sampling": SLOW, **changes}) for i in range(count)]


async def one_finish_each(stage: Stage, turns: list[SampleGroup]) -> None:
    """No duplicate node: one finish of each (index, turn), whoever made it."""
    await stage.clean(LANE, 30)
    found = await finishes(stage)
    assert {call: len(each) for call, each in found.items()} == {turn.call_id: 1 for turn in turns}


def check_all(turns: list[SampleGroup], samples: list[Sample]) -> list[tuple[SampleGroup, Sample]]:
    """All ended well, with every token in its place; those that another worker took over."""
    assert {sample.status for sample in samples} == {SampleStatus.SUCCEEDED}
    for turn, sample in zip(turns, samples, strict=True):
        check_turn(turn, sample)
        assert len(sample.token_ids) == turn.sampling.max_tokens
    return [(turn, sample) for turn, sample in zip(turns, samples, strict=True) if sample.attempt > 1]


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_killed_during_fifty_long_turns_little_is_sampled_again(
    stage: Stage, stack_env: dict[str, str], nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    """A25: `kill -9`; each turn goes on behind its last checkpoint, and at most the bound is sampled again.

    Half of the turns are streamed to somebody who is gone when it is asked what he has: his frames tell
    exactly how far the dead worker was.
    """
    stage.bus.settings.ack_wait_s = 1.5
    turns = many_turns("kill", 25) + many_turns("heard", 25, reply=Reply.STREAM)
    async with contextlib.AsyncExitStack() as around:
        heard: dict[str, Stream] = {}
        for turn in turns[25:]:
            heard[turn.call_id] = await around.enter_async_context(listening(stage.bus, turn.call_id, answer=False))
        await around.enter_async_context(stage.ledger())
        kept = around.enter_context(kept_in(valkey))
        first = around.enter_context(victim(stack_env))
        for turn in turns:
            await stage.submit(turn)
        await until(lambda: min(map(kept.tokens, turns)) >= BOUND, 40)
        first.kill()
        left = {turn.call_id: kept.tokens(turn) for turn in turns}
        async with peer(nats_settings, s3, valkey):
            over = check_all(turns, await ended(stage, *turns, timeout_s=60))
            await one_finish_each(stage, turns)
        again = {}
        for turn, sample in over:
            assert sample.resumed_from == left[turn.call_id] >= BOUND
            if turn.call_id in heard:
                before = [f for f in heard[turn.call_id].frames[sample.index] if f.attempt == 1]
                again[turn.call_id] = before[-1].offset + len(before[-1].token_ids) - sample.resumed_from
        assert len(over) == len(turns), "the kill came before any had ended"
        assert max(again.values()) <= 2 * BOUND, "the bound, and what came while a write was under way"
        assert all(set(kept.fields(turn)) <= {"fence", "attempt"} for turn in turns), "dropped with the finish"


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_redis_dies_with_the_worker_and_everything_is_sampled_again(
    stage: Stage, stack_env: dict[str, str], nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    """C36: Redis is never needed; a turn that is streamed to a living client goes on behind what he has."""
    stage.bus.settings.ack_wait_s = 1.5
    (heard,) = many_turns("heard", 1, reply=Reply.STREAM)
    turns = [heard, *many_turns("alone", 11)]
    async with listening(stage.bus, heard.call_id) as stream, stage.ledger():
        with victim(stack_env) as first, kept_in(valkey) as kept:
            for turn in turns:
                await stage.submit(turn)
            await until(lambda: min(map(kept.tokens, turns)) >= BOUND, 30)
            valkey.kill()
            read = stream.tokens(0)
            await until(lambda: stream.tokens(0) > read, 20)  # the engine does not wait for Redis
            first.kill()
            async with peer(nats_settings, s3, valkey):
                over = check_all(turns, await ended(stage, *turns, timeout_s=60))
                await one_finish_each(stage, turns)
    assert len(over) == len(turns)
    resumed = {turn.call_id: sample.resumed_from for turn, sample in over}
    assert resumed.pop(heard.call_id) > read
    assert set(resumed.values()) == {0}


@pytest.mark.slow
@pytest.mark.timeout(150)
async def test_a_frozen_owner_comes_back_and_the_first_finish_wins(
    stage: Stage, stack_env: dict[str, str], nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    """I6: SIGSTOP; whichever finish is first in the stream wins, and the owner's late checkpoints are refused."""
    stage.bus.settings.ack_wait_s = 1.5
    turns = many_turns("frozen", 6, sampling=SamplingParams(max_tokens=1000, ignore_eos=True))
    async with stage.ledger():
        with victim(stack_env, scripted_token_rate=50.0) as owner, kept_in(valkey) as kept:
            for turn in turns:
                await stage.submit(turn)
            await until(lambda: min(map(kept.tokens, turns)) >= BOUND, 30)
            owner.pause()
            left = {turn.call_id: kept.tokens(turn) for turn in turns}
            async with peer(nats_settings, s3, valkey, scripted_token_rate=500.0):
                await until(lambda: min(int(kept.fields(turn)["attempt"]) for turn in turns) > 1, 30)
                owner.resume()
                over = check_all(turns, await ended(stage, *turns, timeout_s=40))
                await until(lambda: 'outcome="refused"' in owner.metrics(), 30)  # its checkpoints are behind the fence
                await until(lambda: owner.readiness()[1].get("held") == 0, 40)
                await one_finish_each(stage, turns)
            for turn in turns:
                assert set(kept.fields(turn)) == {"fence", "attempt"}
                assert int(kept.fields(turn)["attempt"]) > 1
    assert len(over) == len(turns), "the peer is faster by far"
    for turn, sample in over:
        assert sample.resumed_from == left[turn.call_id]


async def test_an_older_attempt_or_dispatch_writes_nothing(valkey: ValkeyServer) -> None:
    """The script alone: fences are (job sequence, attempt); after the end nothing is left but the fence."""
    state = State(valkey.settings())
    script, name = state.script(SCRIPT), keys.partial("acme", "s1-t0")
    later = 4_000_000_000_000

    async def call(what: str, fence: int, attempt: int, packed: bytes = b"", prompt: str = "p") -> list[object]:
        found: list[object] = await script([name], what, fence, attempt, later, prompt, packed)
        return found

    packed = codec.encode(Resume(index=0))
    assert await call("take", 7, 1) == [1], "nothing was kept yet"
    assert await call("keep", 7, 1, packed) == [1]
    assert await call("take", 7, 2, prompt="another") == [1], "tokens of another prompt are nobody's"
    assert await call("take", 7, 2) == [1, packed]
    assert await call("keep", 7, 1, b"late") == [0]
    assert await call("take", 7, 1) == [0]
    assert await call("keep", 9, 1, b"newer dispatch") == [1]
    assert await call("keep", 7, 5, b"late") == [0]
    assert await call("take", 9, 1) == [1, b"newer dispatch"]
    assert await call("end", 7, 5) == [0]
    assert await call("end", 9, 1) == [1]
    assert await call("keep", 7, 5, b"late") == [0]
    assert await call("take", 9, 2) == [1]
    await state.close()


async def test_only_long_turns_that_can_be_gone_on_with_are_kept(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    kinds = {
        "long": make_turn("long", 0, sampling=SLOW),
        "short": make_turn("short", 0, sampling=SamplingParams(max_tokens=BOUND, ignore_eos=True)),
        "penalised": make_turn("pen", 0, sampling=SamplingParams(max_tokens=40, ignore_eos=True, presence_penalty=1)),
    }
    options = {**OPTIONS, "partial_interval_s": 0.05, "scripted_token_rate": 60.0}
    with kept_in(valkey) as kept:
        async with sampler(nats_settings, s3, redis=valkey.settings(), **options):
            for turn in kinds.values():
                await stage.submit(turn)
            await until(lambda: kept.tokens(kinds["long"]) >= BOUND, 20)
            await ended(stage, *kinds.values())
            await stage.clean(LANE)
        assert {kind for kind, turn in kinds.items() if kept.fields(turn)} == {"long"}
        assert set(kept.fields(kinds["long"])) == {"fence", "attempt"}


async def test_a_drained_worker_leaves_all_it_has(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    """Given back in mid-turn, nothing is sampled again although no checkpoint was due."""
    (turn,) = many_turns("drained", 1, reply=Reply.STREAM, sampling=SamplingParams(max_tokens=600, ignore_eos=True))
    options = {"partial_tokens": 500, "partial_interval_s": 100.0, "drain_s": 2.2}
    redis = valkey.settings()
    async with listening(stage.bus, turn.call_id, answer=False) as stream, stage.ledger():
        async with sampler(nats_settings, s3, redis=redis, scripted_token_rate=50.0, **options):
            await stage.submit(turn)
            await until(lambda: stream.tokens(0) > 5)
        told = stream.tokens(0)
        async with sampler(nats_settings, s3, redis=redis, **options):
            ((_, sample),) = check_all([turn], await ended(stage, turn))
    assert sample.resumed_from >= told > 5


async def test_a_worker_without_redis_or_beside_a_dead_one_samples_as_ever(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, valkey: ValkeyServer
) -> None:
    valkey.kill()
    turns = many_turns("dead", 2)
    async with sampler(nats_settings, s3, redis=valkey.settings(), **{**OPTIONS, "scripted_token_rate": 100.0}):
        for turn in turns:
            await stage.submit(turn)
        check_all(turns, await ended(stage, *turns))
        await stage.clean(LANE)
