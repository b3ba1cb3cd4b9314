"""Streamed samples on the scripted engine through a real nats-server: frames, resume, kills."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import (
    ParsingSpec,
    Priority,
    Reply,
    Resume,
    SampleGroup,
    SamplingParams,
    VersionRule,
    VersionSpan,
    WeightConstraint,
)
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus
from rollgrid_contracts.subjects import PoolLane
from rollgrid_runtime.settings import NatsSettings, S3Settings
from rollgrid_sampler.engines.script import sample_key, script, spell, weights_digest

from tests.support.servers import scratch
from tests.support.tiny_models import tiny_model

from .frames import check_same, joined, listening, until
from .stage import POOL, Stage, make_job, sampler
from .test_kills import process


def stream_job(name: str, n: int = 1, *, sampling: SamplingParams | None = None, **changes: Any) -> SampleGroup:
    sampling = sampling or SamplingParams(max_tokens=40, seed=9, ignore_eos=True)
    return make_job(name, n=n, sampling=sampling, reply=Reply.STREAM, priority=Priority.INTERACTIVE, **changes)


def scripted_tokens(job: SampleGroup, index: int, tokens: int) -> tuple[list[int], Any]:
    """What the engine gives at positions [0, tokens), whoever samples them and wherever they were joined."""
    assert job.sampling.seed is not None
    seed = ids.sample_seed(job.sampling.seed, index)
    key = sample_key(weights_digest(None), ids.sample_id(job.group_id, index), index, seed)
    found, logprobs = script(key, 0, tokens, 512, 2, 0.01)
    return found.tolist(), logprobs


def check_scripted(job: SampleGroup, index: int, sample: Sample) -> None:
    tokens, logprobs = scripted_tokens(job, index, len(sample.token_ids))
    assert sample.token_ids.tolist() == tokens
    assert np.array_equal(np.frombuffer(sample.logprobs.packed, "<f4"), logprobs)


@pytest.mark.parametrize("rate", [0.0, 300.0])
async def test_frames_are_the_record_and_the_reply_follows_them(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings, rate: float
) -> None:
    """A14: offsets adjacent, text, logprobs, alternatives and spans as recorded; the finish is durable first."""
    sampling = SamplingParams(max_tokens=60, seed=3, logprobs=3)
    job = stream_job("frames", n=3, sampling=sampling)
    async with listening(stage.bus, job.group_id) as stream, sampler(nats_settings, s3, scripted_token_rate=rate):
        await stage.submit(job)
        await until(lambda: len(stream.replies) == 3)
        recorded = await stage.samples(job.group_id)
        assert stream.asked == 0, "a first delivery has nothing to ask for"
    for index, sample in recorded.items():
        assert stream.replies[index] == sample
        check_same(stream.frames[index], sample)
        check_scripted(job, index, sample)
        assert stream.order.index(f"reply {index}") > max(
            at for at, what in enumerate(stream.order) if what == f"frame {index}"
        )
        if rate:
            assert len(stream.frames[index]) > 2
            assert len(stream.frames[index][0].token_ids) < len(sample.token_ids) // 2


async def test_a_stop_string_never_shows_in_a_frame(stage: Stage, nats_settings: NatsSettings, s3: S3Settings) -> None:
    plain = stream_job("plain")
    tokens, _ = scripted_tokens(plain, 0, 40)
    text = spell(np.array(tokens, np.uint32))
    stop = text[20:24]
    assert text.index(stop) == 20
    job = stream_job("plain", sampling=SamplingParams(max_tokens=40, seed=9, ignore_eos=True, stop=(stop, "nowhere")))
    async with listening(stage.bus, job.group_id) as stream, sampler(nats_settings, s3, scripted_token_rate=300.0):
        await stage.submit(job)
        await until(lambda: stream.replies)
    sample = stream.replies[0]
    assert (sample.finish_reason, sample.stop_reason, sample.text) == (FinishReason.STOP, stop, text[:20])
    check_same(stream.frames[0], sample)


class Takeover(NamedTuple):
    """A job whose client has tokens already; from where the sample must go on, and how it must end."""

    sent: int
    resumed: int
    tokens: int = 40
    version: int = 0
    sampling: Mapping[str, Any] = MappingProxyType({})
    job: Mapping[str, Any] = MappingProxyType({})
    known: bool = True


TAKEOVERS = {
    "continues": Takeover(17, 17, version=5),
    "whole": Takeover(40, 40),
    "stopped": Takeover(24, 24, tokens=24, sampling={"stop": ("stop here",)}),
    "penalised": Takeover(17, 0, sampling={"presence_penalty": 0.5}),
    "other weights": Takeover(17, 0, version=5, job={"weights": WeightConstraint(rule=VersionRule.EXACT, value=0)}),
    "silent": Takeover(17, 0, known=False),
}


async def test_a_job_taken_over_continues_behind_what_was_sent(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """I2, I6: exactly behind the sent tokens where that is exact, else from zero with resumed_from 0."""
    tokens, logprobs = scripted_tokens(stream_job("any"), 0, 40)
    text = spell(np.array(tokens, np.uint32))
    async with sampler(nats_settings, s3):
        for name, case in TAKEOVERS.items():
            changes = {**case.sampling, **({"stop": (text[20:24],)} if "stop" in case.sampling else {})}
            sampling = SamplingParams(max_tokens=40, seed=9, ignore_eos=True, **changes)
            known = Resume(
                index=0,
                token_ids=TokenIds.of(tokens[: case.sent]),
                logprobs=Floats(logprobs[: case.sent].tobytes()),
                spans=(VersionSpan(version=case.version, start=0, end=case.sent),),
            )
            resume = (known,) if case.known else ()
            job = stream_job(name.replace(" ", ""), sampling=sampling, resume=resume, **case.job)
            async with listening(stage.bus, job.group_id, answer=False) as stream:
                await stage.submit(job)
                await stream.replied(1)
            sample = stream.replies[0]
            assert sample.resumed_from == case.resumed, name
            check_scripted(job, 0, sample)
            assert len(sample.token_ids) == case.tokens, name
            assert sample.text == (text[:20] if "stop" in case.sampling else text), name
            both = [(5, 0, 17), (0, 17, 40)]
            spans = [(s.version, s.start, s.end) for s in sample.version_spans]
            assert spans == (both if name == "continues" else [(0, 0, case.tokens)]), name
            told = stream.frames[0]
            if case.resumed == case.tokens:
                assert told == [], "nothing was left to tell"
                continue
            whole = joined(told)
            assert whole.offset == case.resumed
            assert whole.token_ids.tolist() == tokens[case.resumed :]
            assert whole.text == text[case.resumed :]


@pytest.mark.timeout(120)
async def test_killed_in_mid_stream_another_worker_continues_from_the_sent_tokens(
    stage: Stage, stack_env: dict[str, str]
) -> None:
    """I2, I6: SIGKILL; the client sees every token once, in order, and the record equals what it saw."""
    stage.bus.settings.ack_wait_s = 1.5
    sampling = SamplingParams(max_tokens=120, seed=21, ignore_eos=True, logprobs=2)
    job = stream_job("killed", n=3, sampling=sampling)
    rate = {"ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": "60"}
    with scratch("one") as one, scratch("two") as two:
        with process(one, stack_env, **rate) as first, process(two, stack_env, **rate) as second:
            first.start().wait_ready(20)
            async with listening(stage.bus, job.group_id) as stream, stage.ledger():
                await stage.submit(job)
                await until(lambda: min((stream.tokens(i) for i in range(3)), default=0) >= 20)
                first.kill()
                before = {index: stream.tokens(index) for index in range(3)}
                second.start().wait_ready(20)
                await until(lambda: len(stream.replies) == 3, 40)
                await stage.clean(PoolLane(POOL, Priority.INTERACTIVE, "acme"))
                recorded = await stage.samples(job.group_id)
                assert stream.asked >= 1
    for index, sample in recorded.items():
        assert stream.replies[index] == sample
        assert sample.resumed_from >= before[index] >= 20
        assert sample.attempt > 1
        assert {frame.attempt for frame in stream.frames[index]} == {1, sample.attempt}
        check_same(stream.frames[index], sample)
        check_scripted(job, index, sample)


async def test_prompt_logprobs_are_on_the_first_sample_only(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """C39: scoring alone is a success without tokens; a job that wants nothing at all is refused by name."""
    prompt = [5, 6, 7, 8]
    both = make_job("both", n=3, prompt=prompt, sampling=SamplingParams(max_tokens=4, prompt_logprobs=2))
    alone = make_job("alone", n=2, prompt=prompt, sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
    nothing = make_job("nothing", n=1, sampling=SamplingParams(max_tokens=0))
    async with sampler(nats_settings, s3):
        for job in (both, alone, nothing):
            await stage.submit(job)
        found = {job.group_id: await stage.finished(job) for job in (both, alone, nothing)}
    for job, alternatives in ((both, 2), (alone, 0)):
        samples = found[job.group_id]
        assert [samples[i].prompt_logprobs is not None for i in job.indexes] == [True] + [False] * (job.n - 1)
        asked = samples[0].prompt_logprobs
        assert asked is not None
        assert (len(asked.logprobs), len(asked.ranks), asked.mode) == (3, 3, "raw_logprobs")
        assert (len(asked.top.token_ids) if asked.top is not None else 0) == 3 * alternatives
    for sample in found[alone.group_id].values():
        assert (sample.status, sample.finish_reason) == (SampleStatus.SUCCEEDED, FinishReason.LENGTH)
        assert len(sample.token_ids) == 0
    refused = found[nothing.group_id][0].error
    assert refused is not None
    assert (refused.code, refused.field, refused.limit) == (ErrorCode.INVALID_REQUEST, "max_tokens", "1")


@pytest.mark.vllm
@pytest.mark.timeout(120)
async def test_parsed_samples_are_streamed_as_they_are_recorded(
    stage: Stage, nats_settings: NatsSettings, s3: S3Settings
) -> None:
    """Content and reasoning of the frames are the record's; a parser nobody knows fails the group by name."""
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
    spec = ParsingSpec(tool_parser="hermes", tools=(tool,))
    both = stream_job("parsed", n=2, parsing=spec)
    unknown = stream_job("unknown", parsing=ParsingSpec(tool_parser="nobody", tools=(tool,)))
    whole = make_job("whole", n=2, parsing=spec, sampling=both.sampling)
    async with sampler(nats_settings, s3, scripted_token_rate=200.0, model=tiny_model()):
        async with listening(stage.bus, both.group_id) as stream:
            for job in (both, unknown, whole):
                await stage.submit(job)
            await stream.replied(2, 90)
        refused, plain = await stage.finished(unknown), await stage.finished(whole)
    for index, sample in stream.replies.items():
        assert sample.parsed is not None
        assert sample.parsed.content
        check_same(stream.frames[index], sample)
        assert plain[index].parsed == sample.parsed, "streamed or not, the parse is the same"
    error = refused[0].error
    assert error is not None
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "parsing.tool_parser")
