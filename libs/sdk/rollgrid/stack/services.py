"""The table of services: how each is started, with which settings, and when it stops."""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from rollgrid.errors import ConfigurationError

from .config import StackConfig, core_sets
from .home import Credentials, Home
from .parts import Part
from .processes import port_is_free
from .seaweed import s3_part
from .servers import LOOPBACK, free_port, nats_part, redis_part

DEFAULT_PORT = 8000
DRAIN_S = 15.0
"""How long a service may take to end what it holds; what it drops then is done again by another."""

CPU_BLOCK_SIZE = "32"
"""KV block of vLLM on a CPU: with its own 128 the samples of a group hardly share a short prompt."""

SHARED_SETTINGS = ("LOG_LEVEL", "LOG_FORMAT", "DRAIN_S")
"""`ROLLGRID_<NAME>` goes to every service, which reads its own `ROLLGRID_<SERVICE>_<NAME>`."""

OVERRIDABLE = {*SHARED_SETTINGS, "OMP_THREADS_BIND", "BLOCK_SIZE", "MAX_MODEL_LEN"}
"""Settings that the caller's environment may decide; the others make a service a part of this very stack."""

SERVER_VARIABLES = ("NATS_URL", "REDIS_URL", "S3_ENDPOINT")
CREDENTIAL_VARIABLES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Ports:
    """Ports by name, the same as at the last start wherever they are still free."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._earlier = home.read_ports()
        self.taken: dict[str, int] = {}

    def __call__(self, name: str, preferred: int | None = None) -> int:
        used = set(self.taken.values())
        for number in (self._earlier.get(name), preferred):
            if number is not None and number not in used and port_is_free(number):
                break
        else:
            number = free_port(used)
        self.taken[name] = number
        return number

    def fixed(self, name: str, number: int) -> int:
        """Exactly this port; raises ConfigurationError when somebody has it."""
        if not port_is_free(number):
            raise ConfigurationError(f"port {number} is taken; choose another with --port")
        self.taken[name] = number
        return number

    def save(self) -> None:
        self._home.write_ports({**self._earlier, **self.taken})


class Service(NamedTuple):
    """One row: `own` are its settings beyond the shared ones, without the prefix; see `Part` for `facts`."""

    name: str
    module: str
    stage: int
    own: Mapping[str, str]
    port: str = "HEALTH_PORT"
    facts: Mapping[str, str] = MappingProxyType({})

    @property
    def prefix(self) -> str:
        return f"{self.module.upper()}_"


def service_rows(config: StackConfig, home: Home, suffix: str = "") -> list[Service]:
    """Every service process of this stack; `suffix` tells its workers from those of other machines.

    Stages: the higher ones stop first.
    """
    model: dict[str, object] = {"name": config.policy, "path": config.model, "dtype": config.dtype}
    if config.max_model_len:
        model["max_model_len"] = config.max_model_len
    parsers = {"tool_parser": config.tool_parser, "reasoning_parser": config.reasoning_parser}
    model |= {name: parser for name, parser in parsers.items() if parser}
    rows = [
        Service("checkpoint-sync", "rollgrid_checkpoint_sync", 1, {"MODELS": json.dumps([model])}),
        Service("trajectory-logger", "rollgrid_trajectory_logger", 2, {}, facts={"ledger": "active"}),
        Service("scorer", "rollgrid_scorer", 3, {}),
    ]
    for index, cores in enumerate(core_sets(config.samplers)):
        own = {
            "INSTANCE": f"sampler-{index}{suffix}",
            "ENGINE": config.engine,
            "POLICY": config.policy,
            "MODEL": config.model,
            "DTYPE": config.dtype,
            "DEVICE": config.device,
            "CACHE": str(home.data / "versions"),
        }
        if config.engine == "vllm" and config.device == "cpu":
            own |= {"OMP_THREADS_BIND": cores, "BLOCK_SIZE": CPU_BLOCK_SIZE}
        if config.max_model_len:
            own["MAX_MODEL_LEN"] = str(config.max_model_len)
        if config.openai_url:
            own["OPENAI_URL"] = config.openai_url
        rows.append(Service(f"sampler-{index}", "rollgrid_sampler", 4, own))
    door = {"HOST": LOOPBACK, "KEYS_FILE": str(home.keys_file), "CACHE_DIR": str(home.data / "tokenizers")}
    rows.append(Service("ingest", "rollgrid_ingest", 5, door, port="PORT"))
    return rows


def build_parts(
    home: Home, config: StackConfig, secrets: Credentials, ports: Ports, env: Mapping[str, str], run: str
) -> list[Part]:
    """All parts of the stack, servers first; `run` makes the services' names unique.  Raises ConfigurationError."""
    config.check()
    servers = [
        nats_part(home, secrets, ports, env),
        redis_part(home, secrets, ports, env),
        s3_part(home, secrets, ports, env, fsync=config.s3_fsync),
    ]
    shared = _inherited(env)
    for server in servers:
        shared |= server.exports
    services = []
    alone = not servers[0].external
    suffix = "" if alone else "-" + hashlib.sha256(f"{platform.node()}{home.root}".encode()).hexdigest()[:6]
    for row in service_rows(config, home, suffix):
        if row.name == "ingest":
            number = ports.fixed("ingest", config.port) if config.port else ports("ingest", DEFAULT_PORT)
        else:
            number = ports(f"health_{row.name}")
        instance = row.own.get("INSTANCE", f"{row.name}-{run[:6]}")
        own = {**row.own, "INSTANCE": instance, "DRAIN_S": str(DRAIN_S), row.port: str(number)}
        own |= {name: env[f"ROLLGRID_{name}"] for name in SHARED_SETTINGS if f"ROLLGRID_{name}" in env}
        named = {f"{row.prefix}{name}": value for name, value in own.items()}
        named |= {
            f"{row.prefix}{name}": env[f"{row.prefix}{name}"] for name in OVERRIDABLE if f"{row.prefix}{name}" in env
        }
        part = Part(
            name=row.name,
            kind="service",
            stage=row.stage,
            url=f"http://{LOOPBACK}:{number}",
            instance=instance,
            facts=dict(row.facts) if alone else {},  # elsewhere another machine's ledger may be the active one
            argv=(sys.executable, "-m", row.module),
            env={**shared, **named},
            cwd=home.root,
            stop_s=DRAIN_S + 10.0,
        )
        services.append(part)
    ports.save()
    return servers + services


def _inherited(env: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment for the services: no addresses of servers, no credentials, no virtual home."""
    dropped = {*SERVER_VARIABLES, *CREDENTIAL_VARIABLES, "ROLLGRID_URL", "ROLLGRID_API_KEY", "ROLLGRID_HOME"}
    return {name: value for name, value in env.items() if name not in dropped} | {"PYTHONUNBUFFERED": "1"}
