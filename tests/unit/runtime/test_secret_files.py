"""A secret may come from the file that `…_FILE` names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr
from pydantic_settings import SettingsError
from rollgrid_runtime.settings import NatsSettings, RedisSettings


def test_a_secret_is_read_from_the_file_its_variable_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("of the file\n")
    monkeypatch.setenv("ROLLGRID_NATS_PASSWORD_FILE", str(tmp_path / "password"))
    assert NatsSettings().password == SecretStr("of the file")


def test_the_variable_itself_goes_before_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("redis://file")
    monkeypatch.setenv("ROLLGRID_REDIS_URL_FILE", str(tmp_path / "url"))
    monkeypatch.setenv("ROLLGRID_REDIS_URL", "redis://variable")
    assert RedisSettings().url == SecretStr("redis://variable")


def test_a_file_that_cannot_be_read_names_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_NATS_PASSWORD_FILE", str(tmp_path / "missing"))
    with pytest.raises(SettingsError, match="ROLLGRID_NATS_PASSWORD_FILE"):
        NatsSettings()


def test_only_secrets_are_read_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "url").write_text("nats://elsewhere")
    monkeypatch.setenv("ROLLGRID_NATS_URL_FILE", str(tmp_path / "url"))
    assert NatsSettings().url == NatsSettings.model_fields["url"].default
