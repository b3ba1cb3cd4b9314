"""Retries, resumption and deadlines against a server that fails on purpose (A12, A53, I2)."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rollgrid import AsyncClient, Client, CursorFile, DeadlineExceeded, Group, Retries, RollgridAPIError, Unreachable
from rollgrid.errors import CursorMismatch, LimitExceeded, Paced, QueueFull, VersionUnavailable

from tests.unit.sdk.build import closed, entry
from tests.unit.sdk.faulty import FaultyIngest, RunningServer, after, cut, refuse, running

QUICK = Retries(budget_s=20, outage_budget_s=20, first_pause_s=0.01, max_pause_s=0.05)
IMPATIENT = Retries(budget_s=0.2, outage_budget_s=0.2, first_pause_s=0.01, max_pause_s=0.05)
PASSING = {
    "429": refuse(429, "queue_full", headers={"retry-after": "0.01"}),
    "503": refuse(503, "not_ready"),
    "connection reset": cut,
}


@pytest.fixture
def ingest() -> FaultyIngest:
    return FaultyIngest()


@pytest.fixture
def server(ingest: FaultyIngest) -> Iterator[RunningServer]:
    with running(ingest) as started:
        yield started


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.url, "key", retries=QUICK) as connected:
        yield connected


@pytest.fixture
async def async_client(server: RunningServer) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(server.url, "key", retries=QUICK) as connected:
        yield connected


def fill(ingest: FaultyIngest, count: int) -> list[str]:
    """Close `count` groups, at every third cursor as if other runs wrote between."""
    ingest.groups = [(3 * k + 1, closed([entry(0)], group_id=f"g{k}", position=k)) for k in range(count)]
    ingest.batch_size = count
    return [group.group_id for _, group in ingest.groups]


# -- one call ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PASSING)
def test_a_passing_failure_is_retried_under_one_key(ingest: FaultyIngest, client: Client, kind: str) -> None:
    ingest.faults.extend([PASSING[kind]] * 3)
    batch = client.submit(["a", "b"], sampling={"max_tokens": 4})
    assert ingest.seen["POST /v1/rollouts"] == 4
    assert batch.group_ids == ("g0", "g1")
    assert len(ingest.bodies) == 1
    assert ingest.retry_counts == [None, "1", "2", "3"]


def test_a_lost_answer_cannot_duplicate_a_submission(ingest: FaultyIngest, client: Client) -> None:
    ingest.faults.extend([after(cut), after(refuse(503, "bus_error"))])
    client.submit(["a"], sampling={"max_tokens": 4})
    assert len(ingest.keys) == 3
    assert len(set(ingest.keys)) == 1  # one key: the server sees one submission
    client.submit(["a"], sampling={"max_tokens": 4})
    assert len(set(ingest.keys)) == 2  # another call is another submission


def test_the_callers_key_is_sent(ingest: FaultyIngest, client: Client) -> None:
    batch = client.submit(["a"], sampling={"max_tokens": 4}, idempotency_key="step-7")
    assert ingest.keys == ["step-7"]
    assert batch.batch_id == "b-step-7"


def test_a_refusal_is_not_retried(ingest: FaultyIngest, client: Client) -> None:
    ingest.faults.append(refuse(400, "limit_exceeded", retryable=False, param="n", limit="max_n=8"))
    with pytest.raises(LimitExceeded) as caught:
        client.submit(["a"], n=9, sampling={"max_tokens": 4})
    assert (caught.value.field, caught.value.limit) == ("n", "max_n=8")
    assert ingest.seen["POST /v1/rollouts"] == 1


def test_an_overload_beyond_the_budget_is_raised(ingest: FaultyIngest, server: RunningServer) -> None:
    ingest.faults.extend([refuse(429, "queue_full")] * 1000)
    with Client(server.url, retries=IMPATIENT) as client, pytest.raises(QueueFull):
        client.submit(["a"], sampling={"max_tokens": 4})
    assert 1 < ingest.seen["POST /v1/rollouts"] < 1000


def test_a_pace_is_waited_for_beyond_the_budget_until_the_batchs_own_deadline(
    ingest: FaultyIngest, server: RunningServer
) -> None:
    """That the run is ahead of its training is no trouble of the server's: 0.2 s of budget do not end the wait."""
    paced = refuse(429, "paced", headers={"retry-after": "0.1"})
    pace = {"batch": 1, "max_staleness": 0}
    with Client(server.url, retries=IMPATIENT) as client:
        ingest.faults.extend([paced] * 5)
        client.submit(["x"], sampling={"max_tokens": 4}, pace=pace, idempotency_key="step-1")
        assert ingest.keys == ["step-1"]
        ingest.faults.extend([paced] * 1000)
        with pytest.raises(DeadlineExceeded) as late:
            client.submit(["x"], sampling={"max_tokens": 4}, pace=pace, deadline_s=0.5)
        assert isinstance(late.value.__cause__, Paced)


def test_a_retry_after_beyond_the_budget_is_not_waited_for(ingest: FaultyIngest, client: Client) -> None:
    ingest.faults.append(refuse(429, "queue_full", headers={"retry-after": "3600"}))
    with pytest.raises(QueueFull) as caught:
        client.submit(["a"], sampling={"max_tokens": 4})
    assert caught.value.retry_after_s == 3600
    assert ingest.seen["POST /v1/rollouts"] == 1


def test_nobody_there(server: RunningServer) -> None:
    server.stop()
    with Client(server.url, retries=IMPATIENT) as client, pytest.raises(Unreachable, match="http://127"):
        client.models()


def test_a_foreign_server_is_named_as_such(ingest: FaultyIngest, client: Client) -> None:
    async def page_of_somebody(_: object) -> object:
        from starlette.responses import HTMLResponse

        return HTMLResponse("<html>hello</html>")

    ingest.faults.append(page_of_somebody)  # type: ignore[arg-type]
    with pytest.raises(RollgridAPIError, match="cannot read"):
        client.batch("b1")


# -- following --------------------------------------------------------------------------------------


def test_groups_resume_where_they_were_through_every_fault(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 12)
    ingest.page_size = 2
    batch = client.submit(["x"] * 12, sampling={"max_tokens": 4})
    faults = itertools.cycle(PASSING.values())
    ingest.faults.extend(fault for fault in itertools.islice(faults, 9))
    groups = list(batch.groups())
    assert [group.id for group in groups] == expected
    assert [group.cursor for group in groups] == [at for at, _ in ingest.groups]
    assert ingest.cursors == sorted(ingest.cursors)  # never from the beginning again


def test_a_restarted_server_is_found_again(ingest: FaultyIngest, server: RunningServer, client: Client) -> None:
    expected = fill(ingest, 6)
    ingest.page_size = 1
    groups = client.submit(["x"] * 6, sampling={"max_tokens": 4}).groups()
    seen = [next(groups).id, next(groups).id]
    server.stop()
    restart = threading.Timer(0.1, server.start)
    restart.start()
    seen += [group.id for group in groups]
    restart.join()
    assert seen == expected


def test_an_iterator_gives_each_group_once_even_if_the_server_repeats(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 4)
    ingest.groups = sorted(ingest.groups * 2, key=lambda pair: pair[0])
    assert [group.id for group in client.batch("b1").groups()] == expected


def test_a_batch_that_the_server_has_archived_and_forgotten_ends(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 3)
    batch = client.batch("b1")
    ingest.batch_size = 0  # nobody can say any more that it is done
    ingest.forgotten = True
    assert [group.id for group in batch.groups()] == expected


def test_a_submitted_batch_ends_with_its_last_group(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 3)
    ingest.batch_size = 1000
    batch = client.submit(["x"] * 3, sampling={"max_tokens": 4})
    assert [group.id for group in batch.groups()] == expected
    assert len(ingest.cursors) == 1  # without asking for another page


def test_waiting_ends_with_the_callers_time(ingest: FaultyIngest, client: Client) -> None:
    fill(ingest, 2)
    ingest.batch_size = 3  # one never closes
    groups = client.batch("b1").groups(timeout=0.3)
    assert [next(groups).id, next(groups).id] == ["g0", "g1"]
    with pytest.raises(DeadlineExceeded):
        next(groups)


def test_an_outage_beyond_its_budget_ends_the_iterator(ingest: FaultyIngest, server: RunningServer) -> None:
    fill(ingest, 2)
    ingest.page_size = 1
    with Client(server.url, retries=IMPATIENT) as client:
        groups = client.batch("b1").groups()
        next(groups)
        server.stop()
        with pytest.raises(Unreachable):
            list(groups)


def test_a_cursor_file_resumes_at_least_once(ingest: FaultyIngest, client: Client, tmp_path: Path) -> None:
    expected = fill(ingest, 5)
    path = tmp_path / "cursor"
    first = client.batch("b1").groups(cursor=CursorFile(path))
    in_hand = [next(first).id, next(first).id]
    first.close()  # the process dies with the second group in hand
    resumed = [group.id for group in client.batch("b1").groups(cursor=CursorFile(path))]
    assert in_hand[1] == resumed[0]  # it comes again
    assert [*in_hand[:1], *resumed] == expected
    assert [group.id for group in client.batch("b1").groups(cursor=CursorFile(path))] == []


def test_a_stored_cursor_resumes_behind_its_group(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 5)
    groups: list[Group] = list(client.batch("b1").groups())
    again = client.batch("b1").groups(cursor=groups[1].cursor)
    assert [group.id for group in again] == expected[2:]


def test_a_cursor_file_of_another_run_is_refused(ingest: FaultyIngest, client: Client, tmp_path: Path) -> None:
    fill(ingest, 1)
    CursorFile(tmp_path / "cursor").commit(1, "run:other")
    with pytest.raises(CursorMismatch):
        client.trajectories("r", cursor=CursorFile(tmp_path / "cursor"))


def test_a_run_is_read_to_its_present_end_or_followed(ingest: FaultyIngest, client: Client) -> None:
    expected = fill(ingest, 3)
    ingest.page_size = 2
    assert [group.id for group in client.trajectories("r", follow=False)] == expected
    assert [group.id for group in itertools.islice(client.trajectories("r"), 3)] == expected
    with pytest.raises(DeadlineExceeded):
        list(client.trajectories("r", cursor=7, timeout=0.2))


# -- weights ----------------------------------------------------------------------------------------


def test_a_publish_survives_lost_answers(ingest: FaultyIngest, client: Client, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1_000_000)
    (tmp_path / "config.json").write_text("{}")
    ingest.faults.extend([refuse(503, "storage_error"), after(cut), cut, after(cut), after(cut), after(cut)])
    version = client.weights.publish("p", tmp_path, step=1)
    assert version.version == 1
    assert ingest.files == {"model.safetensors": b"weights" * 1_000_000}
    assert len(ingest.uploads) == len(ingest.committed) == 1
    assert version.wait_live(timeout=5) is version
    assert client.weights.publish("p", tmp_path).version == 2
    with pytest.raises(VersionUnavailable):
        client.weights.publish("p", tmp_path, version=2)


def test_waiting_for_a_version_says_what_runs(ingest: FaultyIngest, client: Client, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    version = client.weights.publish("p", tmp_path)
    ingest.newest = 0
    with pytest.raises(DeadlineExceeded, match=r"p@1 is not live after 0.3 s: .* running \{'w': \[0\]\}"):
        version.wait_live(timeout=0.3)
    with pytest.raises(DeadlineExceeded, match=r"p@1 is not live on 3 workers after 0.3 s: "):
        version.wait_live(timeout=0.3, min_workers=3)


# -- asyncio ----------------------------------------------------------------------------------------


async def test_the_async_client_does_the_same(ingest: FaultyIngest, async_client: AsyncClient, tmp_path: Path) -> None:
    expected = fill(ingest, 6)
    ingest.page_size = 2
    ingest.faults.extend([PASSING["429"], after(cut)])
    batch = await async_client.submit(["x"] * 6, sampling={"max_tokens": 4})
    assert len(set(ingest.keys)) == 1
    ingest.faults.extend(PASSING.values())
    path = tmp_path / "cursor"
    assert [group.id async for group in batch.groups(cursor=CursorFile(path))] == expected
    assert CursorFile(path).read(f"batch:{batch.batch_id}") == ingest.groups[-1][0]
    (tmp_path / "model.safetensors").write_bytes(b"weights" * 1000)
    ingest.faults.extend([cut, cut])
    version = await async_client.weights.publish("p", tmp_path)
    await version.live(timeout=5)
    assert ingest.files == {"model.safetensors": b"weights" * 1000}


async def test_many_async_iterators_share_one_client(ingest: FaultyIngest, async_client: AsyncClient) -> None:
    expected = fill(ingest, 20)
    ingest.page_size = 3

    async def read() -> list[str]:
        return [group.id async for group in async_client.trajectories("r", follow=False)]

    assert await asyncio.gather(*(read() for _ in range(8))) == [expected] * 8


async def test_cancelling_a_waiting_iterator_is_immediate(ingest: FaultyIngest, async_client: AsyncClient) -> None:
    async def read() -> None:
        async for _ in async_client.trajectories("r"):
            pass

    task = asyncio.create_task(read())
    while not ingest.cursors:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
