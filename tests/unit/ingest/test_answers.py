"""Samples as the JSON that real clients read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Rights, SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason, Sample, SampleStatus, TopLogprobs
from rollgrid_ingest.answers import completion_answer, generate_answer
from rollgrid_ingest.openai_schema import CompletionRequest, GenerateRequest, GenerateSampling
from rollgrid_ingest.replies import Collected, refuse_failed
from rollgrid_ingest.submission import Accepted, GroupSpec, Submission
from rollgrid_rendering.renderer import Renderer
from rollgrid_runtime.errors import RollgridError

from tests.support.policies import policy_state
from tests.support.tiny_models import TinyModel, tiny_model


@pytest.fixture(scope="module")
def folder() -> Path:
    return tiny_model(TinyModel())


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return Renderer.load(folder)


def submission(prompts: int, n: int) -> Submission:
    policy = policy_state(policy="tiny", max_model_len=64)
    group = GroupSpec(
        prompt_token_ids=TokenIds.of([7, 8, 9]), n=n, sampling=SamplingParams(max_tokens=5), deadline_s=1.0
    )
    return Submission(
        tenant="t", run="r", policy=policy, model="tiny", groups=(group,) * prompts, digest="", key="k", rights=Rights()
    )


def accepted(of: Submission) -> Accepted:
    return Accepted(batch_id="b", run="r", cursor=0, group_ids=tuple(of.group_ids), deadline=0.0, fresh=True, job_seq=1)


def sample(index: int, **changes: Any) -> Sample:
    top = TopLogprobs(
        offsets=TokenIds.of([0, 2, 2]), token_ids=TokenIds.of([20 + index, 40]), logprobs=Floats.of([-0.5, -2.5])
    )
    base = Sample(
        index=index,
        status=SampleStatus.SUCCEEDED,
        token_ids=TokenIds.of([20 + index, 2]),
        logprobs=Floats.of([-0.5, -1.5]),
        top_logprobs=top,
        text=f"text{index}",
        finish_reason=FinishReason.STOP,
        version_spans=(VersionSpan(version=3, start=0, end=2),),
        seed=2**62,
    )
    return msgspec.structs.replace(base, **changes)


def collected(of: Submission) -> Collected:
    found = Collected(dict.fromkeys(of.group_ids, of.groups[0].n))
    for group_id in reversed(of.group_ids):
        for index in reversed(range(of.groups[0].n)):
            found.add(group_id, sample(index))
    return found


def test_completion_choices_are_prompt_major_with_ids_and_logprobs(renderer: Renderer) -> None:
    asked = submission(2, 2)
    request = CompletionRequest(
        prompt="x", logprobs=1, return_token_ids=True, return_tokens_as_token_ids=True, max_tokens=5
    )
    answer = completion_answer(request, asked, accepted(asked), collected(asked), renderer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.sample_id for choice in answer.choices] == [
        f"{group}.{index}" for group in asked.group_ids for index in (0, 1)
    ]
    choice = answer.choices[1]
    assert choice.token_ids == [21, 2]
    assert choice.prompt_token_ids == [7, 8, 9]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["token_id:21", "token_id:2"]
    assert choice.logprobs.token_logprobs == [-0.5, -1.5]
    assert choice.logprobs.top_logprobs == [{"token_id:21": -0.5, "token_id:40": -2.5}, {"token_id:2": -1.5}]
    assert choice.finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 8)


def test_completion_without_logprobs_or_ids(renderer: Renderer) -> None:
    asked = submission(1, 1)
    answer = completion_answer(CompletionRequest(prompt="x"), asked, accepted(asked), collected(asked), renderer)
    choice = msgspec.to_builtins(answer)["choices"][0]
    assert choice["logprobs"] is None
    assert choice["text"] == "text0"
    assert "token_ids" not in choice


def test_completion_tokens_are_decoded_when_ids_were_not_asked_for(renderer: Renderer) -> None:
    asked = submission(1, 1)
    answer = completion_answer(
        CompletionRequest(prompt="x", logprobs=0), asked, accepted(asked), collected(asked), renderer
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == renderer.pieces([20, 2])
    assert logprobs.text_offset == [0, len(logprobs.tokens[0])]


def test_generate_logprobs_carry_both_forms_of_the_id(renderer: Renderer) -> None:
    asked = submission(1, 2)
    request = GenerateRequest(token_ids=[7], sampling_params=GenerateSampling(logprobs=1), request_id="mine")
    answer = msgspec.to_builtins(generate_answer(request, asked, accepted(asked), collected(asked), "other", renderer))
    assert answer["request_id"] == "mine"
    assert answer["prompt_token_ids"] == [7, 8, 9]
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["token_id"], first["logprob"]) == ("token_id:20", 20, -0.5)
    assert [(top["token"], top["token_id"]) for top in first["top_logprobs"]] == [
        ("token_id:20", 20),
        ("token_id:40", 40),
    ]
    assert answer["choices"][1]["weight_versions"] == [{"version": 3, "start": 0, "end": 2}]
    assert answer["choices"][1]["seed"] == 2**62


def test_the_first_answer_for_an_index_stands_and_strangers_are_ignored() -> None:
    found = Collected({"g": 2})
    found.add("g", sample(0, text="first"))
    found.add("g", sample(0, text="second"))
    found.add("g", sample(2))
    found.add("h", sample(1))
    assert not found.complete.is_set()
    assert found.incomplete() == ["g"]
    found.add("g", sample(1))
    assert found.complete.is_set()
    assert [each.text for each in found.samples("g")] == ["first", "text1"]


@pytest.mark.parametrize(
    ("broken", "code", "status"),
    [
        ({"status": SampleStatus.EXPIRED}, ErrorCode.EXPIRED, 504),
        ({"status": SampleStatus.CANCELLED}, ErrorCode.CANCELLED, 499),
        ({"status": SampleStatus.FAILED}, ErrorCode.ENGINE_ERROR, 502),
        (
            {"status": SampleStatus.FAILED, "error": ErrorInfo(code=ErrorCode.POISON, message="three starts")},
            ErrorCode.POISON,
            500,
        ),
        ({"token_ids": TokenIds(), "logprobs": Floats()}, ErrorCode.EMPTY_COMPLETION, 502),
    ],
)
def test_a_failed_or_empty_sample_is_never_a_success(broken: dict[str, Any], code: ErrorCode, status: int) -> None:
    refuse_failed([sample(0)])
    with pytest.raises(RollgridError) as refused:
        refuse_failed([sample(0), sample(1, **broken)])
    assert refused.value.code is code
    assert refused.value.http_status == status
