"""A worker played by the test over real NATS: it finds an interactive job and says of it what the test wants."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx2
from rollgrid_contracts import subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.fleet import GroupStatus, LedgerAnswer, LedgerQuery
from rollgrid_contracts.jobs import SampleGroup, VersionSpan
from rollgrid_contracts.samples import (
    FinishReason,
    Sample,
    SampleReply,
    SampleStatus,
    StreamQuery,
    StreamState,
    TokenFrame,
)
from rollgrid_runtime.bus import Bus

from .door import Door

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def words(ids: Sequence[int]) -> str:
    """The text of ids in these tests."""
    return "".join(f"{WORDS[token]} " for token in ids)


def logprobs(ids: Sequence[int]) -> list[float]:
    return [-0.25 * (token + 1) for token in ids]


class Worker:
    """Speaks for one job at a time."""

    def __init__(self, bus: Bus, job: SampleGroup) -> None:
        self.bus, self.job = bus, job

    async def frame(
        self, ids: Sequence[int], offset: int = 0, *, attempt: int = 1, index: int = 0, **changes: Any
    ) -> None:
        fields: dict[str, Any] = {
            "group_id": self.job.group_id,
            "index": index,
            "attempt": attempt,
            "offset": offset,
            "token_ids": TokenIds.of(ids),
            "logprobs": Floats.of(logprobs(ids)),
            "text": words(ids),
            "spans": (VersionSpan(version=1, start=offset, end=offset + len(ids)),),
        }
        await self.bus.publish_core(subjects.reply(self.job.group_id), TokenFrame(**{**fields, **changes}))

    async def finish(self, ids: Sequence[int], index: int = 0, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "index": index,
            "status": SampleStatus.SUCCEEDED,
            "token_ids": TokenIds.of(ids),
            "logprobs": Floats.of(logprobs(ids)),
            "text": words(ids),
            "finish_reason": FinishReason.STOP,
            "version_spans": (VersionSpan(version=1, start=0, end=len(ids)),),
        }
        reply = SampleReply(
            group_id=self.job.group_id,
            prompt_tokens=len(self.job.prompt_token_ids),
            logprobs_mode="processed_logprobs",
            samples=(Sample(**{**fields, **changes}),),
        )
        await self.bus.publish_core(subjects.reply(self.job.group_id), reply)

    async def stand_in_for_the_ledger(self) -> None:
        """Say of this job's group that it is open, and of no other."""

        async def on_query(query: LedgerQuery, reply: str) -> None:
            job = self.job
            known = GroupStatus(group_id=job.group_id, batch_id=job.batch_id, run=job.run, n=job.n)
            groups = (known,) if job.group_id in query.group_ids else ()
            await self.bus.respond(reply, LedgerAnswer(epoch=1, folded_to=2**40, groups=groups))

        await self.bus.subscribe(subjects.LEDGER_QUERY, LedgerQuery, on_query)

    async def what_was_sent(self) -> StreamState:
        subject = subjects.resume(self.job.group_id)
        return await self.bus.request(subject, StreamQuery(group_id=self.job.group_id), StreamState, 2.0)


Script = Callable[[Worker, "Reader"], Any]


class Reader:
    """The client's side of one streamed call: the lines of its answer as they come."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.status = 0
        self.body = b""
        self._news = threading.Condition()

    def read(self, url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> None:
        with (
            httpx2.Client(timeout=30) as client,
            client.stream("POST", url + path, json=body, headers=headers) as answer,
        ):
            self.status = answer.status_code
            if answer.status_code != 200:
                self.body = answer.read()
                return
            for line in answer.iter_lines():
                if line:
                    with self._news:
                        self.lines.append(line)
                        self._news.notify_all()

    async def saw(self, text: str, within_s: float = 20.0) -> None:
        """Wait until a line holds `text`."""

        def wait() -> bool:
            with self._news:
                return self._news.wait_for(lambda: any(text in line for line in self.lines), within_s)

        assert await asyncio.to_thread(wait), self.lines


async def streamed(
    door: Door, path: str, body: dict[str, Any], script: Script, headers: dict[str, str] | None = None
) -> Reader:
    """Call, let the worker play `script`, and return when the answer has ended."""
    reader = Reader()
    async with door.connected() as bus:
        seen = {job.group_id for job in await door.stored_jobs()}
        call = asyncio.create_task(asyncio.to_thread(reader.read, door.url, path, body, headers or {}))
        job = await _new_job(door, seen, call)
        if job is not None:
            await script(Worker(bus, job), reader)
        async with asyncio.timeout(30):
            await call
    return reader


async def _new_job(door: Door, seen: set[str], call: asyncio.Task[None]) -> SampleGroup | None:
    give_up = time.monotonic() + 20
    while time.monotonic() < give_up and not call.done():
        for job in await door.stored_jobs():
            if job.group_id not in seen:
                return job
        await asyncio.sleep(0.02)
    return None


def data_of(lines: Sequence[str]) -> Iterator[str]:
    for line in lines:
        if line.startswith("data: "):
            yield line.removeprefix("data: ")
