"""Whether a sampler keeps partials: only where its environment names a Redis."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollgrid_sampler.settings import redis_if_named


def test_redis_is_used_where_it_is_named_and_not_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("ROLLGRID_REDIS_URL", "ROLLGRID_REDIS_URL_FILE"):
        monkeypatch.delenv(variable, raising=False)
    assert redis_if_named() is None
    (tmp_path / "url").write_text("redis://:secret@somewhere:6379/0\n")
    monkeypatch.setenv("ROLLGRID_REDIS_URL_FILE", str(tmp_path / "url"))
    found = redis_if_named()
    assert found is not None
    assert found.url.get_secret_value() == "redis://:secret@somewhere:6379/0"
    monkeypatch.delenv("ROLLGRID_REDIS_URL_FILE")
    monkeypatch.setenv("ROLLGRID_REDIS_URL", "redis://127.0.0.1:7000/0")
    found = redis_if_named()
    assert found is not None
    assert found.url.get_secret_value() == "redis://127.0.0.1:7000/0"
