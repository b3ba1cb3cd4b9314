"""Settings shared by every service, from the environment (`ROLLGRID_…`) or files named there.

Secrets come from the environment or from a file (`…_FILE`), never from the command line.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class NatsSettings(BaseSettings):
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


class TraceSettings(BaseSettings):
    """Traces are off unless an OTLP address or a file is named."""

    model_config = SettingsConfigDict(env_prefix="ROLLGRID_TRACE_", extra="ignore", env_ignore_empty=True)

    ratio: float = Field(default=0.01, ge=0, le=1, description="share of requests without a traceparent that are traced")
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
