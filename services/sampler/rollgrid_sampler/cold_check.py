"""What a version's fingerprint is in a process that held nothing before it: a spare engine, loaded once.

    python -m rollgrid_sampler.cold_check FOLDER [--adapter FOLDER]

runs with the sampler's own settings (`ROLLGRID_SAMPLER_…`), in one process at the lowest priority, and
prints one JSON line.  `ColdChecks` runs it beside a serving engine.  It ends with its sampler.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import msgspec
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import get_logger

from . import lifeline
from .settings import SamplerSettings

log = get_logger(__name__)
LOWEST = 19
STDERR_KEPT = 2000
"""Characters of a failed check's own words that go into its error."""


class ColdCheckFailed(RollgridError):
    """No verdict: the spare process did not answer, or as another class of engine."""

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.ENGINE_UNAVAILABLE, message, boundary=Boundary.ENGINE)


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the process prints.  `fingerprint` is the adapter's if there is one."""

    fingerprint: str
    base_fingerprint: str
    fingerprint_class: str


class ColdChecks:
    """Spare engines, one at a time.  `engine_class` is the serving engine's `fingerprint_class`."""

    def __init__(self, settings: SamplerSettings, engine_class: str) -> None:
        self._settings, self._class = settings, engine_class
        self._one = asyncio.Lock()
        self._seen = 0

    def due(self) -> bool:
        """Called once for each version that was applied: whether this one is to be checked."""
        self._seen += 1
        every = self._settings.cold_checks
        return every > 0 and self._seen % every == 0

    async def cold_fingerprint(self, version: int, folder: Path, adapter_folder: Path | None = None) -> str:
        """The fingerprint of `folder`, or of the adapter on it.  Raises ColdCheckFailed."""
        async with self._one:
            try:
                async with asyncio.timeout(self._settings.cold_check_timeout_s):
                    found = await self._run(folder, adapter_folder)
            except TimeoutError as error:
                limit = self._settings.cold_check_timeout_s
                raise ColdCheckFailed(f"the cold check of version {version} took more than {limit} s") from error
        if found.fingerprint_class != self._class:
            raise ColdCheckFailed(f"the cold check ran as class {found.fingerprint_class}, the engine is {self._class}")
        log.info("checked_cold", version=version, fingerprint=found.fingerprint)
        return found.fingerprint

    async def _run(self, folder: Path, adapter_folder: Path | None) -> Found:
        argv = [sys.executable, "-m", "rollgrid_sampler.cold_check", str(folder)]
        if adapter_folder is not None:
            argv += ["--adapter", str(adapter_folder)]
        environment = os.environ | self._settings_environment()
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*argv, env=environment, stdout=pipe, stderr=pipe)
        try:
            out, words = await child.communicate()
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()
        if child.returncode != 0:
            said = words.decode(errors="replace")[-STDERR_KEPT:]
            raise ColdCheckFailed(f"the cold check ended with {child.returncode}: {said}")
        try:
            return msgspec.json.decode(out, type=Found)
        except msgspec.DecodeError as error:
            raise ColdCheckFailed(f"the cold check answered {out[:200]!r}") from error

    def _settings_environment(self) -> dict[str, str]:
        """The engine's settings, where they did not come from the environment."""
        settings = self._settings
        named = {name: str(value) for name in COMPARED if (value := getattr(settings, name)) is not None}
        found = {f"ROLLGRID_SAMPLER_{name.upper()}": value for name, value in named.items()}
        if settings.cold_check_gpus is not None:
            found["CUDA_VISIBLE_DEVICES"] = settings.cold_check_gpus
        return found


COMPARED = (
    "dtype",
    "device",
    "max_model_len",
    "slots",
    "kv_cache_bytes",
    "omp_threads_bind",
    "block_size",
    "tensor_parallel",
    "gpu_memory",
    "max_loras",
    "max_lora_rank",
    "max_cpu_loras",
)
"""Settings that an engine's arithmetic or its memory follows."""


def find(settings: SamplerSettings, folder: Path, adapter_folder: Path | None) -> Found:
    """Load once, in this process, and take the fingerprints."""
    from .engines.vllm_options import engine_class, engine_options, make_probes, set_environment

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    set_environment(settings)
    import vllm
    from vllm.lora.request import LoRARequest

    options = engine_options(settings, folder) | {"disable_log_stats": True}
    if settings.device == "cpu":  # as the serving engine: the worker alone is bound to its cores, and so many threads
        options["distributed_executor_backend"] = "mp"
    engine = vllm.LLM(**options)
    probes = make_probes(engine.model_config.get_vocab_size(), engine.model_config.max_model_len)
    base = engine.collective_rpc("rg_fingerprint", args=(probes,))[0]
    found = base
    if adapter_folder is not None:
        lora = LoRARequest("cold", 1, str(adapter_folder))
        engine.llm_engine.add_lora(lora)
        found = engine.collective_rpc("rg_fingerprint", args=(probes, ("cold", 1, str(adapter_folder))))[0]
    parts = engine.collective_rpc("rg_class")
    return Found(fingerprint=found, base_fingerprint=base, fingerprint_class=engine_class(settings, parts, probes))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a staged version's full weights")
    parser.add_argument("--adapter", type=Path, help="a staged LoRA version on them")
    chosen = parser.parse_args()
    lifeline.bind_to_parent()
    os.nice(LOWEST)
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # vLLM and its workers write to stdout what they have to say
        found = find(SamplerSettings(), chosen.folder, chosen.adapter)
        answer.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
