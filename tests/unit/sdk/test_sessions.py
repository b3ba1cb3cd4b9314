"""Sessions against a server that fails on purpose: what is sent again, what is not, and how sessions end (A25, A32, A50)."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest
from rollgrid import AsyncClient, AsyncSession, Client, EpisodeEnded, Retries, Session, run_episodes, run_episodes_async
from rollgrid.episodes import NOT_PLAYED, STOPPED
from rollgrid.errors import LimitExceeded, SessionBusy, SessionEnded, Unreachable, Unsendable
from rollgrid.session_calls import by_turn
from rollgrid.turns import CHAT, COMPLETIONS, turn_request

from tests.support.waiting import wait_until
from tests.unit.sdk.faulty import after, cut, refuse, running
from tests.unit.sdk.faulty_sessions import FaultySessions

QUICK = Retries(budget_s=20, outage_budget_s=20, first_pause_s=0.01, max_pause_s=0.05)
HELLO = [{"role": "user", "content": "hello"}]
REBUILDING = refuse(503, "episode_rebuilding", headers={"retry-after": "0.01"})
BUSY = refuse(409, "session_busy")


@pytest.fixture
def ingest() -> FaultySessions:
    return FaultySessions()


@pytest.fixture
def client(ingest: FaultySessions) -> Iterator[Client]:
    with running(ingest) as server, Client(server.url, "key", retries=QUICK) as connected:
        yield connected


@pytest.fixture
async def async_client(ingest: FaultySessions) -> AsyncIterator[AsyncClient]:
    with running(ingest) as server:
        async with AsyncClient(server.url, "key", retries=QUICK) as connected:
            yield connected


# -- one session ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [REBUILDING, refuse(429, "queue_full"), cut, after(cut), after(REBUILDING)])
def test_a_retried_turn_is_not_played_twice(client: Client, ingest: FaultySessions, fault: Any) -> None:
    with client.sessions.open(run="r") as session:
        ingest.faults += [fault, fault]
        turn = session.sample(HELLO, max_tokens=4)
        assert (turn.number, turn.text, turn.parent, turn.fork) == (0, "t0", None, None)
        assert session.sample(token_ids=[1, 2, 10, 4]).number == 1
    assert [len(played) for played in ingest.turns.values()] == [2]


async def test_the_async_client_does_the_same(async_client: AsyncClient, ingest: FaultySessions) -> None:
    async with await async_client.sessions.open(run="r") as session:
        ingest.faults += [after(cut), REBUILDING]
        turn = await session.sample(HELLO, max_tokens=4)
        branch = await session.fork(turn.number, reason="explore")
        assert (await branch.sample(observation_token_ids=[4])).branch == branch.branch == "b1"
    assert [len(played) for played in ingest.turns.values()] == [2]
    assert list(ingest.closes.values()) == [{"outcome": "closed"}]


def test_a_turn_that_meets_another_is_told_and_a_close_waits(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open()
    ingest.faults.append(BUSY)
    with pytest.raises(SessionBusy):
        session.sample(HELLO)
    ingest.faults += [BUSY, BUSY]
    assert session.close(0.5).reward == 0.5
    ingest.faults.append(refuse(410, "session_ended", retryable=False))
    with pytest.raises(SessionEnded):
        session.sample(HELLO)


def test_a_turn_that_meets_its_own_first_attempt_waits_for_it(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open()
    ingest.faults += [after(cut), BUSY, BUSY]
    assert session.sample(HELLO).number == 0
    assert len(ingest.turns[session.id]) == 1


def test_a_lost_answer_to_the_opening_opens_the_same_session(client: Client, ingest: FaultySessions) -> None:
    ingest.faults.append(after(cut))
    session = client.sessions.open(n=4, index=2)
    assert list(ingest.opened) == [session.id]
    again = client.sessions.open(group=ingest.opened[session.id]["group"], n=4, index=2)
    assert (again.id, again.index, again.n) == (session.id, 2, 4)


def test_what_is_not_said_is_left_to_the_server(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open(run="r", group="a", hold="pin", policy=None, weights={"min_version": 2}, ttl_s=None)
    sent = ingest.opened[session.id]
    assert {name: sent[name] for name in ("run", "group", "hold", "weights", "index", "n")} == {
        "run": "r", "group": "a", "hold": "pin", "weights": {"min_version": 2}, "index": 0, "n": 1,
    }  # fmt: skip
    assert not {"policy", "ttl_s", "scorers", "sampling"} & set(sent)


def test_sampling_of_the_session_is_every_turns_default(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open(sampling={"max_tokens": 9, "temperature": 0.5})
    session.sample(HELLO, temperature=0.25)
    (body,) = ingest.turns[session.id]
    assert (body["max_tokens"], body["temperature"]) == (9, 0.25)
    assert (body["return_token_ids"], body["logprobs"]) == (True, True)


def test_turns_carry_ids_logprobs_and_a_message_to_go_on_with(client: Client) -> None:
    turn = client.sessions.open().sample(HELLO)
    assert (turn.token_ids.tolist(), turn.logprobs.tolist(), turn.prompt_ids.tolist()) == ([10], [-0.5], [1, 2])
    assert turn.logprobs.dtype == np.float32
    assert turn.message == {"role": "assistant", "content": "t0"}
    assert turn.versions == (3,)
    turn = client.sessions.open().sample(token_ids=np.array([1, 2]))
    assert (turn.text, turn.message, turn.logprobs.tolist()) == ("t0", {"role": "assistant", "content": "t0"}, [-0.5])


def test_the_base_url_of_each_branch(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open()
    branch = session.fork(None, reason="retry", detail="why")
    last = branch.fork()
    assert session.base_url == f"{client.base_url}/s/{session.id}/v1"
    assert branch.base_url == f"{client.base_url}/s/{session.id}~b1/v1"
    assert branch.openai() == {"base_url": branch.base_url, "api_key": "key"}
    assert ingest.forks == [
        {"from_turn": None, "reason": "retry", "detail": "why"},
        {"branch": "b1", "reason": "requested"},
    ]
    assert (branch.id, last.branch) == (session.id, "b2")
    with pytest.raises(ValueError, match="sideways"):
        session.fork(reason="sideways")


def test_a_session_left_by_an_exception_ends_as_failed(client: Client, ingest: FaultySessions) -> None:
    with pytest.raises(KeyError, match="board"), client.sessions.open():
        raise KeyError("board")
    assert list(ingest.closes.values()) == [{"outcome": "failed", "detail": "KeyError: 'board'"}]


def test_a_failure_is_recorded_whatever_its_text_is(client: Client, ingest: FaultySessions) -> None:
    with pytest.raises(OSError, match="board"), client.sessions.open():
        raise OSError("\udce9 " + "board " * 1000)
    (end,) = ingest.closes.values()
    assert (end["outcome"], end["detail"][:15]) == ("failed", "OSError: ? boar")


def test_a_client_that_was_closed_says_so_and_hides_no_failure(client: Client) -> None:
    session = client.sessions.open()
    client.close()
    with pytest.raises(KeyError), session:
        raise KeyError("board")
    with pytest.raises(Unreachable, match="closed"):
        session.sample(HELLO)


def test_a_session_closed_on_any_branch_is_not_closed_again(client: Client, ingest: FaultySessions) -> None:
    with client.sessions.open() as session:
        session.sample(HELLO)
        session.fork().close(1.0, turn_rewards=[0.5], leaf=0)
    assert list(ingest.closes.values()) == [{"outcome": "closed", "reward": 1.0, "turn_rewards": {"0": 0.5}, "leaf": 0}]
    assert ingest.seen[f"POST /v1/sessions/{session.id}/close"] == 1


def test_the_bodys_own_failure_goes_on_when_the_close_fails_too(client: Client, ingest: FaultySessions) -> None:
    session = client.sessions.open()
    ingest.faults.append(refuse(500, "internal", retryable=False))
    with pytest.raises(KeyError), session:
        raise KeyError("board")
    assert not ingest.closes


# -- requests ---------------------------------------------------------------------------------------


def test_a_turn_is_asked_for_in_one_way_only() -> None:
    assert turn_request(HELLO, None, None, {})[0] == CHAT
    path, body = turn_request(None, None, np.array([4, 5], dtype=np.uint32), {"max_tokens": 1})
    assert (path, body) == (
        COMPLETIONS,
        b'{"observation_token_ids":[4,5],"logprobs":0,"max_tokens":1,"return_token_ids":true}',
    )
    wrong: list[tuple[Any, Any, Any]] = [(None, None, None), (HELLO, [1], None), (None, [1], [2])]
    for messages, whole, new in wrong:
        with pytest.raises(TypeError, match="give one of"):
            turn_request(messages, whole, new, {})
    with pytest.raises(Unsendable, match="stream"):
        turn_request(HELLO, None, None, {"stream": True})


def test_rewards_by_turn() -> None:
    assert by_turn([0.5, None, 1], [0, 1, 77]) == {0: 0.5, 77: 1.0}  # some numbers may have been leapt over
    assert by_turn({3: 0.25}, []) == {3: 0.25}
    assert by_turn(None, [0]) == {}
    with pytest.raises(Unsendable, match="2 turn rewards for 1"):
        by_turn([0.5, 0.5], [0])


# -- many episodes ----------------------------------------------------------------------------------


def play(session: Session, task: int) -> float | None:
    for _ in range(2):
        session.sample(HELLO)
    if task == 1 and session.index == 2:
        raise RuntimeError("the environment broke")
    return float(task)


def test_groups_are_complete_and_an_exception_ends_its_episode_alone(client: Client, ingest: FaultySessions) -> None:
    told: list[EpisodeEnded[int]] = []
    ingest.faults += [REBUILDING] * 3
    groups = run_episodes(client, [0, 1, 2], play, n=4, concurrency=5, run="r", group="step-7", progress=told.append)

    assert [group.label for group in groups] == ["step-7-0", "step-7-1", "step-7-2"]
    assert [[sample.reward for sample in group] for group in groups] == [[0.0] * 4, [1.0, 1.0, None, 1.0], [2.0] * 4]
    assert groups[1].counts == {"succeeded": 3, "failed": 1}
    assert sorted((event.position, event.index) for event in told) == [(p, i) for p in range(3) for i in range(4)]
    assert [event.done for event in told] == list(range(1, 13))
    assert told[-1].total == 12
    (broken,) = [event for event in told if event.error is not None]
    assert (broken.position, broken.index, broken.reward, str(broken.error)) == (1, 2, None, "the environment broke")
    assert ingest.closes[broken.session] == {"outcome": "failed", "detail": "RuntimeError: the environment broke"}
    assert {len(played) for played in ingest.turns.values()} == {2}


async def test_the_async_runner_does_the_same(async_client: AsyncClient, ingest: FaultySessions) -> None:
    at_once = most = 0

    async def play(session: AsyncSession, task: int) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await session.sample(HELLO)
        at_once -= 1
        if task == 1 and session.index == 2:
            raise RuntimeError("the environment broke")
        return np.float32(task)  # type: ignore[return-value]

    groups = await run_episodes_async(async_client, range(3), play, n=4, concurrency=3, run="r")
    assert [[sample.reward for sample in group] for group in groups] == [[0.0] * 4, [1.0, 1.0, None, 1.0], [2.0] * 4]
    assert most == 3


def test_no_more_episodes_at_once_than_were_asked_for(client: Client) -> None:
    meeting = threading.Barrier(3, timeout=10)
    at_once = most = 0
    lock = threading.Lock()

    def play(session: Session, task: int) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        meeting.wait()  # three at once, and never four
        with lock:
            at_once -= 1

    run_episodes(client, [0, 1], play, n=3, concurrency=3)
    assert most == 3


def test_the_same_label_again_plays_nothing_twice(client: Client, ingest: FaultySessions) -> None:
    first = run_episodes(client, [0, 2], play, n=2, run="r", group="step-1")
    turns = dict(ingest.by_key)
    again = run_episodes(client, [0, 2], play, n=2, run="r", group="step-1")
    assert [group.id for group in again] == [group.id for group in first]
    assert ingest.by_key == turns


def test_an_episode_that_another_process_left_in_the_middle_ends_as_failed(
    client: Client, ingest: FaultySessions
) -> None:
    client.sessions.open(run="r", group="step-2-0", index=1, n=2).sample(HELLO)
    (group,) = run_episodes(client, [0], play, n=2, run="r", group="step-2")
    assert group.counts == {"succeeded": 1, "failed": 1}
    assert not group.samples[1].ok


def test_a_session_that_cannot_be_opened_ends_the_run_and_the_groups_that_were_begun(
    client: Client, ingest: FaultySessions
) -> None:
    ingest.refused_labels.add("step-3-1")
    with pytest.raises(LimitExceeded):
        run_episodes(client, range(9), play, n=3, concurrency=2, group="step-3")
    assert "g-step-3-0" in [group.group_id for _, group in ingest.groups]  # complete
    assert not {"g-step-3-1", "g-step-3-8"} & {opened["group_id"] for opened in ingest.opened.values()}
    assert set(ingest.closes) == set(ingest.opened)


async def test_a_cancelled_async_run_ends_its_sessions_as_failed(
    async_client: AsyncClient, ingest: FaultySessions
) -> None:
    playing = asyncio.Event()

    async def play(session: AsyncSession, task: int) -> None:
        await session.sample(HELLO)
        playing.set()
        await asyncio.Event().wait()

    run = asyncio.create_task(run_episodes_async(async_client, [0], play, n=3, concurrency=2, group="step-4"))
    async with asyncio.timeout(20):
        await playing.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
    ((_, group),) = ingest.groups
    assert [entry.sample.status for entry in group.entries] == ["failed"] * 3
    assert ingest.closes.keys() == ingest.opened.keys()


def test_an_interrupted_run_ends_the_sessions_that_are_being_played(client: Client, ingest: FaultySessions) -> None:
    playing = threading.Barrier(2, action=lambda: signal.pthread_kill(main, signal.SIGINT))
    main = threading.main_thread().ident or 0

    def play(session: Session, task: int) -> None:
        session.sample(HELLO)
        playing.wait(10)
        wait_until(lambda: session.id in ingest.closes, 10, "the session was ended")
        raise RuntimeError("its turn was stopped")

    with pytest.raises(KeyboardInterrupt):
        run_episodes(client, [0], play, n=3, concurrency=2)
    assert sorted(end["detail"] for end in ingest.closes.values()) == [NOT_PLAYED, STOPPED, STOPPED]
    assert len(ingest.groups) == 1


def test_progress_that_raises_ends_the_run(client: Client, ingest: FaultySessions) -> None:
    def broken(event: object) -> None:
        raise RuntimeError("no terminal")

    with pytest.raises(RuntimeError, match="no terminal"):
        run_episodes(client, [0], play, n=3, concurrency=1, progress=broken)
    assert set(ingest.closes) == set(ingest.opened)
    assert len(ingest.groups) == 1


def test_nothing_to_play_is_no_group(client: Client) -> None:
    assert run_episodes(client, [], play) == []
    with pytest.raises(ValueError, match="at least 1"):
        run_episodes(client, [1], play, n=0)
