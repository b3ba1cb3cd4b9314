"""Settings of checkpoint-sync, from the environment (`ROLLGRID_CHECKPOINT_SYNC_…`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import SettingsConfigDict
from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import OnDeadline, RolloutRequest
from rollgrid_runtime.settings import ServiceSettings


class RolloutSetting(BaseModel):
    """How a version reaches the workers where its publisher does not say; all zero = all workers at once."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    canary: int = Field(default=0, ge=0, description="workers that get a version first and prove it")
    canary_s: float = Field(default=0.0, ge=0, description="how long all canaries must run it without a complaint")
    at_once: int = Field(default=0, ge=0, description="workers that change over at the same time after that; 0 = all")
    deadline_s: float = Field(default=600.0, gt=0, description="from adoption to its being everywhere")
    on_deadline: OnDeadline = OnDeadline.ALARM

    def request(self) -> RolloutRequest:
        return RolloutRequest(
            canary=self.canary, canary_s=self.canary_s, at_once=self.at_once, on_deadline=self.on_deadline
        )


class ModelSetting(BaseModel):
    """One policy whose base is a Hugging Face folder on this machine."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    name: str = Field(description="the policy's name; letters, digits, dash, underscore")
    path: Path = Field(description="folder with config.json, *.safetensors and the tokenizer's files")
    tenant: str = Field(default="shared", description='"shared" = every tenant may use it')
    dtype: str = Field(default="float32", pattern="^(float32|bfloat16|float16)$", description="dtype it is served in")
    max_model_len: int | None = Field(default=None, ge=8, description="None = the model's own context")
    aliases: tuple[str, ...] = ()
    tool_parser: str | None = Field(default=None, description="vLLM's name of its tool parser; None = no tools")
    reasoning_parser: str | None = Field(default=None, description="vLLM's name; None = reasoning is content")
    cadence_s: float | None = Field(default=None, gt=0, description="a version is expected this often; None = never")
    rollout: RolloutSetting | None = Field(default=None, description="None = the service's")

    @field_validator("name", "tool_parser", "reasoning_parser")
    @classmethod
    def _is_label(cls, value: str | None) -> str | None:
        if value is not None and not ids.is_label(value):
            raise ValueError(f"{value!r} does not match {ids.LABEL_PATTERN}")
        return value

    @field_validator("tenant")
    @classmethod
    def _is_name(cls, value: str) -> str:
        if not ids.is_name(value):
            raise ValueError(f"{value!r} does not match {ids.NAME_PATTERN}")
        return value

    @property
    def key(self) -> str:
        """The policy's key in `rg_policies`."""
        return f"{self.tenant}.{self.name}"


class CheckpointSyncSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_CHECKPOINT_SYNC_", extra="ignore")

    models: tuple[ModelSetting, ...] = Field(default=(), description="as a JSON list")
    device: str = Field(default="cpu", pattern="^(cpu|cuda)$", description="device class of the pools")
    region: str = "local"
    list_every_s: float = Field(default=30.0, gt=0, description="how often S3 is listed for versions nobody announced")
    collect_every_s: float = Field(default=300.0, gt=0, description="how often old versions are looked for and deleted")
    keep_versions: int = Field(default=8, ge=1, description="newest versions kept, beside all that something needs")
    upload_ttl_s: float = Field(default=24 * 3600.0, gt=0, description="uploads not committed by then are deleted")
    rollout: RolloutSetting = RolloutSetting()
    max_lora_rank: int = Field(default=16, ge=1, le=512, description="adapters beyond it are refused; as the samplers'")
    scratch: Path | None = Field(default=None, description="versions are downloaded here to be verified; None = /tmp")

    @field_validator("models")
    @classmethod
    def _unique(cls, value: tuple[ModelSetting, ...]) -> tuple[ModelSetting, ...]:
        keys = [model.key for model in value]
        if len(set(keys)) != len(keys):
            raise ValueError("two models have the same tenant and name")
        return value
