"""Scores of customers' webhooks: one POST per event and scorer, each tenant and webhook with its share."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rollgrid_contracts import codec
from rollgrid_contracts.samples import Sample, SamplesFinished, ScoringTask
from rollgrid_contracts.scoring import Score, ScorerKind, ScorerSpec, ScoreStatus
from rollgrid_runtime import telemetry
from rollgrid_runtime.webhooks import Allowed, AllowList, Location, WebhookParams

from .judges import NotNow
from .nursery import clean
from .sessions import by_turn, path_of_task
from .turns import Turns
from .webhook_client import CallFailed, Reply, WebhookClient
from .webhook_wire import GivenScore, WrongShape, question, read_answer, signed_headers

TYPE = "webhook"
VERSION = "1"
USER_AGENT = "rollgrid-scorer"


class Webhooks:
    """A `Judge`.  `keys` sign what goes to the allow-list entry of that URL."""

    kind = ScorerKind.WEBHOOK

    def __init__(
        self, client: WebhookClient, allowed: AllowList, turns: Turns, keys: Mapping[str, bytes], *,
        running: int, max_timeout_s: float,
    ) -> None:  # fmt: skip
        self._client, self._allowed, self._turns, self._keys = client, allowed, turns, dict(keys)
        self._running, self._max_timeout_s = running, max_timeout_s
        self._at_work: dict[tuple[str, str], asyncio.Semaphore] = {}

    def label(self, spec: ScorerSpec) -> str:
        return TYPE

    @contextlib.asynccontextmanager
    async def turn(self, event: SamplesFinished, task: ScoringTask) -> AsyncIterator[None]:
        """Held in the share of this tenant's webhook (webhooks, when the event has several), few at work at a time."""
        key = event.tenant, self._origins(event, task)
        if not self._turns.admit(key, time.monotonic()):
            raise NotNow(self._turns.delay_s(key, time.monotonic()))
        seconds = None
        try:
            async with self._at_work.setdefault(key, asyncio.Semaphore(self._running)):
                began = time.monotonic()
                yield
                seconds = time.monotonic() - began
        finally:
            self._turns.leave(key, seconds)
            if not self._turns.holds(key):
                self._at_work.pop(key, None)

    def _origins(self, event: SamplesFinished, task: ScoringTask) -> str:
        found = set()
        for spec in task.scorers:
            if spec.kind is self.kind:
                with contextlib.suppress(ValueError):  # refused in `judge`, without a call
                    found.add(self._place(spec, event.tenant)[1].origin)
        return " ".join(sorted(found))

    def _place(self, spec: ScorerSpec, tenant: str) -> tuple[WebhookParams, Location, Allowed]:
        """Raises ValueError (msgspec's own too) for what may not be called."""
        params = msgspec.convert(spec.params, WebhookParams)
        return params, *self._allowed.find(params.url, tenant)

    async def judge(
        self, spec: ScorerSpec, event: SamplesFinished, task: ScoringTask, samples: Sequence[Sample], sequence: int
    ) -> list[Score]:
        began = time.monotonic()
        blank = Score(scorer=spec.name, status=ScoreStatus.VERIFIER_ERROR, version=VERSION)
        try:
            with telemetry.child(f"verify {TYPE}", type=TYPE, samples=len(samples)):
                reply = await self._ask(spec, event, task, samples, sequence)
            blank = replace(blank, attempt=reply.attempt)
            given, version = read_answer(reply.body, ((sample.index, sample.turn) for sample in samples))
        except CallFailed as error:
            status = ScoreStatus.VERIFIER_TIMEOUT if error.timed_out else ScoreStatus.VERIFIER_ERROR
            scores = [replace(blank, status=status, detail=clean(str(error)), attempt=error.attempt)] * len(samples)
        except (WrongShape, ValueError) as error:
            scores = [replace(blank, detail=clean(str(error)))] * len(samples)
        else:
            blank = replace(blank, version=_version(version))
            scores = [_score(blank, given.get((sample.index, sample.turn))) for sample in samples]
            scores = [by_turn(score, path_of_task(task)) for score in scores]
        duration_ms = round((time.monotonic() - began) * 1e3, 3)
        return [replace(score, duration_ms=duration_ms) for score in scores]

    async def _ask(
        self, spec: ScorerSpec, event: SamplesFinished, task: ScoringTask, samples: Sequence[Sample], sequence: int
    ) -> Reply:
        params, location, entry = self._place(spec, event.tenant)
        id_ = f"{event.group_id}.{sequence}.{spec.name}"
        body = msgspec.json.encode(question(event, task, spec, params, id_, samples))
        headers = {
            **signed_headers(id_, body, int(time.time()), self._keys.get(entry.text)),
            "idempotency-key": id_,
            "content-type": codec.JSON,
            "accept": codec.JSON,
            "accept-encoding": "identity",
            "user-agent": USER_AGENT,
        }
        if (traceparent := telemetry.current().traceparent) is not None:
            headers["traceparent"] = traceparent
        timeout_s = min(spec.timeout_s, self._max_timeout_s)
        return await self._client.post(location, entry, body, headers, timeout_s, task.deadline)


def _version(own: str) -> str:
    return f"{VERSION}+{clean(own)[:100]}" if own else VERSION


def _score(blank: Score, given: GivenScore | None) -> Score:
    if given is None:
        return replace(blank, detail="the webhook's answer leaves this sample out")
    detail = None if given.detail is None else clean(given.detail)
    if given.value is None:
        return replace(blank, detail=detail or "the webhook gave no value")
    status = ScoreStatus.INVALID_OUTPUT if given.invalid_output else ScoreStatus.SCORED
    return replace(blank, status=status, value=given.value, detail=detail, turn_values=tuple(given.turn_values))
