"""The scorer as a process, against a real nats-server and S3: one SamplesScored for every SamplesFinished."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import SampleScores, SamplesScored, ScorerKind, ScorerSpec, ScoreStatus
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import QueueFull
from rollgrid_runtime.settings import NatsSettings, S3Settings

from tests.support.servers import NatsServer, SeaweedServer, nats_server, new_bucket
from tests.support.services import ServiceProcess, run_service
from tests.support.waiting import until, wait_until

ROOT = str(Path(__file__).resolve().parents[3])
DURABLE = topology.scorer_consumer(ScorerKind.VERIFIER).durable
EXACT = ScorerSpec(name="exact", type="exact_match")


def environment(nats: NatsServer, s3_server: SeaweedServer, bucket: str) -> dict[str, str]:
    return {
        **nats.env(),
        **s3_server.env(bucket),
        "PYTHONPATH": ROOT,
        "ROLLGRID_NATS_ACK_WAIT_S": "3",
        "ROLLGRID_SCORER_VERIFIERS": "obedient=tests.support.verifiers:Obedient",
    }


class Shared(NamedTuple):
    """One NATS and one scorer for the tests that leave both whole."""

    nats: NatsSettings
    s3: S3Settings
    scorer: ServiceProcess


@pytest.fixture(scope="module")
def shared(s3_server: SeaweedServer) -> Iterator[Shared]:
    bucket = new_bucket()
    with nats_server() as nats, run_service("scorer", environment(nats, s3_server, bucket)) as scorer:
        yield Shared(nats.settings(), s3_server.settings(bucket), scorer)


@pytest.fixture
async def shared_bus(shared: Shared) -> AsyncIterator[Bus]:
    store = Blobs(shared.s3)
    connection = await Bus.connect(shared.nats, "test", store)
    yield connection
    await connection.close()
    store.close()


@pytest.fixture
def env(nats: NatsServer, s3_server: SeaweedServer, s3: S3Settings) -> dict[str, str]:
    return environment(nats, s3_server, s3.bucket)


@pytest.fixture
def scorer(env: dict[str, str]) -> Iterator[ServiceProcess]:
    with run_service("scorer", env) as process:
        yield process


@pytest.fixture
async def bus(nats_settings: NatsSettings, blobs: Blobs, scorer: ServiceProcess) -> AsyncIterator[Bus]:
    """Connected once the scorer has provisioned the server, so that its ack-wait counts."""
    connection = await Bus.connect(nats_settings, "test", blobs)
    yield connection
    await connection.close()


def finished(*texts: str | None, scorers: tuple[ScorerSpec, ...] = (EXACT,), **task: Any) -> SamplesFinished:
    """An event whose samples said `texts`; None is a sample that failed."""
    samples = tuple(
        Sample(index=index, status=SampleStatus.FAILED)
        if text is None
        else Sample(index=index, attempt=2, status=SampleStatus.SUCCEEDED, text=text, finish_reason=FinishReason.STOP)
        for index, text in enumerate(texts)
    )
    deadline = task.pop("deadline", time.time() + 60)
    return SamplesFinished(
        tenant="acme",
        run="r",
        batch_id="b",
        group_id="g1",
        n=len(texts),
        policy="m",
        job_seq=7,
        samples=samples,
        scoring=ScoringTask(scorers=scorers, task=task, deadline=deadline),
    )


async def publish(bus: Bus, event: SamplesFinished) -> int:
    return (await bus.publish(subjects.samples(ScorerKind.VERIFIER, event.tenant), event)).sequence


async def stored_from(bus: Bus, first: int) -> list[tuple[str, SamplesScored]]:
    """Every SamplesScored stored at or behind a sequence."""
    found = []
    last = (await bus.stream_info("RG_SAMPLES")).state.last_seq
    for sequence in range(first, last + 1):
        message = await bus.stored("RG_SAMPLES", sequence)
        assert message is not None
        assert message.subject is not None
        if ".verifier." not in message.subject:
            data = await bus.resolve(message.data or b"", message.headers)
            found.append((message.subject, codec.decode(data, SamplesScored)))
    return found


async def scored(bus: Bus, event: SamplesFinished, timeout_s: float = 20) -> tuple[int, str, SamplesScored]:
    """Publish, wait until acknowledged, and give (sequence, subject, answer)."""
    sequence = await publish(bus, event)
    await acknowledged(bus, timeout_s)
    [(subject, answer)] = await stored_from(bus, sequence + 1)
    return sequence, subject, answer


async def acknowledged(bus: Bus, timeout_s: float = 20) -> None:
    """The last event for verifiers has been delivered, and all are acknowledged."""
    last = await bus.last_stored("RG_SAMPLES", "rg.0.samples.verifier.>")
    assert last is not None

    async def idle() -> bool:
        info = await bus.consumer_info("RG_SAMPLES", DURABLE)
        if info is None or info.delivered is None or info.delivered.stream_seq < int(last.seq or 0):
            return False
        return info.num_pending == 0 and info.num_ack_pending == 0

    await until(idle, timeout_s, "every event is acknowledged")


def by_index(answer: SamplesScored) -> dict[int, SampleScores]:
    return {result.index: result for result in answer.results}


async def test_one_answer_per_event_for_succeeded_samples(shared_bus: Bus) -> None:
    sequence, subject, answer = await scored(shared_bus, finished("yes", None, "no", answer="yes"))
    assert subject == "rg.0.samples.done.acme.-"
    assert (answer.group_id, answer.job_seq, answer.finished_seq) == ("g1", 7, sequence)
    assert sorted(by_index(answer)) == [0, 2]
    assert {index: result.scores[0].value for index, result in by_index(answer).items()} == {0: 1.0, 2: 0.0}
    assert all(result.attempt == 2 for result in answer.results)
    score = by_index(answer)[0].scores[0]
    assert (score.scorer, score.version, score.status) == ("exact", "1", ScoreStatus.SCORED)


async def test_several_scorers_and_the_next_kind(shared_bus: Bus) -> None:
    specs = (
        EXACT,
        ScorerSpec(name="number", type="numeric"),
        ScorerSpec(name="judge", type="judge", kind=ScorerKind.JUDGE),
    )
    _, subject, answer = await scored(shared_bus, finished("#### 4", scorers=specs, answer="4"))
    assert subject == "rg.0.samples.judge.acme.-"
    assert {score.scorer: score.value for score in answer.results[0].scores} == {"exact": 0.0, "number": 1.0}


async def test_failures_are_null_with_their_status(shared_bus: Bus, shared: Shared) -> None:
    """crash, hang, NaN: the group still gets its answer, and no failure is a 0."""
    spec = ScorerSpec(name="o", type="obedient", timeout_s=2)
    texts = ("fine", "crash", "nan", "hang", "raise", "fine", "invalid")
    _, _, answer = await scored(shared_bus, finished(*texts, scorers=(spec,)))
    found = {index: result.scores[0] for index, result in by_index(answer).items()}
    assert [found[index].status.value for index in range(7)] == [
        "scored",
        "verifier_error",
        "verifier_error",
        "verifier_timeout",
        "verifier_error",
        "scored",
        "invalid_output",
    ]
    assert [found[index].value for index in range(7)] == [0.5, None, None, None, None, 0.5, 0.0]
    assert found[1].attempt == 2
    assert shared.scorer.is_ready()


async def test_unknown_type_and_a_sample_without_text(shared_bus: Bus) -> None:
    event = finished("a", scorers=(ScorerSpec(name="x", type="no-such"),))
    mute = Sample(index=1, status=SampleStatus.SUCCEEDED)
    event = msgspec.structs.replace(event, samples=(*event.samples, mute))
    _, _, answer = await scored(shared_bus, event)
    details = [result.scores[0].detail or "" for result in answer.results]
    assert "no verifier is named 'no-such'" in details[0]
    assert "no text" in details[1]


async def test_events_that_need_no_answer_are_acknowledged(shared_bus: Bus) -> None:
    """All failed; past the deadline; without a task; not even readable."""
    first = await publish(shared_bus, finished(None, None))
    await publish(shared_bus, finished("a", answer="a", deadline=time.time() - 1))
    subject = subjects.samples(ScorerKind.VERIFIER, "acme")
    await shared_bus.publish(subject, b"\xff not msgpack")
    await shared_bus.publish(subject, msgspec.structs.replace(finished("a"), scoring=None))
    await acknowledged(shared_bus)
    assert await stored_from(shared_bus, first) == []


async def test_payloads_over_the_inline_limit(shared_bus: Bus) -> None:
    long = "x" * 300_000
    _, _, answer = await scored(shared_bus, finished(long, "y", answer=long))
    assert [result.scores[0].value for result in answer.results] == [1.0, 0.0]


async def test_kill_9_while_scoring_then_redelivery(bus: Bus, scorer: ServiceProcess, tmp_path: Path) -> None:
    spec = ScorerSpec(name="o", type="obedient", params={"marks": str(tmp_path)})
    sequence = await publish(bus, finished("slow 1.5", "fine", scorers=(spec,)))
    await until(lambda: any(tmp_path.iterdir()), 20, "the verifier has begun")
    worker = int(next(tmp_path.iterdir()).name.removeprefix("began-"))
    os.kill(scorer.pid, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{worker}").exists() or _zombie(worker), 30, "the worker died with the scorer")
    scorer.restart(60)
    await acknowledged(bus, 30)
    [(_, answer)] = await stored_from(bus, sequence + 1)
    assert answer.finished_seq == sequence
    assert [result.scores[0].value for result in answer.results] == [0.5, 0.5]


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


async def test_heartbeats_keep_a_slow_event_here(shared_bus: Bus) -> None:
    """A verdict that takes longer than the ack-wait is scored once."""
    event = finished("slow 5", scorers=(ScorerSpec(name="o", type="obedient", timeout_s=20),))
    sequence, _, answer = await scored(shared_bus, event, timeout_s=30)
    assert answer.results[0].scores[0].attempt == 1
    info = await shared_bus.consumer_info("RG_SAMPLES", DURABLE)
    assert info is not None
    assert info.num_redelivered == 0
    assert len(await stored_from(shared_bus, sequence + 1)) == 1


async def test_drain_ends_what_is_held(bus: Bus, scorer: ServiceProcess, tmp_path: Path) -> None:
    spec = ScorerSpec(name="o", type="obedient", params={"marks": str(tmp_path)})
    sequence = await publish(bus, finished("slow 1", scorers=(spec,)))
    await until(lambda: any(tmp_path.iterdir()), 20, "the verifier has begun")
    assert await asyncio.to_thread(scorer.stop) == 0
    await acknowledged(bus)
    [(_, answer)] = await stored_from(bus, sequence + 1)
    assert answer.results[0].scores[0].value == 0.5


async def test_a_paused_scorer_loses_nothing(bus: Bus, scorer: ServiceProcess, tmp_path: Path) -> None:
    """SIGSTOP of the service for longer than the ack-wait: its event is scored by whoever comes first, once in the fold."""
    spec = ScorerSpec(name="o", type="obedient", params={"marks": str(tmp_path)}, timeout_s=3)
    sequence = await publish(bus, finished("slow 1", "fine", scorers=(spec,)))
    await until(lambda: any(tmp_path.iterdir()), 20, "the verifier has begun")
    os.kill(scorer.pid, signal.SIGSTOP)
    await asyncio.sleep(4.5)  # longer than the ack-wait and the verdict's deadline
    os.kill(scorer.pid, signal.SIGCONT)
    await acknowledged(bus, 30)
    answers = await stored_from(bus, sequence + 1)
    assert len(answers) == 1  # its msg-id
    assert [result.scores[0].value for result in answers[0][1].results] == [0.5, 0.5]


async def test_nats_restart_and_readiness(bus: Bus, nats: NatsServer, scorer: ServiceProcess) -> None:
    status, body = scorer.readiness()
    assert (status, body["problems"]) == (200, {})
    assert "exact_match" in body["verifiers"]
    nats.kill()
    wait_until(lambda: "nats" in scorer.readiness()[1].get("problems", {}), 20, "the loss of NATS is seen")
    nats.start().wait_ready(20)
    wait_until(scorer.is_ready, 30, "ready again")
    await until(lambda: bus.connected, 20, "reconnected")
    _, _, answer = await scored(bus, finished("a", answer="a"))
    assert answer.results[0].scores[0].value == 1.0


async def fill(bus: Bus) -> int:
    """Publish until the stream refuses; its last sequence."""
    while True:
        try:
            await bus.publish(subjects.samples(ScorerKind.DONE, "acme"), b"x")
        except QueueFull:
            return (await bus.stream_info("RG_SAMPLES")).state.last_seq


async def test_a_full_stream_delays_and_loses_nothing(
    env: dict[str, str], nats_settings: NatsSettings, blobs: Blobs
) -> None:
    full = NatsSettings(**{**nats_settings.model_dump(), "samples_max_bytes": 40_000})
    with run_service("scorer", {**env, "ROLLGRID_NATS_SAMPLES_MAX_BYTES": "40000"}) as scorer:
        bus = await Bus.connect(full, "test", blobs)
        scorer.pause()
        sequence = await publish(bus, finished("a" * 35_000, answer="a"))
        filled_to = await fill(bus)
        scorer.resume()
        await until(lambda: "queue_full" in scorer.log_tail(), 20, "refused")
        info = await bus.consumer_info("RG_SAMPLES", DURABLE)
        assert info is not None
        assert info.num_ack_pending == 1
        await bus.delete_message("RG_SAMPLES", sequence)

        async def answered() -> bool:
            return (await bus.stream_info("RG_SAMPLES")).state.last_seq > filled_to

        await until(answered, 20, "the answer is stored")
        [(_, answer)] = await stored_from(bus, filled_to + 1)
        assert answer.finished_seq == sequence
        await bus.close()
