"""Everything that configures a sampler (`ROLLGRID_SAMPLER_…`); see also the shared settings."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import SettingsConfigDict
from rollgrid_contracts.jobs import OnRefresh
from rollgrid_runtime.settings import RedisSettings, ServiceSettings

MIB = 1024 * 1024
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


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


class WeightFault(StrEnum):
    """What a fault drill does when a version is applied to the running scripted engine."""

    LABEL_FIRST = "label_first"
    """The label moves, the bytes do not."""
    STALE_TENSOR = "stale_tensor"
    """The first file's old bytes stay."""
    REFUSE = "refuse"
    """The engine refuses the version; the old one answers on."""
    CRASH_MID_APPLY = "crash_mid_apply"
    """The sampler process is killed (SIGKILL) with half of the bytes applied."""
    SLOW_APPLY = "slow_apply"
    """Applying takes a second."""


def redis_if_named() -> RedisSettings | None:
    """Without an address in the environment nothing is kept of long turns."""
    found = RedisSettings()
    return found if "url" in found.model_fields_set else None


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
    lane_kept_s: float = Field(
        default=600.0, gt=0, description="the lane of a worker that is gone is removed when it was empty for so long"
    )
    max_starts: int = Field(default=3, ge=1, description="recorded starts after which a job is poison")
    refuse_delay_s: float = Field(default=2.0, gt=0, description="delay of a refusal's nak, seconds")
    coalesce_s: float = Field(default=0.025, ge=0, description="finished samples of a group wait so long for others")
    coalesce_samples: int = Field(default=8, ge=1)
    stream_interval_s: float = Field(default=0.03, ge=0, description="a streamed sample's frames are so far apart")
    stream_tokens: int = Field(default=64, ge=1, description="tokens that make a frame go out at once")
    partial_tokens: int = Field(default=128, ge=1, description="a turn is checkpointed in Redis every so many tokens")
    partial_interval_s: float = Field(default=1.0, gt=0, description="and so often while tokens come, seconds")
    ledger_timeout_s: float = Field(default=1.0, gt=0)
    engine_timeout_s: float = Field(default=60.0, gt=0, description="an engine silent for so long is dead")

    # weights
    swap_mode: OnRefresh = OnRefresh.WAIT
    swap_deadline_s: float = Field(default=120.0, gt=0, description="a longer wait for running samples aborts them")
    pin_grace_s: float = Field(default=30.0, ge=0, description="a swap waits so long for groups that need one version")
    double_buffer: bool = Field(
        default=True,
        description="on CPU, weights are loaded beside generation into a second copy, twice the memory; a GPU has one",
    )
    heal_s: float = Field(default=60.0, ge=0, description="a start that gave wrong weights waits so long to start anew")
    cache: Path = Field(default=Path("~/.cache/rollgrid/versions"), description="versions on this node's disk")
    policy_wait_s: float = Field(default=10.0, ge=0, description="wait for the policy's desired version at start")

    # vLLM
    kv_cache_bytes: int = Field(default=256 * MIB, gt=0, description="KV cache on CPU; on GPU vLLM's own fraction")
    omp_threads_bind: str = Field(default="auto", description="VLLM_CPU_OMP_THREADS_BIND: cores of the engine")
    block_size: int | None = Field(default=None, description="KV block; None = vLLM's (128 on CPU)")
    max_logprobs: int = Field(default=20, ge=0)
    engine_stats: bool = Field(default=True, description="vLLM's own metrics, and the time of the first token")
    tensor_parallel: int = Field(default=1, ge=1)
    gpu_memory: float = Field(default=0.9, gt=0, le=1)
    start_timeout_s: float = Field(default=600.0, gt=0, description="also the longest load of other weights")
    max_loras: int = Field(default=0, ge=0, description="LoRA versions that generate at once; 0 = LoRA off")
    max_lora_rank: int = Field(default=16, description="1, 8, 16, 32, 64, 128, 256, 320 or 512, as vLLM wants it")
    max_cpu_loras: int | None = Field(
        default=None, ge=1, description="LoRA versions held ready, at least max_loras; None = max_loras"
    )
    cold_check_every: int | None = Field(
        default=None,
        ge=0,
        description="a spare process loads every n-th version cold and compares; 0 = off; None = 10 on CPU, off on GPU",
    )
    cold_check_gpus: str | None = Field(
        default=None, description="CUDA_VISIBLE_DEVICES of that process: the engine's own are full"
    )
    cold_check_timeout_s: float = Field(default=900.0, gt=0)

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
    scripted_weight_faults: dict[int, WeightFault] = Field(
        default={}, description="fault drills: version → what goes wrong when it is applied to a running engine"
    )

    @model_validator(mode="after")
    def _loras_agree(self) -> Self:
        if self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"max_lora_rank ({self.max_lora_rank}) must be one of {', '.join(map(str, LORA_RANKS))}")
        if self.max_cpu_loras is not None and not 1 <= self.max_loras <= self.max_cpu_loras:
            raise ValueError(f"max_loras ({self.max_loras}) must be 1 .. max_cpu_loras ({self.max_cpu_loras})")
        return self

    @property
    def lora_places(self) -> int:
        """LoRA versions that may be loaded at once."""
        return self.max_cpu_loras or self.max_loras

    @property
    def cold_checks(self) -> int:
        """Every how many versions a cold load checks the fingerprint; 0 = never."""
        if self.cold_check_every is None:
            return 10 if self.device == "cpu" else 0
        return self.cold_check_every

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
