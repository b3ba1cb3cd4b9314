"""`rollgrid doctor`: what is missing is a failure with a way to get it; what is optional is not."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollgrid.errors import ConfigurationError
from rollgrid.stack import binaries, checks
from rollgrid.stack.checks import Level, run_checks

ROLLGRID = str(Path(sys.executable).parent / "rollgrid")
NAMES = {"system", "python", "packages", "nats", "valkey", "s3", "cores", "memory", "disk", "model", "GPU", "docker"}


def test_the_command_reports_every_check_and_its_exit_code() -> None:
    answer = subprocess.run([ROLLGRID, "doctor", "--json", "--no-engine"], capture_output=True, text=True, timeout=60)
    report = json.loads(answer.stdout)
    found = {check["name"]: check for check in report["checks"]}
    assert set(found) >= NAMES
    assert found["nats"]["found"].startswith("2.")
    assert answer.returncode == (0 if report["ok"] else 3)
    assert all(check.get("fix") for check in report["checks"] if check["level"] in ("warn", "fail"))


def test_a_missing_server_fails_and_one_in_the_environment_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise ConfigurationError("no weed here")

    monkeypatch.setattr(binaries, "weed", missing)
    monkeypatch.delenv("S3_ENDPOINT", raising=False)
    check = next(check for check in run_checks(with_engine=False) if check.name == "s3")
    assert (check.level, "rollgrid[embedded]" in check.fix) == (Level.FAIL, True)
    monkeypatch.setenv("S3_ENDPOINT", "http://127.0.0.1:1")
    check = next(check for check in run_checks(with_engine=False) if check.name == "s3")
    assert check.level is Level.OK


def test_an_old_server_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binaries, "version", lambda _: "2.9.10")
    check = next(check for check in run_checks(with_engine=False) if check.name == "nats")
    assert check.level is Level.FAIL
    assert "2.12" in check.fix


def test_the_torchvision_trap_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    trap = subprocess.CompletedProcess([], 1, "", "RuntimeError: operator torchvision::nms does not exist\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: trap)
    check = checks._engine()
    assert check.level is Level.FAIL
    assert "pip uninstall -y torchvision" in check.fix


@pytest.mark.parametrize(
    ("answer", "version"),
    [
        ("nats-server: v2.15.1", "2.15.1"),
        ("Valkey server v=9.1.2 sha=00000000:0 malloc=libc bits=64", "9.1.2"),
        ("version 8000GB 4.48 pypi linux amd64", "4.48"),
        ("no number here", ""),
    ],
)
def test_versions_are_read_as_the_servers_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, version: str
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, answer, ""))
    assert binaries.version(tmp_path / answer.split()[0]) == version
