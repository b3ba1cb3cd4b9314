"""The engine with one safeguard taken out, whose tests must then fail, or failing at a chosen moment."""

from __future__ import annotations

from typing import Any

from rollgrid_sampler.engines.vllm_extension import WeightsExtension

EXTENSION = "tests.integration.sampler.flawed_engine.SwitchedExtension"


class SwitchedExtension(WeightsExtension):
    """As the real one until it is told otherwise."""

    left = False
    torn = False

    def t_tear(self, torn: bool) -> None:
        """Exchanges of weights are to fail when they have begun."""
        self.torn = torn

    def rg_exchange(self) -> None:
        super().rg_exchange()
        if self.torn:
            raise RuntimeError("torn")

    def t_leave_head(self, left: bool) -> None:
        """The output head is not to be packed again."""
        self.left = left

    def rg_repair_tied_head(self, model: Any = None) -> int:
        return 0 if self.left else super().rg_repair_tied_head(model)


class Forgetful:
    """An AsyncLLM whose pauses clear nothing and which is told of no salt and of no adapter's own name."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.engine_core = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=False)

    def generate(self, inputs: Any, *args: Any, lora_request: Any = None, **options: Any) -> Any:
        inputs.pop("cache_salt", None)
        if lora_request is not None:
            lora_request.lora_name = lora_request.lora_path = "the-policy"
        return self._llm.generate(inputs, *args, lora_request=lora_request, **options)
