"""Settings of the scorer, from the environment (`ROLLGRID_SCORER_…`)."""

from __future__ import annotations

import os
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from rollgrid_runtime.settings import ServiceSettings

from .registry import parse_reference


class ScorerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_SCORER_", extra="ignore")

    workers: int = Field(default=max(2, os.cpu_count() or 2), ge=2, description="worker processes for verifiers")
    worker_memory_mb: int = Field(default=4096, ge=0, description="address space of one worker, MiB; 0 = unlimited")
    max_events: int = Field(default=64, ge=1, description="events of RG_SAMPLES held at once")
    max_timeout_s: float = Field(default=600.0, gt=0, description="upper bound of a job's own timeout_s")
    verifiers: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="verifiers of your own: name=module:attr, separated by commas"
    )

    @field_validator("verifiers", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("verifiers")
    @classmethod
    def _well_formed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            parse_reference(text)
        return value
