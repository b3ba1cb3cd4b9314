"""The engine that the settings name, and the proof that it works."""

from __future__ import annotations

import asyncio

from rollgrid_contracts.jobs import SamplingParams
from rollgrid_runtime.errors import RollgridError

from rollgrid_sampler.settings import EngineKind, SamplerSettings

from .base import Engine, EngineDead, GenerationRequest


def make_engine(settings: SamplerSettings) -> Engine:
    """The configured engine; only its own module is imported."""
    match settings.engine:
        case EngineKind.VLLM:
            from .vllm import VllmEngine

            return VllmEngine(settings)
        case EngineKind.SCRIPTED:
            from .scripted import ScriptedEngine

            return ScriptedEngine(settings)
        case EngineKind.OPENAI_HTTP:
            from .openai_http import OpenAIEngine

            return OpenAIEngine(settings)


async def prove(engine: Engine, timeout_s: float) -> None:
    """Ready means that a real token came out.  Raises EngineDead."""
    request = GenerationRequest(
        request_id="readiness",
        sample="readiness",
        index=0,
        prompt_token_ids=[1],
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
    )
    try:
        async with asyncio.timeout(timeout_s):
            result = await engine.generate(request)
    except (TimeoutError, RollgridError) as error:
        raise EngineDead(f"the engine does not generate: {error!r}") from error
    if len(result.token_ids) != 1:
        raise EngineDead(f"the engine gave {len(result.token_ids)} tokens instead of one")
