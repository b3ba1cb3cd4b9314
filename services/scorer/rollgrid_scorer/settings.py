"""Settings of the scorer, from the environment (`ROLLGRID_SCORER_…`)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict
from rollgrid_runtime.settings import ServiceSettings
from rollgrid_runtime.webhooks import AllowList

from .registry import parse_reference
from .webhook_wire import secret_key


class ScorerSettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="ROLLGRID_SCORER_", extra="ignore")

    workers: int = Field(default=max(2, os.cpu_count() or 2), ge=2, description="worker processes for verifiers")
    worker_memory_mb: int = Field(default=4096, ge=0, description="address space of one worker, MiB; 0 = unlimited")
    max_events: int = Field(default=256, ge=1, description="events of RG_SAMPLES held at once")
    max_timeout_s: float = Field(default=600.0, gt=0, description="upper bound of a job's own timeout_s")
    webhook_events: int = Field(default=128, ge=8, description="events for webhooks held at once")
    webhook_share: int = Field(default=32, ge=1, description="of these, events of one tenant and webhook")
    webhook_running: int = Field(default=8, ge=1, description="calls at a time to one webhook for one tenant")
    webhook_attempts: int = Field(default=4, ge=1, le=10, description="tries when the infrastructure fails")
    webhook_max_bytes: int = Field(default=1024 * 1024, ge=1024, description="largest answer of a webhook")
    webhook_ca_file: Path | None = Field(
        default=None, description="authorities for https webhooks; None = the system's"
    )
    webhook_secrets: SecretStr | None = Field(
        default=None,
        description="JSON object: a URL of the allow-list, as written there → the secret that signs its calls",
    )
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

    def webhook_keys(self, allowed: AllowList) -> dict[str, bytes]:
        """Signing keys by the text of their allow-list entry; raises ValueError for what names no entry."""
        text = "" if self.webhook_secrets is None else self.webhook_secrets.get_secret_value()
        try:
            found = json.loads(text or "{}")
        except ValueError:
            found = None  # its own message would show the secrets
        if not isinstance(found, dict) or not all(isinstance(secret, str) and secret for secret in found.values()):
            raise ValueError("webhook_secrets is not a JSON object of texts")
        known = {entry.text for entry in allowed.entries}
        for url in found:
            if url not in known:
                raise ValueError(f"webhook_secrets: {url} is not on the allow-list")
        return {url: secret_key(secret) for url, secret in found.items()}
