"""Everything that configures a sampler (`ROLLGRID_SAMPLER_…`); see also the shared settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_runtime.settings import ServiceSettings

MIB = 1024 * 1024


class EngineKind(StrEnum):
    VLLM = "vllm"
    SCRIPTED = "scripted"
    OPENAI_HTTP = "openai_http"


class Fault(StrEnum):
    """What a fault drill does to a prompt that contains its token (scripted engine only)."""

    CRASH = "crash"
    """The sampler process is killed (SIGKILL), as by a poison job."""
    DIE = "die"
    """The engine reports that it is dead."""
    ERROR = "error"
    """This one request fails."""
    HANG = "hang"
    """The request never ends."""
    EMPTY = "empty"
    """The request ends without a token."""


class SamplerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_SAMPLER_", extra="ignore", protected_namespaces=())

    # what it serves
    policy: str = "default"
    tenant: str = Field(default="shared", description='owner of the policy; "shared" = every tenant may use it')
    model: Path | None = Field(default=None, description="Hugging Face folder of the base weights (version 0)")
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16|float16)$")
    device: str = Field(default="cpu", pattern="^(cpu|cuda)$")
    region: str = "local"
    engine: EngineKind = EngineKind.VLLM
    max_model_len: int | None = Field(default=None, ge=8, description="None = the model's own")

    # work
    slots: int = Field(default=32, ge=1, description="samples generated at once")
    ahead: int | None = Field(
        default=None, ge=0, description="samples handed to vLLM beyond its slots; None = an eighth of them, at least 1"
    )
    express: int | None = Field(
        default=None,
        ge=0,
        description="places for interactive samples when all slots are busy; None = an eighth of them",
    )
    prefetch: int = Field(default=2, ge=0, description="jobs held ready beyond the free slots, per lane")
    max_starts: int = Field(default=3, ge=1, description="recorded starts after which a job is poison")
    refuse_delay_s: float = Field(default=2.0, gt=0, description="delay of a refusal's nak, seconds")
    coalesce_s: float = Field(default=0.025, ge=0, description="finished samples of a group wait so long for others")
    coalesce_samples: int = Field(default=8, ge=1)
    stream_interval_s: float = Field(default=0.03, ge=0, description="a streamed sample's frames are so far apart")
    stream_tokens: int = Field(default=64, ge=1, description="tokens that make a frame go out at once")
    ledger_timeout_s: float = Field(default=1.0, gt=0)
    engine_timeout_s: float = Field(default=60.0, gt=0, description="an engine silent for so long is dead")

    # weights
    swap_mode: OnRefresh = OnRefresh.WAIT
    swap_deadline_s: float = Field(default=120.0, gt=0, description="a longer wait for running samples aborts them")
    cache: Path = Field(default=Path("~/.cache/rollgrid/versions"), description="downloaded versions")
    policy_wait_s: float = Field(default=10.0, ge=0, description="wait for the policy's desired version at start")

    # vLLM
    kv_cache_bytes: int = Field(default=256 * MIB, gt=0, description="KV cache on CPU; on GPU vLLM's own fraction")
    omp_threads_bind: str = Field(default="auto", description="VLLM_CPU_OMP_THREADS_BIND: cores of the engine")
    block_size: int | None = Field(default=None, description="KV block; None = vLLM's (128 on CPU)")
    max_logprobs: int = Field(default=20, ge=0)
    engine_stats: bool = Field(default=True, description="vLLM's own metrics, and the time of the first token")
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    start_timeout_s: float = Field(default=600.0, gt=0)

    # openai_http
    openai_url: str = "http://127.0.0.1:8000"
    openai_key: SecretStr | None = None
    openai_model: str | None = Field(default=None, description="None = the first the server lists")

    # scripted
    scripted_vocab: int = Field(default=512, ge=8)
    scripted_eos_id: int = 2
    scripted_eos_rate: float = Field(default=0.01, ge=0, le=1, description="chance that a token is EOS")
    scripted_latency_s: float = Field(default=0.0, ge=0, description="time to the first token")
    scripted_token_rate: float = Field(default=0.0, ge=0, description="tokens per second and sample; 0 = at once")
    scripted_faults: dict[int, Fault] = Field(default={}, description="fault drills: prompt token id → what it does")

    @property
    def express_places(self) -> int:
        """Places beside those, for interactive samples while all are taken."""
        return max(1, self.slots // 8) if self.express is None else self.express

    @property
    def places(self) -> int:
        """Samples in the engine's hands at once: those that generate, and those that wait inside it.

        A waiting one starts in the very step in which another ends; handing it over only then
        leaves the slot empty for as long as this process is busy with the end of the other.
        """
        if self.engine is not EngineKind.VLLM:
            return self.slots
        return self.slots + (max(1, self.slots // 8) if self.ahead is None else self.ahead)
