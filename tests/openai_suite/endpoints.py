"""The two servers the suite runs against, and what it needs to know of each beside its URL."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.request
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from tests.support.servers import scratch
from tests.support.stack import Stack, stack, vllm
from tests.support.vllm_server import READY_S, VllmServer
from tests.support.waiting import wait_until

from .model import (
    BASE,
    MODEL,
    PATH_ID,
    REASONING_PARSER,
    TOOL_PARSER,
    VERSION_ID,
    policy_environment,
    suite_model,
)

ROLLGRID, PLAIN = "rollgrid", "vllm-serve"
NAMES = (MODEL, PATH_ID, VERSION_ID)
SAMPLES_AT_ONCE = 64


class Engine(Protocol):
    """What the endpoint's engine says of itself."""

    def running(self) -> int: ...

    def generated(self) -> int: ...


class Endpoint(NamedTuple):
    """`stack` is rollgrid's, where this process started it."""

    name: str
    url: str
    engine: Engine
    stack: Stack | None = None
    key: str = "any"

    def wait_idle(self, timeout_s: float = 60.0) -> None:
        wait_until(lambda: self.engine.running() == 0, timeout_s, f"{self.name} becomes idle", every_s=0.1)


@contextlib.contextmanager
def endpoint(name: str) -> Iterator[Endpoint]:
    """A running endpoint.  `ROLLGRID_SUITE_URL` (and `…_KEY`) name a rollgrid that runs already and serves
    the suite's model as `tiny`, with the other names as aliases."""
    url = os.environ.get("ROLLGRID_SUITE_URL")
    if name == ROLLGRID and url:
        yield Endpoint(name, url.rstrip("/"), Fleet(url.rstrip("/")), key=os.environ.get("ROLLGRID_SUITE_KEY", "any"))
    elif name == ROLLGRID:
        with stack(rollgrid_plan()) as pipe:
            samplers = [sampler.health_url for sampler in pipe.named("sampler")]
            yield Endpoint(name, pipe.url, VllmMetrics(*samplers), pipe)
    else:
        options = ["--enable-auto-tool-choice", "--tool-call-parser", TOOL_PARSER]
        options += ["--reasoning-parser", REASONING_PARSER, "--max-num-seqs", str(SAMPLES_AT_ONCE)]
        options += ["--enable-prompt-tokens-details"]
        with scratch("vllm") as folder, VllmServer(suite_model(), folder, NAMES, options) as server:
            server.start().wait_ready(READY_S)
            yield Endpoint(name, server.url, VllmMetrics(server.url))


def rollgrid_plan() -> Any:
    """Two real engines, one core each, so that one may die while its work goes on."""
    env = {
        **policy_environment([PATH_ID, VERSION_ID]),
        "ROLLGRID_INGEST_MAX_INFLIGHT_SAMPLES": str(SAMPLES_AT_ONCE),
        "ROLLGRID_INGEST_KEEP_ALIVE_S": "1",
    }
    cores = sorted(os.sched_getaffinity(0))
    own = {
        name: {"ROLLGRID_SAMPLER_OMP_THREADS_BIND": str(cores[i % len(cores)]), "ROLLGRID_SAMPLER_INSTANCE": name}
        for i, name in enumerate(("sampler-0", "sampler-1"))
    }
    plan = vllm(slots=SAMPLES_AT_ONCE // 2, model=BASE, env=env)
    # a short ack-wait: what a killed sampler held is delivered again soon
    return plan._replace(samplers=2, service_env=own, ack_wait_s=4.0)


class VllmMetrics:
    """vLLM's own counts, of its server or of rollgrid's samplers."""

    def __init__(self, *urls: str) -> None:
        self.urls = urls

    def running(self) -> int:
        return sum(self._running(url) for url in self.urls)

    def generated(self) -> int:
        return sum(int(_sum(url, "vllm:generation_tokens_total")) for url in self.urls)

    def busy(self) -> list[str]:
        """Which of them generate."""
        return [url for url in self.urls if self._running(url)]

    @staticmethod
    def _running(url: str) -> int:
        return int(_sum(url, "vllm:num_requests_running", "vllm:num_requests_waiting", "rollgrid_sampler_jobs_held"))


def _sum(url: str, *names: str) -> float:
    """Of these metrics, over all their labels; none of them there is an error."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    starts = tuple(name + end for name in names for end in "{ ")
    found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(starts)]
    if not found:
        raise LookupError(f"{url} has none of {names}")
    return sum(found)


class Fleet:
    """Of all samplers, from `GET /v1/fleet` (as old as their lease's last renewal)."""

    def __init__(self, url: str) -> None:
        self.url = url

    def running(self) -> int:
        fleet = self._fleet()
        return int(fleet["queues"]["RG_JOBS"]["messages"]) + sum(worker.get("busy", 0) for worker in fleet["workers"])

    def generated(self) -> int:
        return sum(int(worker.get("tokens_total", 0)) for worker in self._fleet()["workers"])

    def _fleet(self) -> dict[str, Any]:
        key = os.environ.get("ROLLGRID_SUITE_KEY", "any")
        request = urllib.request.Request(f"{self.url}/v1/fleet", headers={"authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found
