"""The spare weights of vLLM's workers, seen from this process: made at the start, filled beside generation, taken.

See `vllm_double_buffer` for what the workers do.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rollgrid_runtime.logging import get_logger

from rollgrid_sampler.settings import SamplerSettings

log = get_logger(__name__)
FIRST_LOOK_S, LAST_LOOK_S = 0.005, 0.25
"""A load is asked after so soon and, at last, so seldom: each question comes between two steps."""
BESIDE_S = 30.0
"""A load that generation leaves no core for is helped along after so long: generation makes room for it,"""
HELP_S = 0.05
"""so long between any two steps."""


class SpareWeights:
    """`made`: there is a place for weights that are loaded beside generation."""

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self._filled: tuple[int, Path] | None = None
        self.made = False
        self.filled_s = 0.0
        """What the last load took, and for how much of it generation made room."""
        self.helped_s = 0.0

    async def make(self, llm: Any) -> None:
        """Where they are wanted and the model is made for them."""
        if not self._settings.double_buffer or self._settings.device != "cpu":
            return
        reasons = [one for one in await llm.collective_rpc("rg_double_buffer") if one]
        self.made = not reasons
        if reasons:
            log.warning("weights_load_in_place", reason=reasons[0])

    async def fill(self, llm: Any, version: int, folder: Path) -> None:
        """Read, merge and pack the weights while generation goes on, unless it is done.

        Raises TimeoutError, RuntimeError.
        """
        if not self.made or self._filled == (version, folder):
            return
        self._filled, self.helped_s, begun, look_s = None, 0.0, time.monotonic(), FIRST_LOOK_S
        async with asyncio.timeout(self._settings.start_timeout_s):
            await llm.collective_rpc("rg_prepare", args=(str(folder),))
            while None in (outcomes := await self._outcomes(llm, 0.0)) and time.monotonic() - begun < BESIDE_S:
                await asyncio.sleep(look_s)
                look_s = min(1.5 * look_s, LAST_LOOK_S)
            while None in outcomes:
                outcomes = await self._outcomes(llm, HELP_S)
                self.helped_s += HELP_S
        if wrong := [one for one in outcomes if one]:
            raise RuntimeError(f"not loaded: {wrong[0]}")
        self._filled, self.filled_s = (version, folder), time.monotonic() - begun

    async def _outcomes(self, llm: Any, wait_s: float) -> list[str | None]:
        async with asyncio.timeout(self._settings.engine_timeout_s):
            found: list[str | None] = await llm.collective_rpc("rg_prepared", args=(wait_s,))
        return found

    def take(self) -> bool:
        """Whether they are filled; they are then no more."""
        filled, self._filled = self._filled, None
        return filled is not None
