"""Verifiers in processes of their own: failures are data, and never anybody else's (design, section 10)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from rollgrid_contracts.scoring import ScoreStatus
from rollgrid_scorer.calls import Item, Shared
from rollgrid_scorer.isolation import IsolationError, Outcome, Pool

from tests.support.waiting import until

ROOT = str(Path(__file__).resolve().parents[3])
VERIFIERS = (
    "obedient=tests.support.verifiers:Obedient",
    "broken=tests.support.verifiers:broken_factory",
    "deadly=tests.support.verifiers:deadly_factory",
)
SHARED = Shared(None, None, {"answer": "a"}, {})


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True, scope="module")
def _importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ROOT)
        patch.setenv("ROLLGRID_NATS_PASSWORD", "hush")
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[Pool]:
    """One for all: whatever a verifier does, the next one is judged as if nothing had been."""
    made = Pool(2, verifiers=VERIFIERS)
    await made.start()
    yield made
    await made.close()


def items(*texts: str) -> list[Item]:
    return [Item(position, text, None, "stop", 1, position) for position, text in enumerate(texts)]


async def judge(
    pool: Pool, *texts: str, type_: str = "obedient", timeout_s: float = 20.0, **params: str
) -> list[Outcome]:
    outcomes = await pool.judge(type_, params, SHARED, items(*texts), timeout_s)
    assert sorted(outcomes) == list(range(len(texts)))
    return [outcomes[position] for position in range(len(texts))]


async def test_values_of_a_whole_event(pool: Pool) -> None:
    outcomes = await judge(pool, "a", "b", "a", type_="exact_match")
    assert [outcome.value for outcome in outcomes] == [1.0, 0.0, 1.0]
    assert {outcome.status for outcome in outcomes} == {ScoreStatus.SCORED}
    assert await judge(pool) == []


@pytest.mark.parametrize("text", ["nan", "infinite", "text", "nothing", "raise", "memory"])
async def test_what_is_no_number_is_verifier_error(pool: Pool, text: str) -> None:
    replaced = pool.replaced
    first, bad, last = await judge(pool, "fine", text, "fine")
    assert (bad.status, bad.value, bad.attempt) == (ScoreStatus.VERIFIER_ERROR, None, 1)
    assert bad.detail
    assert (first.value, last.value) == (0.5, 0.5)
    assert pool.replaced <= replaced + 1  # "memory" alone wears its worker out


async def test_invalid_output_carries_a_number(pool: Pool) -> None:
    (outcome,) = await judge(pool, "invalid")
    assert (outcome.status, outcome.value) == (ScoreStatus.INVALID_OUTPUT, 0.0)


@pytest.mark.parametrize(("text", "how"), [("crash", "SIGSEGV"), ("exit", "exit code 3"), ("leave", "exit code")])
async def test_a_crash_is_tried_twice_and_hits_nobody_else(pool: Pool, text: str, how: str) -> None:
    outcomes = await judge(pool, "fine", text, "fine", text, "fine")
    assert [outcome.value for outcome in outcomes] == [0.5, None, 0.5, None, 0.5]
    for bad in (outcomes[1], outcomes[3]):
        assert (bad.status, bad.attempt) == (ScoreStatus.VERIFIER_ERROR, 2)
        assert how in (bad.detail or "")


async def test_a_process_lost_once_is_retried(pool: Pool, tmp_path: Path) -> None:
    outcomes = await judge(pool, "fine", "crash-once", marks=str(tmp_path))
    assert [(outcome.value, outcome.attempt) for outcome in outcomes] == [(0.5, 1), (0.5, 2)]


async def test_a_hang_ends_at_its_deadline_with_all_its_children(pool: Pool, tmp_path: Path) -> None:
    outcomes = await judge(pool, "fine", "hang-with-child", "fine", timeout_s=2.0, marks=str(tmp_path))
    assert [outcome.value for outcome in outcomes] == [0.5, None, 0.5]
    assert (outcomes[1].status, outcomes[1].attempt) == (ScoreStatus.VERIFIER_TIMEOUT, 1)
    child = int((tmp_path / "child").read_text())
    await until(lambda: not running(child), 10, "the verifier's child is gone")


async def test_hanging_verifiers_leave_room_for_quick_ones(pool: Pool) -> None:
    await judge(pool, "a", type_="exact_match")
    hanging = [asyncio.create_task(judge(pool, "hang", timeout_s=30.0)) for _ in range(4)]
    await until(pool._slow.locked, 10, "a hanging verifier has its worker")
    for _ in range(3):
        assert (await judge(pool, "a", type_="exact_match"))[0].value == 1.0
    assert not any(task.done() for task in hanging)
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)
    assert (await judge(pool, "fine"))[0].value == 0.5


async def test_factories_that_fail(pool: Pool) -> None:
    for type_, attempt, detail in (
        ("broken", 1, "this factory never works"),
        ("deadly", 2, "exit code 5"),
        ("no-such", 1, "no verifier is named"),
    ):
        outcomes = await judge(pool, "x", "y", type_=type_)
        for outcome in outcomes:
            assert (outcome.status, outcome.value, outcome.attempt) == (ScoreStatus.VERIFIER_ERROR, None, attempt)
            assert detail in (outcome.detail or "")
    assert "unexpected keyword" in ((await judge(pool, "a", type_="exact_match", no="such"))[0].detail or "")


async def test_a_killed_worker_costs_an_attempt_not_a_score(pool: Pool, tmp_path: Path) -> None:
    scoring = asyncio.create_task(judge(pool, "slow 1", marks=str(tmp_path)))
    await until(lambda: any(tmp_path.iterdir()), 10, "the verifier has begun")
    os.kill(int(next(tmp_path.iterdir()).name.removeprefix("began-")), signal.SIGKILL)
    (outcome,) = await scoring
    assert (outcome.value, outcome.attempt) == (0.5, 2)


async def test_a_killed_nursery_is_replaced(pool: Pool) -> None:
    assert (await judge(pool, "fine"))[0].value == 0.5
    process = pool._nursery._process
    assert process is not None
    process.kill()
    assert (await judge(pool, "fine"))[0].value == 0.5


async def test_secrets_stay_out_of_workers(pool: Pool) -> None:
    (outcome,) = await judge(pool, "secrets")
    assert "PATH" in (outcome.detail or "")
    assert "ROLLGRID" not in (outcome.detail or "")


async def test_without_a_nursery_nothing_is_said_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    pool = Pool(2)
    with pytest.raises(IsolationError):
        await pool.start()
    with pytest.raises(IsolationError):
        await pool.judge("exact_match", {}, SHARED, items("a"), 1.0)
    await pool.close()


async def test_closing_ends_every_process(tmp_path: Path) -> None:
    pool = Pool(2, verifiers=VERIFIERS)
    await pool.start()
    await judge(pool, "slow 0", marks=str(tmp_path))
    worker = int(next(tmp_path.iterdir()).name.removeprefix("began-"))
    process = pool._nursery._process
    assert process is not None
    await pool.close()
    assert not running(worker)
    assert not running(process.pid)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
