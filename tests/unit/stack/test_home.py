"""The state folder: which one it is, what it holds, when a stack counts as running."""

from __future__ import annotations

import hashlib
import json
import stat
import time
from pathlib import Path

import msgspec
import pytest
from rollgrid.errors import ConfigurationError
from rollgrid.stack import processes
from rollgrid.stack.home import Home, PartState, StackState, find_home, find_stack


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    found.create()
    return found


def state_of(process: processes.ProcessId) -> StackState:
    return StackState(
        url="http://127.0.0.1:8000", api_key="rg-secret", supervisor=process, started_at=time.time(),
        parts=(PartState(name="nats", kind="server", process=process),),
    )  # fmt: skip


def test_the_folder_is_the_named_one_else_here_else_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_HOME", str(tmp_path / "named"))
    assert find_home() == tmp_path / "named"
    monkeypatch.delenv("ROLLGRID_HOME")
    monkeypatch.chdir(tmp_path)
    assert find_home() == Path.home() / ".rollgrid"
    (tmp_path / ".rollgrid").mkdir()
    assert find_home() == tmp_path / ".rollgrid"


def test_a_stack_is_found_while_its_supervisor_lives(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_HOME", str(home.root))
    assert find_stack() is None
    me = processes.this_process()
    home.write_state(state_of(me))
    found = find_stack()
    assert found is not None
    assert (found.url, found.api_key, found.pids) == ("http://127.0.0.1:8000", "rg-secret", {"nats": me.pid})
    assert stat.S_IMODE(home.state_file.stat().st_mode) == 0o600
    home.write_state(state_of(msgspec.structs.replace(me, started=me.started - 1)))
    assert find_stack() is None, "the number belongs to another process now"
    home.state_file.write_text("half a fi")
    assert find_stack() is None


def test_secrets_are_made_once_and_ingest_knows_only_a_digest(home: Home) -> None:
    secrets = home.credentials()
    assert home.credentials() == secrets
    values = [secrets.nats_password, secrets.redis_password, secrets.s3_secret_key, secrets.api_key]
    assert len(set(values)) == 4
    assert min(map(len, values)) >= 32
    keys = json.loads(home.keys_file.read_text())
    assert keys[0]["key_sha256"] == hashlib.sha256(secrets.api_key.encode()).hexdigest()
    assert secrets.api_key not in home.keys_file.read_text()


def test_damaged_secrets_are_an_error_not_new_ones(home: Home) -> None:
    (home.root / "credentials.json").write_text("{")
    with pytest.raises(ConfigurationError, match="damaged"):
        home.credentials()


def test_one_supervisor_holds_the_folder(home: Home) -> None:
    with home.locked() as first:
        assert first
        with home.locked() as second:
            assert not second
    with home.locked() as again:
        assert again


def test_a_log_is_bounded_while_its_writer_appends(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollgrid.stack.home.LOG_LIMIT_BYTES", 100)
    log = home.log("nats")
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 99)
        home.trim_log(log)
        assert log.stat().st_size == 99
        writer.write(b"yy")
        home.trim_log(log)
        writer.write(b"new")
    assert log.read_bytes() == b"new"
    assert log.with_suffix(".log.1").read_bytes().endswith(b"yy")
    home.trim_log(home.log("absent"))
