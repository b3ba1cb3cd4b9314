"""Which server and which key: what is said, then the environment, then the stack on this machine."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from rollgrid.discovery import Endpoint, patience_s, resolve
from rollgrid.errors import ConfigurationError
from rollgrid.stack.home import Home, StackState
from rollgrid.stack.processes import identify


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """No server is named, and the state folder is an empty one."""
    for name in ("ROLLGRID_URL", "ROLLGRID_API_KEY", "ROLLGRID_PATIENCE_S"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ROLLGRID_HOME", str(tmp_path / "home"))
    made = Home(tmp_path / "home")
    made.create()
    return made


def run_stack(home: Home, url: str = "http://127.0.0.1:8123") -> None:
    """The state file of a stack whose supervisor is this very process."""
    me = identify(os.getpid())
    assert me is not None
    home.write_state(StackState(url=url, api_key="local-key", supervisor=me, started_at=time.time(), ready=True))


def test_nothing_named_and_nothing_running() -> None:
    with pytest.raises(ConfigurationError, match="rollgrid up"):
        resolve()


def test_the_local_stack_is_found_with_its_key(home: Home) -> None:
    run_stack(home)
    assert resolve() == Endpoint("http://127.0.0.1:8123", "local-key")
    assert resolve("http://127.0.0.1:8123/v1/") == Endpoint("http://127.0.0.1:8123", "local-key")
    assert "local-key" not in repr(resolve())


def test_the_local_key_never_goes_elsewhere(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run_stack(home)
    assert resolve("https://elsewhere.example") == Endpoint("https://elsewhere.example", None)
    monkeypatch.setenv("ROLLGRID_URL", "https://elsewhere.example")
    assert resolve().api_key is None


def test_arguments_come_before_the_environment(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    run_stack(home)
    monkeypatch.setenv("ROLLGRID_URL", "http://env:1")
    monkeypatch.setenv("ROLLGRID_API_KEY", "env-key")
    assert resolve() == Endpoint("http://env:1", "env-key")
    assert resolve("http://arg:2", "arg-key") == Endpoint("http://arg:2", "arg-key")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not an http"):
        resolve(url)


def test_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    assert patience_s() == 15.0
    monkeypatch.setenv("ROLLGRID_PATIENCE_S", "soon")
    with pytest.raises(ConfigurationError, match="soon"):
        patience_s()
