"""A Docker engine: the machine's, else one of the test's own in a folder that keeps its images between runs.

Where neither can be had `NoEngine` says why.  An engine of the test's own gets stand-ins for the
official base images, because a machine that has no engine seldom reaches a registry either.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support.processes import Process, ProcessDied

DRIVERS = ("overlay2", "fuse-overlayfs", "vfs")
START_S = 60.0


class NoEngine(Exception):
    """No engine answers and none can be started; the message says why."""


class Engine(NamedTuple):
    """`env` is what docker's clients need to reach it; `own` when this process started it."""

    env: dict[str, str]
    version: str
    own: bool

    def docker(self, *arguments: str, timeout_s: float = 120.0) -> str:
        answer = subprocess.run(
            ["docker", *arguments], check=False, capture_output=True, text=True, env=self.env, timeout=timeout_s
        )
        if answer.returncode:
            raise RuntimeError(f"docker {' '.join(arguments)}: {answer.stderr[-3000:]}")
        return answer.stdout


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """Raises NoEngine."""
    if shutil.which("docker") is None:
        raise NoEngine("there is no docker client")
    version, why = _version(dict(os.environ))
    if version:
        yield Engine(dict(os.environ), version, own=False)
        return
    with _own_engine(why) as found:
        yield found


def folder() -> Path:
    """Where an engine of the test's own keeps its images."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollgrid" / "docker"


@contextlib.contextmanager
def _own_engine(why: str) -> Iterator[Engine]:
    _check_possible(why)
    root = folder()
    (root / "run").mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "DOCKER_HOST": f"unix://{root / 'run' / 'docker.sock'}"}
    with open(root / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise NoEngine(f"another run uses the engine in {root}") from error
        with _started(root, env) as version:
            found = Engine(env, version, own=True)
            _make_standins(env)
            yield found


def _check_possible(why: str) -> None:
    if os.getuid() != 0:
        raise NoEngine(f"no engine answers ({why}), and starting one takes root")
    for program, package in (("dockerd", "docker.io"), ("iptables", "iptables"), ("debootstrap", "debootstrap")):
        if shutil.which(program) is None:
            raise NoEngine(f"no engine answers ({why}), and to start one {package} must be installed")


@contextlib.contextmanager
def _started(root: Path, env: dict[str, str]) -> Iterator[str]:
    failures = []
    for driver in DRIVERS:
        daemon = _daemon(root, driver, env)
        try:
            daemon.start().wait_ready(START_S)
        except (ProcessDied, TimeoutError):
            failures.append(f"{driver}: {daemon.log_tail(2)}")
            daemon.stop()
            continue
        try:
            yield _version(env)[0]
        finally:
            daemon.stop(60.0)
        return
    raise NoEngine("dockerd does not start here: " + "; ".join(failures))


class _Daemon(Process):
    """dockerd with its own containerd, below one folder."""

    def is_ready(self) -> bool:
        return self.running and bool(_version(self.environment or {})[0])


def _daemon(root: Path, driver: str, env: dict[str, str]) -> _Daemon:
    run = root / "run"
    argv = ["dockerd", "--storage-driver", driver, "--data-root", str(root / "data"), "--host", env["DOCKER_HOST"]]
    argv += ["--exec-root", str(run / "exec"), "--pidfile", str(run / "dockerd.pid"), "--log-level", "warn"]
    return _Daemon("dockerd", argv, run / "dockerd.log", env)


def _make_standins(env: dict[str, str]) -> None:
    subprocess.run([sys.executable, "-m", "tests.support.standin_images"], check=True, env=env, timeout=900)


def _version(env: dict[str, str]) -> tuple[str, str]:
    """(the server's version, "") or ("", why there is none)."""
    answer = subprocess.run(
        ["docker", "version", "--format", "{{.Server.Version}}"],
        check=False, capture_output=True, text=True, env=env, timeout=30,
    )  # fmt: skip
    if answer.returncode:
        return "", answer.stderr.strip().splitlines()[-1] if answer.stderr.strip() else "no answer"
    return answer.stdout.strip(), ""
