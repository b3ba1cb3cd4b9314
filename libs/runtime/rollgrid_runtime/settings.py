"""Settings shared by every service, from the environment (`ROLLGRID_…`) or files named there.

Secrets come from the environment or from a file (`…_FILE`), never from the command line.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from .webhooks import AllowList


class EnvironmentSettings(BaseSettings):
    """Settings from the environment.  A secret `NAME` may be given as `NAME_FILE`, the path of a file with it."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, SecretFiles(settings_cls)


class SecretFiles(PydanticBaseSettingsSource):
    """The secrets that `…_FILE` variables point to, without the white space around them."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        variable = f"{self.config.get('env_prefix', '')}{field_name}_FILE".upper()
        if SecretStr not in (field.annotation, *typing.get_args(field.annotation)) or not os.environ.get(variable):
            return None, field_name, False
        try:
            return Path(os.environ[variable]).read_text().strip(), field_name, False
        except (OSError, UnicodeDecodeError) as error:
            raise SettingsError(f"{variable}: {error}") from error

    def __call__(self) -> dict[str, Any]:
        found = {name: self.get_field_value(field, name)[0] for name, field in self.settings_cls.model_fields.items()}
        return {name: value for name, value in found.items() if value is not None}


class NatsSettings(EnvironmentSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_NATS_", extra="ignore")

    url: str = "nats://127.0.0.1:4222"
    user: str | None = None
    password: SecretStr | None = None
    ack_wait_s: float = Field(default=30.0, gt=0.2, description="ack-wait of work consumers, seconds")
    replicas: int = Field(default=1, ge=1, le=5)
    jobs_max_bytes: int | None = Field(default=None, description="bound of RG_JOBS; None = topology's")
    samples_max_bytes: int | None = None
    trajectories_max_bytes: int | None = None


class RedisSettings(EnvironmentSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_REDIS_", extra="ignore")

    url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")


class S3Settings(EnvironmentSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_S3_", extra="ignore")

    endpoint: str | None = Field(default=None, description="None = AWS")
    region: str = "us-east-1"
    access_key: SecretStr | None = None
    secret_key: SecretStr | None = None
    bucket: str = "rollgrid"
    timeout_s: float = 20.0


class WebhookSettings(EnvironmentSettings):
    """Read by ingest, which refuses other URLs, and by the scorer, which calls them."""

    model_config = SettingsConfigDict(env_prefix="ROLLGRID_WEBHOOK_", extra="ignore")

    allow: Annotated[tuple[str, ...], NoDecode] = Field(
        default=(), description="URLs that webhook scorers may call (see webhooks.py), separated by commas"
    )

    @field_validator("allow", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("allow")
    @classmethod
    def _well_formed(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        AllowList(value)
        return value


class TraceSettings(BaseSettings):
    """Traces are off unless an OTLP address or a file is named."""

    model_config = SettingsConfigDict(env_prefix="ROLLGRID_TRACE_", extra="ignore", env_ignore_empty=True)

    ratio: float = Field(default=0.01, ge=0, le=1, description="share of requests without a context that are traced")
    file: Path | None = Field(default=None, description="spans as JSON lines, appended")
    otlp_endpoint: str | None = Field(default=None, validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT")
    otlp_traces_endpoint: str | None = Field(default=None, validation_alias="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class ServiceSettings(EnvironmentSettings):
    """Base of every service's settings.  `health_port` 0 turns the health server off."""

    model_config = SettingsConfigDict(env_prefix="ROLLGRID_", extra="ignore")

    health_host: str = "127.0.0.1"
    health_port: int = 0
    drain_s: float = Field(default=20.0, ge=0, description="seconds a drain may take after SIGTERM")
    log_level: str = "INFO"
    log_format: str = Field(default="json", pattern="^(json|console)$")
    instance: str | None = Field(default=None, description="name of this process; None = made at start")
