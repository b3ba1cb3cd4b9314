"""The attached engine on a real vLLM server: ids in, ids out, logprobs a trainer can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from rollgrid_contracts.jobs import SamplingParams, VersionSpan
from rollgrid_contracts.samples import FinishReason
from rollgrid_sampler.engines.base import Delta, GenerationRequest, Sent
from rollgrid_sampler.engines.openai_http import OpenAIEngine
from rollgrid_sampler.settings import EngineKind, SamplerSettings
from rollgrid_sampler.streaming import joined

from tests.e2e.reference import worst_difference
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.vllm_server import READY_S, VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]
MODEL = TinyModel(context=512)
PROMPT = [1, 40, 41, 42, 43]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with VllmServer(tiny_model(MODEL), tmp_path_factory.mktemp("vllm"), ["tiny"]) as process:
        yield process.start().wait_ready(READY_S)


async def test_A26_an_attached_vllm_server_gives_ids_and_logprobs(server: VllmServer) -> None:
    engine = OpenAIEngine(SamplerSettings(engine=EngineKind.OPENAI_HTTP, openai_url=server.url))
    await engine.start(0, None)
    await engine.health()
    assert engine.facts.max_model_len == MODEL.context

    async def generate(index: int, **sampling: Any) -> tuple[list[int], FinishReason | None]:
        params = SamplingParams(**{"max_tokens": 12, "temperature": 0.7, **sampling})
        request = GenerationRequest(
            request_id=f"r{index}",
            sample=f"s.{index}",
            index=index,
            prompt_token_ids=PROMPT,
            sampling=params,
            seed=2**62 + index,
        )
        result = await engine.generate(request)
        got = list(result.logprobs)
        assert worst_difference(tiny_model(MODEL), PROMPT, result.token_ids, got, params.temperature) < 1e-4
        return result.token_ids, result.finish_reason

    ids, reason = await generate(0, ignore_eos=True)
    assert (len(ids), reason) == (12, FinishReason.LENGTH)
    assert await generate(0, ignore_eos=True) == (ids, reason)
    assert await generate(1, ignore_eos=True) != (ids, reason)
    await check_streams(engine)
    stopped, reason = await generate(0, ignore_eos=True, stop_token_ids=(ids[4],))
    assert (stopped, reason) == (ids[: ids.index(ids[4]) + 1], FinishReason.STOP)
    await engine.close()


async def check_streams(engine: OpenAIEngine) -> None:
    """Portions join to what is not streamed; behind sent tokens it continues; the prompt's logprobs are its own."""
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=2, prompt_logprobs=1)
    asked = GenerationRequest(request_id="s", sample="s.0", index=0, prompt_token_ids=PROMPT, sampling=sampling)
    plain = await engine.generate(asked)
    told: list[Delta] = []
    result = await engine.generate(asked, told.append)
    assert len(told) > 5
    whole = joined(told)
    for field in ("token_ids", "logprobs", "top_logprobs", "text", "finish_reason", "prompt_logprobs"):
        assert getattr(result, field) == getattr(plain, field), field
    assert whole.token_ids == result.token_ids[: len(whole.token_ids)]
    assert result.text.startswith(whole.text)
    found = result.prompt_logprobs
    assert found is not None
    assert worst_difference(tiny_model(MODEL), PROMPT[:1], PROMPT[1:], found.logprobs.tolist(), 1.0) < 1e-4
    cut = next(n for n in range(5, 20) if not joined(told[:n]).text.endswith("\N{REPLACEMENT CHARACTER}"))
    sent = Sent(
        token_ids=result.token_ids[:cut],
        logprobs=result.logprobs[:cut],
        version_spans=(VersionSpan(version=0, start=0, end=cut),),
    )
    again: list[Delta] = []
    resumed = await engine.generate(msgspec.structs.replace(asked, sent=sent), again.append)
    assert resumed.resumed_from in (cut, 0), "0 = the server could not spell the sent part to a whole character"
    assert (resumed.token_ids, resumed.text) == (result.token_ids, result.text)
    assert again[0].offset == resumed.resumed_from
    scored = await engine.generate(
        msgspec.structs.replace(asked, sampling=msgspec.structs.replace(sampling, max_tokens=0))
    )
    assert (scored.token_ids, scored.prompt_logprobs) == ([], plain.prompt_logprobs)
