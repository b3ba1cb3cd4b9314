"""What is sent to a webhook and what must come back: JSON (docs/reference/scorers.md).  Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
from collections.abc import Iterable
from typing import Any

import msgspec
from rollgrid_contracts.samples import Sample, SamplesFinished, ScoringTask
from rollgrid_contracts.scoring import ScorerSpec
from rollgrid_runtime.webhooks import WebhookParams

from .sessions import path_of_task

SECRET_PREFIX = "whsec_"
MAX_TURNS = 4096


class AskedSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    index: int
    turn: int = 0
    text: str | None = None
    content: str | None = None
    tokens: int = 0
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    turns: list[int] | None = None
    """Of a session: its judged turns, the last answer's included.  `turn_values` are one for each of them."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the POST.  `id` is the same for every attempt at the same event."""

    id: str
    tenant: str
    run: str
    group_id: str
    scorer: str
    prompt: str | None
    messages: tuple[dict[str, Any], ...] | None
    samples: list[AskedSample]
    task: dict[str, Any]
    metadata: dict[str, Any]
    extra: dict[str, Any]


class GivenScore(msgspec.Struct, frozen=True, kw_only=True):
    """One score; `value` null says that the webhook could not judge, `invalid_output` that the model's text is unreadable.

    Without `turn` it is about the one that was asked about.
    """

    index: int
    value: float | None
    turn: int | None = None
    turn_values: list[float | None] = []
    detail: str | None = None
    invalid_output: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """`version` of the webhook's own code, recorded with each score."""

    scores: list[GivenScore]
    version: str = ""


class WrongShape(Exception):
    """The answer is not what the contract says: none of it is used."""


def question(event: SamplesFinished, task: ScoringTask, spec: ScorerSpec, params: WebhookParams, id_: str,
             samples: Iterable[Sample]) -> Question:  # fmt: skip
    return Question(
        id=id_,
        tenant=event.tenant,
        run=event.run,
        group_id=event.group_id,
        scorer=spec.name,
        prompt=task.prompt_text,
        messages=task.messages,
        samples=[_asked(sample, path_of_task(task), ids=params.token_ids) for sample in samples],
        task=task.task,
        metadata=task.metadata,
        extra=params.extra,
    )


def _asked(sample: Sample, path: tuple[Sample, ...], *, ids: bool) -> AskedSample:
    return AskedSample(
        index=sample.index,
        turn=sample.turn,
        text=sample.text,
        content=sample.parsed.content if sample.parsed is not None else None,
        tokens=len(sample.token_ids),
        finish_reason=sample.finish_reason.value if sample.finish_reason is not None else None,
        token_ids=list(sample.token_ids) if ids else None,
        turns=[turn.turn for turn in path] or None,
    )


def read_answer(body: bytes, asked: Iterable[tuple[int, int]]) -> tuple[dict[tuple[int, int], GivenScore], str]:
    """Scores by (index, turn) and the webhook's version; raises WrongShape.

    An answer that names a sample twice, or one that was not asked about, may have shifted the others:
    none of its scores is taken.  A sample that is left out has no score.
    """
    try:
        answer = msgspec.json.decode(body, type=Answer)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WrongShape(f"the webhook's answer: {error}") from None
    known, found = set(asked), dict[tuple[int, int], GivenScore]()
    turns = dict(sorted(known, reverse=True))
    for score in answer.scores:
        key = (score.index, turns.get(score.index, 0) if score.turn is None else score.turn)
        if key not in known:
            raise WrongShape(f"the webhook's answer has a score for index {score.index}, which was not asked about")
        if key in found:
            raise WrongShape(f"the webhook's answer has two scores for index {score.index}")
        if len(score.turn_values) > MAX_TURNS:
            raise WrongShape(f"the webhook's answer has {len(score.turn_values)} turn values, more than {MAX_TURNS}")
        if not all(value is None or math.isfinite(value) for value in (score.value, *score.turn_values)):
            raise WrongShape(f"the webhook's answer has a number that is not finite for index {score.index}")
        found[key] = score
    return found, answer.version


def secret_key(text: str) -> bytes:
    """The key behind `whsec_<base64>`; any other text is the key itself."""
    if not text.startswith(SECRET_PREFIX):
        return text.encode()
    try:
        return base64.b64decode(text.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a webhook secret that begins with {SECRET_PREFIX} is not base64 behind it") from error


def signed_headers(id_: str, body: bytes, at: int, key: bytes | None) -> dict[str, str]:
    """Headers of the Standard Webhooks specification; the signature only with a key."""
    headers = {"webhook-id": id_, "webhook-timestamp": str(at)}
    if key is not None:
        digest = hmac.new(key, f"{id_}.{at}.".encode() + body, hashlib.sha256).digest()
        headers["webhook-signature"] = "v1," + base64.b64encode(digest).decode()
    return headers
