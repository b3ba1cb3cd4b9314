"""The five services as real processes: `python -m rollgrid_<name>` against given servers."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .processes import Process, free_port
from .servers import scratch

SERVICES = ("ingest", "sampler", "scorer", "trajectory_logger", "checkpoint_sync")
READY_TIMEOUT_S = 40.0


class ServiceProcess(Process):
    """A service and its health door, at the same port over restarts (ingest's is its own HTTP port)."""

    poll_s = 0.05
    """Starting takes a second or more, and each question is work for who answers it."""

    def __init__(self, service: str, folder: Path, env: Mapping[str, str], *, name: str | None = None) -> None:
        self.service = service.removeprefix("rollgrid_")
        if self.service not in SERVICES:
            raise ValueError(f"no service {service!r}; there are {SERVICES}")
        self.health_port = free_port()
        super().__init__(
            name or self.service,
            [sys.executable, "-m", f"rollgrid_{self.service}"],
            folder / f"{name or self.service}.log",
            service_environment(self.service, env, self.health_port),
        )

    @property
    def health_url(self) -> str:
        return f"http://127.0.0.1:{self.health_port}"

    def readiness(self) -> tuple[int, dict[str, Any]]:
        """Status and body of /readyz; status 0 when nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.health_url}/readyz", timeout=6) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, _body(error)
        except (OSError, ValueError) as error:
            return 0, {"error": repr(error)}

    def is_ready(self) -> bool:
        return self.readiness()[0] == 200

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.health_url}/metrics", timeout=6) as answer:
            return str(answer.read().decode())


def _body(error: urllib.error.HTTPError) -> dict[str, Any]:
    try:
        found = json.loads(error.read())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {"body": found}


def service_environment(service: str, env: Mapping[str, str], health_port: int) -> dict[str, str]:
    """This process's environment without its own ROLLGRID_ variables, then `env`.

    Shared fields are set under both prefixes, so it does not matter which one the service reads.
    """
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ROLLGRID_")}
    prefix = f"ROLLGRID_{service.upper()}_"
    shared = {"HEALTH_PORT": str(health_port), "DRAIN_S": "10", "LOG_LEVEL": "INFO"}
    if service == "ingest":
        shared |= {"PORT": str(health_port), "HEALTH_PORT": "0"}
    for name, value in shared.items():
        clean[f"ROLLGRID_{name}"] = value
        clean[f"{prefix}{name}"] = value
    return {**clean, "PYTHONUNBUFFERED": "1", **env}


@contextlib.contextmanager
def run_service(
    module: str, env: Mapping[str, str], *, name: str | None = None, ready_s: float = READY_TIMEOUT_S
) -> Iterator[ServiceProcess]:
    """`python -m rollgrid_<module>`, ready; its whole process group is killed at the end."""
    with scratch(module) as folder, ServiceProcess(module, folder, env, name=name) as process:
        yield process.start().wait_ready(ready_s)
