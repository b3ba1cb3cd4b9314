"""What of a streamed group its caller has already, and whether generation may continue behind it.

A worker that takes over asks whoever streams the group.  Nobody answers: of a session's turn it goes on behind what
its earlier owner kept (`partials`), else everything starts again, and whoever forwards the stream sees that the
record is not what was sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Awaitable, Callable

import msgspec
from rollgrid_contracts import subjects
from rollgrid_contracts.jobs import (
    Reply,
    Resume,
    SampleGroup,
    SamplingParams,
    VersionRule,
    VersionSpan,
    WeightConstraint,
)
from rollgrid_contracts.samples import StreamQuery, StreamState
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import BusError
from rollgrid_runtime.logging import get_logger

from . import metrics
from .engines.base import Sent

log = get_logger(__name__)
ANSWER_S = 1.0
"""How long whoever streams may take to answer."""


def continuable(sampling: SamplingParams) -> bool:
    """Whether a continuation behind given tokens is distributed as if it had never been interrupted.

    Penalties, `min_tokens`, bad words and a grammar depend on which tokens were generated and which
    belong to the prompt, and the engine would take all for the prompt.
    """
    return (
        sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
        and sampling.repetition_penalty == 1
        and sampling.min_tokens == 0
        and sampling.structured_output is None
        and not sampling.logit_bias
        and not sampling.bad_words
    )


def allowed(constraint: WeightConstraint, spans: tuple[VersionSpan, ...]) -> bool:
    """Whether every token's version keeps a constraint that names versions."""
    match constraint.rule:
        case VersionRule.EXACT:
            return all(span.version == constraint.value for span in spans)
        case VersionRule.MIN:
            return all(span.version >= constraint.value for span in spans)
        case _:
            return True


def usable(job: SampleGroup, resume: Resume) -> Sent | None:
    """The tokens to continue behind; None where the sample must start again."""
    tokens = len(resume.token_ids)
    whole = len(resume.logprobs) == tokens and _cover(resume.spans, tokens)
    if not tokens or not whole or not continuable(job.sampling) or not allowed(job.weights, resume.spans):
        return None
    return Sent(
        token_ids=resume.token_ids.tolist(),
        logprobs=array("f", resume.logprobs.tolist()),
        version_spans=resume.spans,
    )


def _cover(spans: tuple[VersionSpan, ...], tokens: int) -> bool:
    """Whether the spans are adjacent from 0 to `tokens`."""
    starts = [0, *(span.end for span in spans[:-1])]
    return bool(spans) and [span.start for span in spans] == starts and spans[-1].end == tokens


async def sent_before(
    bus: Bus, job: SampleGroup, *, taken_over: bool, kept: Callable[[], Awaitable[Resume | None]]
) -> dict[int, Sent]:
    """By index, what each sample continues behind.  Asks only for what another worker may have begun.

    What a client has of a stream is gone on from, and nothing else, whatever was `kept`.
    """
    found = {resume.index: resume for resume in job.resume}
    source = "job"
    if taken_over:
        state = await _streamed(bus, job) if job.reply is Reply.STREAM else None
        if state is not None:
            source = "stream"
            found |= {resume.index: resume for resume in state.sent}
        elif (partial := await kept()) is not None:
            source = "partial"
            found[partial.index] = partial
    usables = {index: usable(job, resume) for index, resume in found.items()}
    sent = {index: sent for index, sent in usables.items() if sent is not None}
    metrics.RESUMED_TOKENS.labels(source).inc(sum(len(one.token_ids) for one in sent.values()))
    return sent


async def _streamed(bus: Bus, job: SampleGroup) -> StreamState | None:
    """What whoever streams the job has sent on; None when nobody answers."""
    try:
        query = StreamQuery(group_id=job.call_id)
        return await bus.request(subjects.resume(job.call_id), query, StreamState, ANSWER_S)
    except BusError as error:
        log.info("stream_starts_again", group=job.group_id, error=error.message)
    except msgspec.DecodeError as error:
        log.warning("stream_state_undecodable", group=job.group_id, error=repr(error))
    return None
