"""The compose project of a test: deploy/compose.yaml as it is, under a name, ports and secrets of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.openai_suite.endpoints import SAMPLES_AT_ONCE
from tests.openai_suite.model import BASE, MODEL, PATH_ID, VERSION_ID, policy_environment, suite_model
from tests.support.processes import free_port

from .engine import Engine

ROOT = Path(__file__).resolve().parents[2]
NAME = "rollgrid-test"
UP_S = 420.0
SETTINGS = f"""\
ROLLGRID_INGEST_MAX_INFLIGHT_SAMPLES={SAMPLES_AT_ONCE}
ROLLGRID_INGEST_KEEP_ALIVE_S=1
ROLLGRID_SAMPLER_SLOTS={SAMPLES_AT_ONCE}
ROLLGRID_SAMPLER_KV_CACHE_BYTES={64 * 2**20}
"""


class Project:
    """`phases` says how long each step took, in seconds."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.port, self.nats_port = free_port(), free_port()
        self.phases: dict[str, float] = {}
        (folder / "settings.env").write_text(SETTINGS)
        policies = policy_environment([PATH_ID, VERSION_ID])["ROLLGRID_CHECKPOINT_SYNC_MODELS"]
        _readable_copy(suite_model(), folder / "models" / MODEL)
        settings = {
            "ROLLGRID_PORT": str(self.port),
            "ROLLGRID_NATS_PORT": str(self.nats_port),
            "ROLLGRID_MODELS": str(folder / "models"),
            "ROLLGRID_MODEL": MODEL,
            "ROLLGRID_POLICY": MODEL,
            "ROLLGRID_DTYPE": BASE.dtype,
            "ROLLGRID_POLICIES": policies.replace(str(suite_model()), f"/models/{MODEL}"),
            "ROLLGRID_SETTINGS": str(folder / "settings.env"),
            "ROLLGRID_NATS_ACK_WAIT_S": "5",
        }
        self.write_settings(settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def secrets(self) -> Path:
        return self.folder / "secrets"

    @property
    def tenant(self) -> Path:
        """Where the secrets of the tenant "local" are."""
        return self.secrets / "tenants" / "local"

    @property
    def key(self) -> str:
        return (self.tenant / "api_key").read_text()

    def write_settings(self, settings: dict[str, str]) -> None:
        pairs = [f"{name}={value}" for name, value in settings.items()]
        argv = [sys.executable, str(ROOT / "deploy/credentials.py"), "--folder", str(self.folder), *pairs]
        subprocess.run(argv, check=True, capture_output=True, timeout=60)

    def compose(self, *arguments: str, timeout_s: float = 120.0, stdin: bytes = b"", may_fail: bool = False) -> str:
        """One command; its standard output.  Raises RuntimeError with what it said."""
        argv = [str(ROOT / "deploy/compose.sh"), "--project-name", NAME, "--env-file", str(self.folder / ".env")]
        answer = subprocess.run(
            [*argv, *arguments], check=False, capture_output=True, timeout=timeout_s, input=stdin,
            env={**self.engine.env, "PYTHON": sys.executable},
        )  # fmt: skip
        if answer.returncode and not may_fail:
            said = (answer.stdout[-2000:] + b"\n" + answer.stderr[-4000:]).decode(errors="replace")
            raise RuntimeError(f"compose {' '.join(arguments)} ended with {answer.returncode}\n{said}")
        return answer.stdout.decode(errors="replace")

    def build(self) -> None:
        """One after the other: the classic builder would make what they share twice at once.

        An engine of the test's own keeps the stage that nothing is made from under a name, and drops
        what older files left: the images of one version at a time.
        """
        if self.engine.own:
            self._keep_build_stage()
        self._timed("build services", "build", "volumes", timeout_s=1200.0)
        self._timed("build sampler", "build", "sampler", timeout_s=1200.0)
        if self.engine.own:
            self.engine.docker("image", "prune", "--force")

    def _keep_build_stage(self) -> None:
        started = time.monotonic()
        argv = ["docker", "build", "--quiet", "--target", "build", "--tag", "rollgrid/build:dev"]
        subprocess.run(
            [*argv, "--file", "deploy/images/Dockerfile", "."], check=True, capture_output=True, timeout=1200.0,
            cwd=ROOT, env={**self.engine.env, "DOCKER_BUILDKIT": "0"},
        )  # fmt: skip
        self.phases["build dependencies"] = time.monotonic() - started

    def up(self, *arguments: str) -> None:
        """Everything (or the named services), until it is healthy."""
        self._timed("up", "up", "--detach", "--no-build", "--wait", *arguments, timeout_s=UP_S)

    def down(self) -> None:
        self._timed("down", "down", "--volumes", "--timeout", "10", timeout_s=180.0)

    def containers(self) -> dict[str, dict[str, Any]]:
        """What docker says of each, by service."""
        rows = [json.loads(line) for line in self.compose("ps", "--all", "--format", "json").splitlines()]
        inspected = json.loads(self.engine.docker("inspect", *(row["ID"] for row in rows)))
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in inspected}

    def logs(self, lines: int = 30) -> str:
        return self.compose("logs", "--no-color", "--tail", str(lines))

    def _timed(self, phase: str, *arguments: str, timeout_s: float) -> None:
        started = time.monotonic()
        self.compose(*arguments, timeout_s=timeout_s)
        self.phases.setdefault(phase, time.monotonic() - started)


def _readable_copy(model: Path, target: Path) -> None:
    """The containers' user is not the one that made the model."""
    shutil.copytree(model, target)
    for path in (target, *target.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
