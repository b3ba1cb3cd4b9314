"""The whole pipe as real processes: three servers and the five services, on a scripted or real engine.

with stack(scripted()) as pipe:
    pipe.url            # ingest
    pipe["sampler-0"]   # a process to kill, pause and start again
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .processes import Process
from .servers import NatsServer, SeaweedServer, ValkeyServer, new_bucket, scratch
from .services import ServiceProcess
from .tiny_models import TinyModel, tiny_model

POLICY = "tiny"
TENANT = "local"
"""The tenant of an ingest without API keys."""

READY_S = {"ingest": 60.0, "sampler": 60.0}


class StackPlan(NamedTuple):
    """What to start.  `env` goes to every service, `service_env` to one of them by name."""

    samplers: int = 2
    loggers: int = 1
    scorers: int = 1
    ack_wait_s: float = 30.0
    model: TinyModel = TinyModel()
    engine: str = "scripted"
    env: Mapping[str, str] = {}
    service_env: Mapping[str, Mapping[str, str]] = {}
    folder: Path | None = None
    nats_store: Path | None = None
    nats_sync: str = "always"
    weed_data: Path | None = None
    weed_durable: bool = False
    ingests: int = 1
    """The first is called ingest, the others ingest-1 and so on."""


def scripted(*, token_rate: float = 0.0, eos_rate: float = 0.01, slots: int = 16, **changes: Any) -> StackPlan:
    """The scripted engine; `token_rate` tokens a second and sample, 0 = at once."""
    env = {
        "ROLLGRID_SAMPLER_SCRIPTED_TOKEN_RATE": str(token_rate),
        "ROLLGRID_SAMPLER_SCRIPTED_EOS_RATE": str(eos_rate),
        "ROLLGRID_SAMPLER_SLOTS": str(slots),
    }
    env |= changes.pop("env", {})
    return StackPlan(env=env, engine="scripted")._replace(**changes)


def vllm(*, slots: int = 8, **changes: Any) -> StackPlan:
    """Real vLLM on the CPU."""
    env = {"ROLLGRID_SAMPLER_SLOTS": str(slots), "ROLLGRID_SAMPLER_KV_CACHE_BYTES": str(64 * 2**20)}
    env |= changes.pop("env", {})
    return StackPlan(env=env, engine="vllm", samplers=1)._replace(**changes)


class Stack:
    """Servers and services by name.  Nothing is started until `start`."""

    def __init__(self, plan: StackPlan, folder: Path) -> None:
        self.plan, self.folder = plan, folder
        self.nats = NatsServer(folder / "nats", store=plan.nats_store, sync=plan.nats_sync)
        self.valkey = ValkeyServer(folder / "valkey")
        self.weed = SeaweedServer(folder / "weed", data=plan.weed_data, durable=plan.weed_durable)
        self.bucket = new_bucket()
        self.services: dict[str, ServiceProcess] = {}
        for service, count in (
            ("checkpoint_sync", 1),
            ("trajectory_logger", plan.loggers),
            ("scorer", plan.scorers),
            ("sampler", plan.samplers),
        ):
            for number in range(count):
                self._add(service, service if count == 1 and service != "sampler" else f"{service}-{number}")
        for number in range(plan.ingests):
            self._add("ingest", f"ingest-{number}" if number else "ingest")

    def _add(self, service: str, name: str) -> None:
        env = {**self.environment(), **self.plan.service_env.get(name, {})}
        self.services[name] = ServiceProcess(service, self.folder / "logs", env, name=name)

    def environment(self) -> dict[str, str]:
        folder = str(tiny_model(self.plan.model))
        models = [{"name": POLICY, "path": folder, "dtype": self.plan.model.dtype}]
        return {
            **self.nats.env(),
            **self.valkey.env(),
            **self.weed.env(self.bucket),
            "ROLLGRID_NATS_ACK_WAIT_S": str(self.plan.ack_wait_s),
            "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps(models),
            "ROLLGRID_SAMPLER_ENGINE": self.plan.engine,
            "ROLLGRID_SAMPLER_POLICY": POLICY,
            "ROLLGRID_SAMPLER_MODEL": folder,
            "ROLLGRID_SAMPLER_DTYPE": self.plan.model.dtype,
            "ROLLGRID_SAMPLER_CACHE": str(self.folder / "versions"),
            "ROLLGRID_INGEST_CACHE_DIR": str(self.folder / "tokenizers"),
            **self.plan.env,
        }

    @property
    def url(self) -> str:
        return self["ingest"].health_url

    def __getitem__(self, name: str) -> ServiceProcess:
        return self.services[name]

    def named(self, service: str) -> list[ServiceProcess]:
        return [process for process in self.services.values() if process.service == service]

    def processes(self) -> dict[str, Process]:
        return {"nats": self.nats, "valkey": self.valkey, "weed": self.weed, **self.services}

    def start(self) -> None:
        """Servers, then all services at once; returns when each is ready."""
        self.start_servers()
        for service in self.services.values():
            service.start()
        for service in self.services.values():
            service.wait_ready(self.ready_s(service))

    def start_servers(self) -> None:
        """The three servers alone; `heal` starts the services."""
        for server in (self.nats, self.valkey, self.weed):
            server.start()
        for server in (self.nats, self.valkey, self.weed):
            server.wait_ready(40)

    def ready_s(self, service: ServiceProcess) -> float:
        return 180.0 if service.service == "sampler" and self.plan.engine == "vllm" else 60.0

    def heal(self) -> None:
        """Everything runs and is ready again."""
        for process in self.processes().values():
            process.resume()
            if not process.running:
                process.start()
        for server in (self.nats, self.valkey, self.weed):
            server.wait_ready(40)
        for service in self.services.values():
            service.wait_ready(self.ready_s(service))

    def kill(self) -> None:
        """End everything started here, services first."""
        for process in reversed(self.processes().values()):
            with contextlib.suppress(OSError):
                process.kill()

    def logs(self, lines: int = 25) -> str:
        """The end of every log, for a failing test's report."""
        return "\n".join(f"--- {name}\n{process.log_tail(lines)}" for name, process in self.processes().items())


@contextlib.contextmanager
def stack(plan: StackPlan, *, start: bool = True) -> Iterator[Stack]:
    """A running stack in a folder of its own (or `plan.folder`, which is kept)."""
    with contextlib.ExitStack() as exits:
        folder = plan.folder or exits.enter_context(scratch("stack"))
        pipe = Stack(plan, folder)
        exits.callback(pipe.kill)
        if start:
            pipe.start()
        yield pipe
