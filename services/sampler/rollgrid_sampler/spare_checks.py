"""Now and then a version that was applied to the running engine is loaded cold beside it, to prove it.

One at a time, and of those that wait the newest: older ones answer nothing any more.
"""

from __future__ import annotations

import asyncio

from rollgrid_contracts.checkpoints import CheckpointKind
from rollgrid_runtime.logging import get_logger

from .cold_check import ColdCheckFailed, ColdChecks
from .engines.base import Engine
from .fingerprints import Finding
from .folders import Folders, Staged
from .proofs import Proofs
from .settings import EngineKind, SamplerSettings

log = get_logger(__name__)


class SpareChecks:
    """Call `applied` for each such version; `run` checks them."""

    def __init__(self, engine: Engine, folders: Folders, proofs: Proofs, settings: SamplerSettings) -> None:
        self._engine, self._folders, self._proofs, self._settings = engine, folders, proofs, settings
        self._checks: ColdChecks | None = None
        self._waiting: asyncio.Queue[Staged] = asyncio.Queue(1)

    def applied(self, staged: Staged) -> None:
        self._checks = self._checks or make_cold_checks(self._settings, self._engine.facts.fingerprint_class)
        if self._checks is None or not self._checks.due():
            return
        if self._waiting.full():
            self._waiting.get_nowait()
        self._waiting.put_nowait(staged)

    async def run(self) -> None:
        """Until cancelled.  Raises Quarantined."""
        while True:
            staged = await self._waiting.get()
            full, adapter = staged.folder, None
            base = self._engine.loaded.version
            if staged.kind is CheckpointKind.LORA:
                full, adapter = self._folders.at_hand(base), staged.folder
            if self._checks is None or full is None:
                continue
            try:
                with self._folders.kept({staged.version, base}):
                    found = await self._checks.cold_fingerprint(staged.version, full, adapter)
            except ColdCheckFailed as error:
                log.warning("not_checked_cold", version=staged.version, error=error.message)
                continue
            await self._proofs.checked(Finding(staged.version, found, cold=True, digest=staged.digest))


def make_cold_checks(settings: SamplerSettings, engine_class: str) -> ColdChecks | None:
    """Those of the configured engine; None where there is nothing to load beside it."""
    match settings.engine:
        case EngineKind.VLLM:
            return ColdChecks(settings, engine_class)
        case EngineKind.SCRIPTED:
            from .engines.scripted import ScriptedColdChecks

            return ScriptedColdChecks(settings, engine_class)
        case EngineKind.OPENAI_HTTP:
            return None
