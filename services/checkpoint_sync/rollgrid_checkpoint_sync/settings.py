"""Settings of checkpoint-sync, from the environment (`ROLLGRID_CHECKPOINT_SYNC_…`)."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import SettingsConfigDict
from rollgrid_contracts import ids
from rollgrid_runtime.settings import ServiceSettings


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
    scratch: Path | None = Field(default=None, description="versions are downloaded here to be verified; None = /tmp")

    @field_validator("models")
    @classmethod
    def _unique(cls, value: tuple[ModelSetting, ...]) -> tuple[ModelSetting, ...]:
        keys = [model.key for model in value]
        if len(set(keys)) != len(keys):
            raise ValueError("two models have the same tenant and name")
        return value
