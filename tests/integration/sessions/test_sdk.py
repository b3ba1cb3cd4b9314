"""The SDK's sessions, forks, episodes and arrays on the real services (A25, A32, A49, A50)."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from msgspec.structs import replace
from rollgrid import (
    AsyncClient,
    AsyncSession,
    Client,
    Group,
    Retries,
    Session,
    Turn,
    group_advantages,
    run_episodes,
    run_episodes_async,
    to_arrays,
)
from rollgrid.errors import LimitExceeded, NotFound, ServerError, SessionEnded, UnknownField
from rollgrid.export import from_jsonl, to_jsonl
from rollgrid_contracts.episodes import ForkReason
from rollgrid_contracts.fleet import IdempotencyRecord
from rollgrid_contracts.ids import idempotency_key
from rollgrid_contracts.jobs import turn_call
from rollgrid_contracts.samples import SampleStatus
from rollgrid_contracts.topology import IDEMPOTENCY
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table

from tests.support.stack import POLICY, Stack

from .door import KEYS

SAMPLING: dict[str, Any] = {"max_tokens": 5}
GUIDE = Path(__file__).parents[3] / "docs" / "sessions.md"
KEY = KEYS["acme"]
PATIENT = Retries(budget_s=60, outage_budget_s=60)


@pytest.fixture
def client(pipe: Stack) -> Iterator[Client]:
    with Client(pipe.url, KEY, retries=PATIENT) as connected:
        yield connected


@pytest.fixture
async def async_client(pipe: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(pipe.url, KEY, retries=PATIENT) as connected:
        yield connected


def says(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def whole(turn: Turn) -> list[int]:
    """All ids up to the end of a turn."""
    return [*turn.prompt_ids.tolist(), *turn.token_ids.tolist()]


def closed(client: Client, session: Session) -> Group:
    """The session's group, once it has closed."""
    reading = client.trajectories(session.run, cursor=session.opened.cursor, until=[session.group_id], timeout=30)
    return next(group for group in reading if group.id == session.group_id)


def test_a_conversation_goes_on_behind_the_very_tokens_that_were_sampled(client: Client) -> None:
    with client.sessions.open(run="talk", sampling=SAMPLING) as session:
        messages = [says("one")]
        turns = []
        for text in ("two", "three", "four"):
            turn = session.sample(messages)
            messages += [turn.message, says(text)]
            turns.append(turn)
        session.close(0.75, turn_rewards=[0.5, None, 0.25])

    assert [(turn.number, turn.parent, turn.fork) for turn in turns] == [(0, None, None), (1, 0, None), (2, 1, None)]
    for earlier, later in itertools.pairwise(turns):
        assert later.prompt_ids.tolist()[: len(whole(earlier))] == whole(earlier)
    (sample,) = closed(client, session).samples
    assert (sample.status, sample.reward, sample.session) == (SampleStatus.SUCCEEDED, 0.75, session.id)
    assert [turn.reward for turn in sample.turns] == [0.5, None, 0.25]
    for told, stored in zip(turns, sample.turns, strict=True):
        assert told.token_ids.tolist() == stored.token_ids.tolist()
        assert told.logprobs.tolist() == pytest.approx(stored.logprobs.tolist(), abs=1e-6)
        assert told.spans == stored.spans
        assert told.text == stored.text
    assert [message["content"] for turn in sample.turns for message in turn.node.messages] == ["one", "two", "three"]
    (path,) = sample.paths()
    assert [*path.prompt_ids.tolist(), *path.completion_ids.tolist()] == whole(turns[-1])


def test_ids_alone_whole_or_only_the_new_ones(client: Client) -> None:
    with client.sessions.open(run="ids", sampling=SAMPLING) as session:
        first = session.sample(token_ids=np.array([5, 6, 7]))
        second = session.sample(observation_token_ids=[8, 9])
        third = session.sample(token_ids=[*whole(second), 10])
        fork = session.sample(token_ids=[5, 6, 11])
    assert first.prompt_ids.tolist() == [5, 6, 7]
    assert second.prompt_ids.tolist() == [*whole(first), 8, 9]
    assert third.prompt_ids.tolist() == [*whole(second), 10]
    assert (third.parent, third.fork) == (1, None)
    assert (fork.number, fork.parent, fork.fork) == (3, None, ForkReason.EDITED_HISTORY)


def test_A32_leaves_share_their_prefix_and_every_token_is_trained_once(client: Client) -> None:
    with client.sessions.open(run="tree", sampling=SAMPLING) as session:
        root = session.sample([says("begin")])
        branches = [session.fork(root.number, reason="best_of_n", metadata={"arm": arm}) for arm in range(3)]
        leaves = [branch.sample(observation_token_ids=[20 + arm]) for arm, branch in enumerate(branches)]
        session.close(
            1.0, turn_rewards={leaf.number: float(arm) for arm, leaf in enumerate(leaves)}, leaf=leaves[2].number
        )
        state = session.state()

    assert [(leaf.parent, leaf.branch) for leaf in leaves] == [(0, branch.branch) for branch in branches]
    assert (state.status, state.turns, set(state.leaves)) == ("closed", 4, {leaf.number for leaf in leaves})
    assert state.outcome is not None
    assert state.outcome.leaf == leaves[2].number
    assert {b.branch: (b.parent, b.reason, b.metadata) for b in state.branches if b.branch != "main"} == {
        branch.branch: (0, ForkReason.BEST_OF_N, {"arm": arm}) for arm, branch in enumerate(branches)
    }
    group = closed(client, session)
    rows = to_arrays([group])
    ends = rows["valid"].sum(axis=1)
    assert [row[:end].tolist() for row, end in zip(rows["completion_ids"], ends, strict=True)] == [
        whole(leaf)[len(root.prompt_ids) :] for leaf in leaves
    ]
    assert rows["first"].sum(axis=1).tolist() == [len(root) + len(leaves[0]), len(leaves[1]), len(leaves[2])]
    assert [row[end - 1] for row, end in zip(rows["token_rewards"], ends, strict=True)] == [1.0, 2.0, 3.0]
    assert rows["rewards"].tolist() == [1.0] * 3


def play(session: Session, task: str) -> float | None:
    messages = [says(task)]
    for number in range(2 + session.index % 2):
        turn = session.sample(messages)
        messages += [turn.message, says(f"and {number}")]
    if (task, session.index) == ("b", 1):
        raise RuntimeError("the environment broke")
    return session.index / 4


def test_groups_fill_while_one_episode_breaks(client: Client, tmp_path: Path) -> None:
    many: dict[str, Any] = {"n": 4, "concurrency": 6, "run": "many", "group": "step-0", "sampling": SAMPLING}
    many["terms_of"] = lambda task: {"metadata": {"task": task}, "task": {"answer": task}}
    groups = run_episodes(client, ["a", "b", "c"], play, **many)
    assert [group.label for group in groups] == ["step-0-0", "step-0-1", "step-0-2"]
    assert [group.task for group in groups] == [{"answer": task} for task in "abc"]
    assert [[sample.reward for sample in group] for group in groups] == [
        [0.0, 0.25, 0.5, 0.75], [0.0, None, 0.5, 0.75], [0.0, 0.25, 0.5, 0.75],
    ]  # fmt: skip
    failed = groups[1].samples[1]
    assert failed.status is SampleStatus.FAILED
    assert "the environment broke" in (failed.error.message if failed.error is not None else "")
    assert [[len(sample.turns) for sample in group if sample.ok] for group in groups] == [
        [2, 3, 2, 3],
        [2, 2, 3],
        [2, 3, 2, 3],
    ]

    rows = to_arrays(groups)
    advantages = group_advantages(rows["rewards"], rows["group_index"], sample_index=rows["sample_index"])
    assert advantages[rows["ok"]].any()
    assert not advantages[~rows["ok"]].any()

    # what was played is played: the same label again gives the same groups
    told: list[Any] = []
    again = run_episodes(client, ["a", "b", "c"], play, **many, progress=told.append)
    assert [group.closed for group in again] == [group.closed for group in groups]
    assert (len(told), [event.error for event in told]) == (12, [None] * 12)

    assert to_jsonl(groups, tmp_path / "groups.jsonl") == 3
    assert [group.closed for group in from_jsonl(tmp_path / "groups.jsonl")] == [group.closed for group in groups]


async def test_the_async_client_plays_many_at_once(async_client: AsyncClient) -> None:
    async def play(session: AsyncSession, task: int) -> float:
        turn = await session.sample([says(f"task {task}")], **SAMPLING)
        branch = await session.fork(turn.number, reason=ForkReason.RETRY)
        again = await branch.sample(observation_token_ids=[30 + task])
        assert (again.parent, again.branch) == (0, branch.branch)
        return float(task)

    groups = await run_episodes_async(async_client, range(6), play, n=4, concurrency=24, run="many-async")
    assert [[sample.reward for sample in group] for group in groups] == [[float(task)] * 4 for task in range(6)]
    assert {len(sample.turns) for group in groups for sample in group} == {2}


def test_A49_an_unmodified_openai_client_plays_a_branch(client: Client) -> None:
    with client.sessions.open(run="openai") as session, openai.OpenAI(**session.openai()) as plain:
        first = plain.chat.completions.create(model=POLICY, messages=[says("hello")], max_tokens=4)  # type: ignore[list-item]
        branch = session.fork(0, reason="explore")
        with openai.OpenAI(**branch.openai()) as beside:
            history = [says("hello"), {"role": "assistant", "content": first.choices[0].message.content}, says("again")]
            beside.chat.completions.create(model=POLICY, messages=history, max_tokens=4)  # type: ignore[arg-type]
        played = first.choices[0].message  # a model of pydantic's
        assert session.sample([says("hello"), played, says("and here")]).fork is None
    main, forked, behind = session.state().nodes
    assert (behind.branch, behind.parent) == ("main", 0)
    assert (main.branch, forked.branch, forked.parent, forked.fork) == ("main", branch.branch, 0, None)
    assert [(b.branch, b.parent, b.reason) for b in session.state().branches][1:] == [
        (branch.branch, 0, ForkReason.EXPLORE)
    ]


def test_a_session_is_found_again_and_goes_on(client: Client, pipe: Stack) -> None:
    opened = client.sessions.open(run="again", group="left", index=1, n=2, sampling=SAMPLING)
    first = opened.sample([says("one")])
    with Client(pipe.url, KEY) as other:
        found = other.sessions.get(opened.id, sampling=SAMPLING)
        assert (found.index, found.n, found.group_id, found.ended) == (1, 2, opened.group_id, False)
        assert found.sample(observation_token_ids=[7]).parent == first.number
        found.close(1.0)
    assert client.sessions.open(run="again", group="left", index=1, n=2).ended
    with pytest.raises(SessionEnded):
        opened.sample(observation_token_ids=[8])
    client.sessions.open(run="again", group="left", index=0, n=2).close(0.0)
    assert [sample.reward for sample in closed(client, opened)] == [0.0, 1.0]


def test_a_session_left_by_an_exception_is_a_failed_sample(client: Client) -> None:
    def broken() -> None:
        with client.sessions.open(run="left", sampling=SAMPLING) as session:
            sessions.append(session)
            session.sample([says("one")])
            raise KeyError("board")

    sessions: list[Session] = []
    with pytest.raises(KeyError):
        broken()
    (sample,) = closed(client, sessions[0]).samples
    assert (sample.status, sample.reward) == (SampleStatus.FAILED, None)
    assert "KeyError: 'board'" in (sample.error.message if sample.error is not None else "")
    assert len(sample.turns) == 1  # what was sampled stays


async def test_A25_an_episode_that_is_stopped_in_mid_turn_ends_at_once_and_its_turn_with_it(
    async_client: AsyncClient, pipe: Stack
) -> None:
    """The turn has a key, and would be played to its end: nobody waits for that, and the group is whole."""
    playing = asyncio.Semaphore(0)

    async def play(session: AsyncSession, task: int) -> None:
        await session.sample([says("one")], max_tokens=4)
        playing.release()
        if session.index:
            raise RuntimeError("the environment broke: " + "board " * 100)
        await session.sample(observation_token_ids=[7], max_tokens=1900, ignore_eos=True)

    many: dict[str, Any] = {"n": 2, "run": "stopped", "group": "stopped"}
    run = asyncio.create_task(run_episodes_async(async_client, [0], play, **many))
    async with asyncio.timeout(60):
        for _ in range(2):
            await playing.acquire()
        opened = await async_client.sessions.open(run="stopped", group="stopped-0", index=0, n=2)
        while not (state := await opened.state()).open_turns:
            await asyncio.sleep(0.05)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        state = await opened.state()
        assert (state.status, state.turns, state.open_turns) == ("failed", 1, ())
        group = await anext(async_client.trajectories("stopped", until=[opened.group_id], timeout=30))
    errors = ["" if sample.error is None else sample.error.message for sample in group]
    assert errors[0].startswith("CancelledError")
    assert errors[1].startswith("RuntimeError: the environment broke")


async def test_a_turn_that_failed_is_not_asked_for_again_and_again(async_client: AsyncClient) -> None:
    """Its key stands for the failed turn: each retry would be answered in the same way."""
    async with await async_client.sessions.open(run="failed-turn", sampling=SAMPLING) as session:
        async with asyncio.timeout(30):  # an outage is waited out for 60
            with pytest.raises(ServerError, match="deadline"):
                await session.sample([says("one")], max_tokens=1900, ignore_eos=True, deadline_s=0.5)
        assert (await session.sample([says("one")])).parent is None
        assert [lost.status for lost in (await session.state()).lost_turns] == ["expired"]


def test_groups_that_expired_before_all_of_them_was_opened_are_found_by_a_run_that_is_started_again(
    client: Client,
) -> None:
    left = client.sessions.open(run="late", group="late-0", index=0, n=2, deadline_s=1.0, sampling=SAMPLING)
    left.sample([says("one")])
    assert closed(client, left).counts == {"expired": 2}
    assert client.sessions.get(left.id).ended
    (group,) = run_episodes(client, ["a"], play, n=2, run="late", group="late", deadline_s=1.0, timeout=20)
    assert (group.id, group.counts, len(group.samples[0].turns)) == (left.group_id, {"expired": 2}, 1)


def test_refusals_are_typed(client: Client) -> None:
    with client.sessions.open(run="refused", max_turns=1, sampling=SAMPLING) as session:
        session.sample([says("one")])
        with pytest.raises(LimitExceeded, match="max_turns"):
            session.sample(observation_token_ids=[7])
        assert session.close(0.5).reward == 0.5  # a capped session can be closed with its reward
    with pytest.raises(NotFound):
        client.sessions.get("s-nobody")
    with pytest.raises(LimitExceeded):
        client.sessions.open(n=4, index=4)
    with pytest.raises(UnknownField, match="colour"):
        client.sessions.open(colour="red")  # type: ignore[call-arg]


async def test_A50_a_turn_whose_replica_died_before_its_job_was_stored_is_played_by_the_retry(
    async_client: AsyncClient, pipe: Stack
) -> None:
    """The key already names the turn, and no job will ever be there: the retry must not wait for it."""
    async with await async_client.sessions.open(run="orphan", sampling=SAMPLING) as session:
        await session.sample(token_ids=[5, 6], idempotency_key="first")
        named = {name: idempotency_key("acme", f"{session.id}\x1f{name}") for name in ("first", "orphan")}
        bus = await Bus.connect(pipe.nats.settings(), "test", None)
        try:
            table: Table[IdempotencyRecord] = Table(bus, IDEMPOTENCY, IdempotencyRecord)
            found = await table.get(named["first"])
            assert found is not None
            lost = {"batch_id": turn_call(session.id, 99), "created_at": time.time() - 60, "key": "orphan"}
            await table.create(named["orphan"], replace(found.value, **lost))
        finally:
            await bus.close()
        async with asyncio.timeout(30):
            turn = await session.sample(token_ids=[5, 6], idempotency_key="orphan")
        again = await session.sample(token_ids=[5, 6], idempotency_key="orphan")
        assert (turn.number, again.token_ids.tolist()) == (1, turn.token_ids.tolist())
        assert (await session.state()).turns == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_A50_episodes_go_on_through_a_dead_ingest_and_an_empty_redis(
    async_client: AsyncClient, pipe: Stack
) -> None:
    """Each fault comes in the middle of episodes: all finish, and no turn is played twice."""
    begun = asyncio.Semaphore(0)

    async def play(session: AsyncSession, task: int) -> float:
        turn = await session.sample([says(f"task {task}")], **SAMPLING)
        begun.release()
        for _ in range(11):
            later = await session.sample(observation_token_ids=[30 + task], **SAMPLING)
            assert (later.parent, later.fork) == (turn.number, None)
            assert later.prompt_ids.tolist() == [*whole(turn), 30 + task]
            turn = later
        return 1.0

    async def faults() -> None:
        for _ in range(4):
            await begun.acquire()
        await asyncio.to_thread(pipe.valkey.flush_all)
        for _ in range(4):
            await begun.acquire()
        ingest = pipe["ingest"]
        await asyncio.to_thread(ingest.kill)
        ingest.start()  # here: it would end with the thread that started it
        await asyncio.to_thread(ingest.wait_ready, 60)
        await asyncio.to_thread(pipe.valkey.flush_all)

    async with asyncio.TaskGroup() as both:
        playing = both.create_task(run_episodes_async(async_client, range(4), play, n=4, concurrency=6, run="faults"))
        both.create_task(faults())
    groups = playing.result()
    errors = [sample.error for group in groups for sample in group if not sample.ok]
    assert [group.counts for group in groups] == [{"succeeded": 4}] * 4, errors
    assert {len(sample.turns) for group in groups for sample in group} == {12}
    assert {len(sample.paths()) for group in groups for sample in group} == {1}


def test_the_guides_program_runs_as_it_stands(pipe: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    program = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.S)[0]
    monkeypatch.setenv("ROLLGRID_URL", pipe.url)
    monkeypatch.setenv("ROLLGRID_API_KEY", KEY)
    names: dict[str, Any] = {}
    exec(compile(program, str(GUIDE), "exec"), names)
    rows = names["rows"]
    assert rows["ok"].all()
    assert rows["group_index"].tolist() == [0] * 4 + [1] * 4
    assert {int(turn) for turn in np.unique(rows["turns"])} == {-1, 0, 1, 2}
    assert names["advantages"].shape == (8,)


def test_the_command_line_shows_the_tree_and_ends_a_session(client: Client, pipe: Stack) -> None:
    def command(*arguments: str) -> str:
        env = {**os.environ, "ROLLGRID_URL": pipe.url, "ROLLGRID_API_KEY": KEY}
        program = [sys.executable, "-c", "from rollgrid.cli import main; main()", "sessions", *arguments]
        return subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

    session = client.sessions.open(run="shown", sampling=SAMPLING)
    session.sample([says("one")])
    session.sample(observation_token_ids=[7])
    session.fork(0, name="aside", reason="explore").sample(observation_token_ids=[8, 9])
    shown = command("show", session.id).splitlines()
    assert shown[0].startswith(f"session   {session.id}  open")
    turns = [line for line in shown if " tokens  " in line]
    assert [line.lstrip("│├└─ ").split()[0] for line in turns] == ["0", "2", "1"]
    assert "2  [aside: explore]  ids  2+" in turns[1]
    assert json.loads(command("show", session.id, "--json"))["turns"] == 3
    assert json.loads(command("cancel", session.id, "--json"))["outcome"] == "failed"
    assert client.sessions.cancel(session.id).outcome == "failed"
    assert client.sessions.state(session.id).status == "failed"
