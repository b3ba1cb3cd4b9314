"""Groups of sessions as ingest and the samplers publish them."""

from __future__ import annotations

import time
from typing import Any

from rollgrid_contracts import ids, subjects
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.episodes import (
    SessionEnded,
    SessionForked,
    SessionOpened,
    SessionOutcome,
    SessionTerms,
    TurnNode,
)
from rollgrid_contracts.jobs import OpenEpisode, Priority, SampleGroup, Session, VersionSpan
from rollgrid_contracts.samples import Sample, SamplesFinished, SampleStatus
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_runtime.bus import Bus

from .driver import POOL, RUN, TENANT, make_job


class Episodes:
    """One group of sessions, as ingest and the samplers publish it."""

    def __init__(self, bus: Bus, key: str, n: int = 2, **fields: Any) -> None:
        self.bus, self.n = bus, n
        self.group = ids.group_id(TENANT, RUN, key, 0)
        self.who: dict[str, Any] = {"tenant": TENANT, "run": RUN, "group_id": self.group}
        base: dict[str, Any] = {
            "batch_id": ids.batch_id(TENANT, RUN, key),
            "n": n,
            "policy": "tiny",
            "created_at": time.time(),
            "deadline": time.time() + 300,
        }
        self.opening = OpenEpisode(**self.who, **(base | fields))
        self.job_seq = 0

    def session(self, index: int) -> str:
        return ids.session_id(self.group, index)

    def own(self, index: int) -> dict[str, Any]:
        return {**self.who, "index": index, "session": self.session(index), "job_seq": self.job_seq}

    async def tell(self, index: int, event: Any, todo: ScorerKind = ScorerKind.DONE) -> int:
        return (await self.bus.publish(subjects.samples(todo, TENANT, self.session(index)), event)).sequence

    async def open(self, *indexes: int) -> None:
        self.job_seq = (await self.bus.publish(subjects.jobs_episode(TENANT), self.opening)).sequence
        for index in indexes:
            terms = SessionTerms(policy="tiny")
            await self.tell(index, SessionOpened(**self.own(index), n=self.n, terms=terms, opened_at=time.time()))

    async def fork(self, index: int, branch: str, parent: int | None) -> int:
        return await self.tell(index, SessionForked(**self.own(index), branch=branch, parent=parent))

    async def dispatch(self, index: int, turn: int) -> int:
        job: SampleGroup = make_job(
            0, self.n, group_id=self.group, indexes=(index,), session=Session(session=self.session(index), turn=turn)
        )
        return (await self.bus.publish(subjects.jobs_pool(POOL, Priority.NORMAL, TENANT), job)).sequence

    async def finish(
        self, index: int, turn: int, job_seq: int, parent: int | None = None, branch: str = "main", **fields: Any
    ) -> int:
        tokens = fields.pop("tokens", 4)
        base: dict[str, Any] = {
            "index": index,
            "turn": turn,
            "status": SampleStatus.SUCCEEDED,
            "token_ids": TokenIds.of([turn] * tokens),
            "logprobs": Floats.of([-0.25] * tokens),
            "text": f"answer {turn}",
            "version_spans": (VersionSpan(version=1, start=0, end=tokens),),
            "node": TurnNode(
                parent=parent,
                branch=branch,
                observation=TokenIds.of([500 + turn] * 3),
                messages=({"role": "user", "content": f"ask {turn}"},),
            ),
        }
        event = SamplesFinished(
            **self.who, batch_id=self.opening.batch_id, n=self.n, policy="tiny", job_seq=job_seq, engine="scripted",
            session=Session(session=self.session(index), turn=turn), samples=(Sample(**base | fields),),
        )  # fmt: skip
        return await self.tell(index, event)

    async def play(self, index: int, turn: int, parent: int | None = None, **fields: Any) -> int:
        return await self.finish(index, turn, await self.dispatch(index, turn), parent, **fields)

    async def end(self, index: int, todo: ScorerKind = ScorerKind.DONE, **fields: Any) -> int:
        base: dict[str, Any] = {"outcome": SessionOutcome.CLOSED, "ended_at": time.time()}
        return await self.tell(index, SessionEnded(**self.own(index), **(base | fields)), todo)
