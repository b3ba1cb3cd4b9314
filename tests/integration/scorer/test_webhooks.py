"""Webhook scorers as a process: a real scorer, NATS and S3, and a customer's HTTP server that misbehaves."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import SamplesScored, Score, ScorerKind, ScorerSpec, ScoreStatus
from rollgrid_runtime.bus import Bus
from rollgrid_scorer.webhook_wire import secret_key, signed_headers

from tests.support.servers import SeaweedServer
from tests.support.waiting import until
from tests.support.webhook_server import webhook_server

from .pipe import Pipe, scorer_pipe

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
DURABLES = [topology.scorer_consumer(kind).durable for kind in (ScorerKind.VERIFIER, ScorerKind.WEBHOOK)]


@pytest.fixture(scope="module")
def pipe(s3_server: SeaweedServer) -> Iterator[Pipe]:
    with webhook_server() as hook:
        home = hook.url("", host="localhost")
        env = {
            "ROLLGRID_WEBHOOK_ALLOW": f"{home} private, {hook.url('/acme')} private tenant=acme, {hook.url('/inward')}",
            "ROLLGRID_SCORER_WEBHOOK_SECRETS": json.dumps({home: SECRET}),
            "ROLLGRID_SCORER_WEBHOOK_EVENTS": "8",  # fewer than the flood of one test
            "ROLLGRID_SCORER_WEBHOOK_RUNNING": "2",
            "ROLLGRID_SCORER_WEBHOOK_SHARE": "4",
            "ROLLGRID_SCORER_WEBHOOK_ATTEMPTS": "3",
        }
        with scorer_pipe(s3_server, hook, env) as made:
            yield made


@pytest.fixture
async def bus(pipe: Pipe) -> AsyncIterator[Bus]:
    async with pipe.connected() as connection:
        yield connection


def webhook(url: str, name: str = "hook", *, timeout_s: float = 20.0, **params: Any) -> ScorerSpec:
    return ScorerSpec(
        name=name, type="webhook", kind=ScorerKind.WEBHOOK, params={"url": url, **params}, timeout_s=timeout_s
    )


def finished(*texts: str | None, scorers: tuple[ScorerSpec, ...], tenant: str = "acme", **task: Any) -> SamplesFinished:
    samples = tuple(
        Sample(index=index, status=SampleStatus.FAILED)
        if text is None
        else Sample(
            index=index,
            status=SampleStatus.SUCCEEDED,
            text=text,
            token_ids=TokenIds.of([7, 8]),
            finish_reason=FinishReason.STOP,
        )
        for index, text in enumerate(texts)
    )
    scoring = ScoringTask(
        scorers=scorers, prompt_text="why?", task=task, metadata={"row": 3}, deadline=time.time() + 90
    )
    return SamplesFinished(
        tenant=tenant, run="r", batch_id="b", group_id="g1", n=len(texts), policy="m", job_seq=7,
        samples=samples, scoring=scoring,
    )  # fmt: skip


async def publish(bus: Bus, event: SamplesFinished, todo: ScorerKind = ScorerKind.WEBHOOK) -> int:
    return (await bus.publish(subjects.samples(todo, event.tenant), event)).sequence


async def answers(bus: Bus, sequence: int) -> list[tuple[str, SamplesScored]]:
    """What has been published about the finish at this sequence, in order."""
    found = []
    for later in range(sequence + 1, (await bus.stream_info("RG_SAMPLES")).state.last_seq + 1):
        message = await bus.stored("RG_SAMPLES", later)
        assert message is not None
        data = await bus.resolve(message.data or b"", message.headers)
        event: Any = codec.decode(data, SamplesFinished | SamplesScored)  # type: ignore[arg-type]
        if isinstance(event, SamplesScored) and event.finished_seq == sequence:
            found.append((message.subject or "", event))
    return found


async def answered(bus: Bus, sequence: int, timeout_s: float = 30, subject: str = ".done.") -> list[Score]:
    """The scores of the last kind of scorer on the samples of that finish."""

    async def done() -> bool:
        return any(subject in name for name, _ in await answers(bus, sequence))

    await until(done, timeout_s, f"event {sequence} is scored", every_s=0.05)
    [event] = [event for name, event in await answers(bus, sequence) if subject in name]
    return [score for result in event.results for score in result.scores]


async def test_scores_of_a_webhook(bus: Bus, pipe: Pipe) -> None:
    url = pipe.url("/score?first")
    texts = ("good", None, "bad", "unsure", "garbled", "good in turns")
    sequence = await publish(bus, finished(*texts, scorers=(webhook(url, token_ids=True, extra={"k": 1}),), answer="x"))
    scores = await answered(bus, sequence)
    assert [(score.status.value, score.value) for score in scores] == [
        ("scored", 1.0),
        ("scored", 0.0),
        ("verifier_error", None),
        ("invalid_output", 0.0),
        ("scored", 1.0),
    ]
    assert scores[-1].turn_values == (0.5, None)
    assert {(score.scorer, score.version, score.attempt) for score in scores} == {("hook", "1+rev-9", 1)}
    assert scores[3].detail == "cannot read it"
    [call] = pipe.hook.of("/score?first")
    asked = call.json
    assert [(sample["index"], sample["token_ids"]) for sample in asked["samples"]] == [
        (index, [7, 8]) for index in (0, 2, 3, 4, 5)
    ]
    assert (asked["tenant"], asked["group_id"], asked["prompt"], asked["scorer"]) == ("acme", "g1", "why?", "hook")
    assert (asked["task"], asked["metadata"], asked["extra"]) == ({"answer": "x"}, {"row": 3}, {"k": 1})
    assert call.headers["idempotency-key"] == f"g1.{sequence}.hook" == call.headers["webhook-id"] == asked["id"]
    at = int(call.headers["webhook-timestamp"])
    assert signed_headers(asked["id"], call.body, at, secret_key(SECRET)).items() <= call.headers.items()


async def test_behind_a_verifier_and_over_the_inline_limit(bus: Bus, pipe: Pipe) -> None:
    """The second kind of scorer reads what the first published, and the finish itself from the stream and S3."""
    specs = (ScorerSpec(name="exact", type="exact_match"), webhook(pipe.url("/score?second")))
    long = "good " * 60_000
    sequence = await publish(bus, finished("good", long, scorers=specs, answer="good"), ScorerKind.VERIFIER)
    scores = await answered(bus, sequence)
    assert [(score.scorer, score.value) for score in scores] == [("hook", 1.0), ("hook", 1.0)]
    (first, by_verifier), (last, _) = await answers(bus, sequence)
    assert (first, last) == ("rg.0.samples.webhook.acme.-", "rg.0.samples.done.acme.-")
    assert [result.scores[0].value for result in by_verifier.results] == [1.0, 0.0]
    [call] = pipe.hook.of("/score?second")
    assert [len(sample["text"]) for sample in call.json["samples"]] == [4, len(long)]


@pytest.mark.parametrize(
    ("path", "status", "attempt", "why"),
    [
        ("/busy-then-good", ScoreStatus.SCORED, 3, None),
        ("/down", ScoreStatus.VERIFIER_ERROR, 3, "answered 503"),
        ("/redirect", ScoreStatus.VERIFIER_ERROR, 1, "redirects are not followed"),
        ("/huge", ScoreStatus.VERIFIER_ERROR, 1, "over 1048576 bytes"),
        ("/drip", ScoreStatus.VERIFIER_TIMEOUT, 1, "no answer within 1 s"),
        ("/shape/foreign", ScoreStatus.VERIFIER_ERROR, 1, "index 99, which was not asked about"),
    ],
)
async def test_a_failure_is_a_status_and_never_0(
    bus: Bus, pipe: Pipe, path: str, status: ScoreStatus, attempt: int, why: str | None
) -> None:
    timeout_s = 1.0 if path == "/drip" else 20.0
    sequence = await publish(bus, finished("good", scorers=(webhook(pipe.url(path), timeout_s=timeout_s),)))
    [score] = await answered(bus, sequence)
    assert (score.status, score.attempt, score.value is None) == (status, attempt, not status.has_value)
    assert (why or "") in (score.detail or "")
    assert len(pipe.hook.of(path)) == attempt


async def test_only_what_the_operator_allows_is_called(bus: Bus, pipe: Pipe) -> None:
    mine = await publish(bus, finished("good", scorers=(webhook(pipe.hook.url("/acme/1")),)))
    theirs = await publish(bus, finished("good", scorers=(webhook(pipe.hook.url("/acme/2")),), tenant="other"))
    beside = await publish(bus, finished("good", scorers=(webhook(pipe.hook.url("/elsewhere")),)))
    inward = await publish(bus, finished("good", scorers=(webhook(pipe.hook.url("/inward")),)))
    wrong = await publish(bus, finished("good", scorers=(webhook(pipe.url(), urls="x"),)))
    assert (await answered(bus, mine))[0].value == 1.0
    for sequence, why in (
        (theirs, "not on the operator's allow-list"),
        (beside, "not on the operator's allow-list"),
        (inward, "127.0.0.1 is not one a webhook may be sent to"),
        (wrong, "unknown field `urls`"),
    ):
        [score] = await answered(bus, sequence)
        assert (score.status, score.value) == (ScoreStatus.VERIFIER_ERROR, None)
        assert why in (score.detail or "")
    [call] = pipe.hook.of("/acme/1")
    assert "webhook-signature" not in call.headers  # only the entry with a secret is signed
    assert not [call for path in ("/acme/2", "/elsewhere", "/inward") for call in pipe.hook.of(path)]


async def test_a_slow_webhook_holds_up_nobody_else(bus: Bus, pipe: Pipe) -> None:
    pipe.hook.released.clear()
    slow = [await publish(bus, finished("good", scorers=(webhook(pipe.url("/hold?flood")),))) for _ in range(12)]
    await until(lambda: len(pipe.hook.of("/hold?flood")) == 2, 20, "the slow webhook has its calls")
    others = [
        await publish(bus, finished("good", scorers=(webhook(pipe.url("/score")),), tenant="other")),
        await publish(bus, finished("good", scorers=(webhook(pipe.hook.url("/acme/quick")),))),
        await publish(
            bus,
            finished("good", scorers=(ScorerSpec(name="e", type="exact_match"),), answer="good"),
            ScorerKind.VERIFIER,
        ),
    ]
    for sequence in others:
        assert (await answered(bus, sequence))[0].value == 1.0
    assert len(pipe.hook.of("/hold?flood")) == 2
    assert not [sequence for sequence in slow if await answers(bus, sequence)]
    pipe.hook.released.set()
    for sequence in slow:
        assert [score.value for score in await answered(bus, sequence, timeout_s=40)] == [1.0]
    calls = [call.headers["idempotency-key"] for call in pipe.hook.of("/hold?flood")]
    assert sorted(calls) == sorted(f"g1.{sequence}.hook" for sequence in slow)  # each was sent once


async def test_kill_9_in_mid_call_then_redelivery(bus: Bus, pipe: Pipe) -> None:
    pipe.hook.released.clear()
    sequence = await publish(bus, finished("good", scorers=(webhook(pipe.url("/hold?killed")),)))
    await until(lambda: len(pipe.hook.of("/hold?killed")) == 1, 20, "the call is under way")
    os.kill(pipe.scorer.pid, signal.SIGKILL)
    pipe.scorer.restart(60)
    await until(lambda: len(pipe.hook.of("/hold?killed")) == 2, 30, "the event is asked about again")
    pipe.hook.released.set()
    assert [score.value for score in await answered(bus, sequence)] == [1.0]
    first, second = pipe.hook.of("/hold?killed")
    assert first.headers["idempotency-key"] == second.headers["idempotency-key"]
    assert first.json == second.json

    async def idle() -> bool:
        infos = [await bus.consumer_info("RG_SAMPLES", durable) for durable in DURABLES]
        return all(info is not None and not info.num_pending and not info.num_ack_pending for info in infos)

    await until(idle, 30, "everything is acknowledged")
    assert len(await answers(bus, sequence)) == 1
