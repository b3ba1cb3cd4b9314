"""Scorers and sessions: they act once, on the session's end, and see the whole conversation and the last answer."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollgrid_contracts import codec, ids, subjects
from rollgrid_contracts.arrays import TokenIds
from rollgrid_contracts.episodes import (
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.jobs import OpenEpisode, Session
from rollgrid_contracts.samples import FinishReason, Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import SamplesScored, ScorerKind, ScorerSpec, next_todo
from rollgrid_runtime.bus import Bus

from tests.support.servers import SeaweedServer
from tests.support.waiting import until
from tests.support.webhook_server import webhook_server

from .pipe import Pipe, scorer_pipe
from .test_webhooks import webhook

ROOT = str(Path(__file__).resolve().parents[3])
TENANT = "acme"
ATTENTIVE = ScorerSpec(name="seen", type="attentive")
EXACT = ScorerSpec(name="exact", type="exact_match")
TOLD: Any = SamplesFinished | SamplesScored | SessionOpened | SessionForked | SessionEnded


@pytest.fixture(scope="module")
def pipe(s3_server: SeaweedServer) -> Iterator[Pipe]:
    with webhook_server() as hook:
        env = {
            "PYTHONPATH": ROOT,
            "ROLLGRID_SCORER_VERIFIERS": "attentive=tests.support.verifiers:Attentive",
            "ROLLGRID_WEBHOOK_ALLOW": f"{hook.url('', host='localhost')} private",
        }
        with scorer_pipe(s3_server, hook, env) as made:
            yield made


@pytest.fixture
async def bus(pipe: Pipe) -> AsyncIterator[Bus]:
    async with pipe.connected() as connection:
        yield connection


class Episode:
    """Plays ingest and samplers for one session on the streams."""

    def __init__(self, bus: Bus, group: str, *scorers: ScorerSpec, deadline_s: float = 90, **task: Any) -> None:
        self.bus, self.group, self.scorers = bus, group, scorers
        self.session = ids.session_id(group, 0)
        self.who: dict[str, Any] = {"tenant": TENANT, "run": "r", "group_id": group}
        self.opening = OpenEpisode(
            **self.who, batch_id="b", n=1, policy="p", scorers=scorers, task=task, metadata={"row": 3},
            created_at=time.time(), deadline=time.time() + deadline_s,
        )  # fmt: skip
        self.job_seq = 0

    async def tell(self, event: Any, todo: ScorerKind = ScorerKind.DONE) -> int:
        return (await self.bus.publish(subjects.samples(todo, TENANT, self.session), event)).sequence

    async def open(self) -> None:
        self.job_seq = (await self.bus.publish(subjects.jobs_episode(TENANT), self.opening)).sequence
        terms = SessionTerms(policy="p")
        own: dict[str, Any] = {"index": 0, "session": self.session, "job_seq": self.job_seq}
        await self.tell(SessionOpened(**self.who, **own, n=1, terms=terms, opened_at=time.time()))

    async def turn(self, turn: int, asked: str, text: str, parent: int | None = None, branch: str = "main") -> None:
        node = TurnNode(
            parent=parent, branch=branch, observation=TokenIds.of([9]), messages=({"role": "user", "content": asked},)
        )
        sample = Sample(
            index=0, turn=turn, status=SampleStatus.SUCCEEDED, text=text, token_ids=TokenIds.of([1, 2, 3]),
            finish_reason=FinishReason.STOP, node=node,
        )  # fmt: skip
        await self.tell(
            SamplesFinished(
                **self.who, batch_id="b", n=1, policy="p", job_seq=self.job_seq, samples=(sample,),
                session=Session(session=self.session, turn=turn),
            )
        )  # fmt: skip

    async def fork(self, branch: str, parent: int | None) -> None:
        own: dict[str, Any] = {"index": 0, "session": self.session, "job_seq": self.job_seq}
        await self.tell(SessionForked(**self.who, **own, branch=branch, parent=parent))

    async def end(self, leaf: int | None, outcome: SessionOutcome = SessionOutcome.CLOSED) -> int:
        own: dict[str, Any] = {"index": 0, "session": self.session, "job_seq": self.job_seq}
        return await self.tell(
            SessionEnded(**self.who, **own, outcome=outcome, leaf=leaf, ended_at=time.time()), next_todo(self.scorers)
        )

    async def verdicts(self, sequence: int) -> list[tuple[str, SamplesScored]]:
        """What has been published about the event at `sequence`, in order."""
        found = []
        for later in range(sequence + 1, (await self.bus.stream_info("RG_SAMPLES")).state.last_seq + 1):
            message = await self.bus.stored("RG_SAMPLES", later)
            assert message is not None
            data = await self.bus.resolve(message.data or b"", message.headers)
            event = codec.decode(data, TOLD)
            if isinstance(event, SamplesScored) and event.finished_seq == sequence:
                found.append((message.subject or "", event))
        return found

    async def scored(self, sequence: int) -> list[tuple[str, SamplesScored]]:
        async def done() -> bool:
            return any(".done." in subject for subject, _ in await self.verdicts(sequence))

        await until(done, 30, f"the end at {sequence} is scored", every_s=0.05)
        return await self.verdicts(sequence)


async def test_verifiers_and_webhooks_judge_the_path_of_the_leaf_one_behind_the_other(bus: Bus, pipe: Pipe) -> None:
    hook = webhook(pipe.url("/score?session"), token_ids=True)
    episode = Episode(bus, "g-path", ATTENTIVE, EXACT, hook, answer="good in turns")
    await episode.open()
    await episode.turn(0, "one?", "good")
    await episode.turn(1, "two?", "not on the path", parent=0)
    await episode.fork("b", 0)
    await episode.turn(2, "three?", "bad", parent=0, branch="b")
    await episode.turn(3, "four?", "good in turns", parent=2, branch="b")
    sequence = await episode.end(leaf=3)
    (first, verified), (second, hooked) = await episode.scored(sequence)
    assert (first, second) == (
        f"rg.0.samples.webhook.{TENANT}.{episode.session}",
        f"rg.0.samples.done.{TENANT}.{episode.session}",
    )
    assert {(event.finished_seq, event.job_seq, event.group_id) for event in (verified, hooked)} == {
        (sequence, episode.job_seq, "g-path")
    }
    [judged] = verified.results
    assert (judged.index, judged.turn) == (0, 3)
    seen, exact = judged.scores
    assert seen.detail == "user,assistant,user,assistant,user,assistant|good/bad/good in turns|3|stop"
    assert seen.turn_values == (1.0, None, 0.0, 1.0), "by the number of the turn: 1 is on another path"
    assert exact.value == 1.0
    [score] = hooked.results[0].scores
    assert (score.value, score.turn_values) == (1.0, (0.5, None, None, None)), "it gave two values, for turns 0 and 2"
    [call] = pipe.hook.of("/score?session")
    [asked] = call.json["samples"]
    assert (asked["turn"], asked["turns"], asked["text"]) == (3, [0, 2, 3], "good in turns")
    assert asked["token_ids"] == [1, 2, 3]
    assert [message["content"] for message in call.json["messages"]] == [
        "one?", "good", "three?", "bad", "four?", "good in turns",
    ]  # fmt: skip
    assert (call.json["metadata"], json.loads(call.body)["task"]) == ({"row": 3}, {"answer": "good in turns"})


async def test_more_values_than_turns_are_a_failure_and_never_a_number(bus: Bus) -> None:
    episode = Episode(bus, "g-many", ATTENTIVE, EXACT)
    await episode.open()
    await episode.turn(0, "one?", "too many")
    [(_, event)] = await episode.scored(await episode.end(leaf=0))
    seen, exact = event.results[0].scores
    assert (seen.status.value, seen.value, seen.detail) == ("verifier_error", None, "2 turn values for 1 turns")
    assert (exact.status.value, exact.value) == ("verifier_error", None)
    assert "the task has no field 'answer'" in (exact.detail or "")


async def test_nothing_is_said_of_sessions_that_did_not_close_or_sampled_nothing(bus: Bus) -> None:
    """They come before a session that is scored: once that one is, they have been seen."""
    silent = []
    for number, (leaf, outcome) in enumerate(
        [(None, SessionOutcome.CLOSED), (0, SessionOutcome.EXPIRED), (7, SessionOutcome.CLOSED)]
    ):
        episode = Episode(bus, f"g-silent-{number}", ATTENTIVE)
        await episode.open()
        if leaf == 0:
            await episode.turn(0, "one?", "good")
        silent.append((episode, await episode.end(leaf, outcome)))
    gone = Episode(bus, "g-gone", ATTENTIVE)
    await gone.open()
    await gone.turn(0, "one?", "good")
    await bus.delete_message("RG_JOBS", gone.job_seq)  # as when its group has closed
    silent.append((gone, await gone.end(0)))
    last = Episode(bus, "g-last", ATTENTIVE)
    await last.open()
    await last.turn(0, "one?", "good")
    await last.scored(await last.end(0))

    async def all_seen() -> bool:
        info = await bus.consumer_info("RG_SAMPLES", "scorer-verifier")
        return info is not None and not info.num_pending and not info.num_ack_pending

    await until(all_seen, 20, "every end is acknowledged")
    assert [await episode.verdicts(sequence) for episode, sequence in silent] == [[], [], [], []]
