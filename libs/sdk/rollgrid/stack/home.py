"""The state folder of a stack on this machine: who runs there, under which secrets, on which ports.

`$ROLLGRID_HOME`, else ./.rollgrid if there is one, else ~/.rollgrid.  Every file with a secret is
0600, and appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from rollgrid_contracts.accounts import TenantAccount

from rollgrid.errors import ConfigurationError

from .processes import ProcessId

T = TypeVar("T")
HOME_VARIABLE = "ROLLGRID_HOME"
FOLDER = ".rollgrid"
LOG_LIMIT_BYTES = 64 * 1024 * 1024


class Credentials(msgspec.Struct, frozen=True, kw_only=True):
    """Random secrets of this stack, made once."""

    nats_user: str = "rollgrid"
    nats_password: str
    redis_password: str
    s3_access_key: str
    s3_secret_key: str
    api_key: str


class PartState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One part as its supervisor sees it.

    `state` is waiting | starting | ready | not_ready | restarting | stopping | stopped; `problems` says
    what keeps it from being ready; `url` is where it answers (/readyz of a service), without secrets.
    An external server has no process.
    """

    name: str
    kind: str
    state: str = "waiting"
    process: ProcessId | None = None
    url: str = ""
    log: str = ""
    version: str = ""
    restarts: int = 0
    problems: dict[str, str] = {}


class StackState(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """stack.json: written by the supervisor at every change, removed when it has stopped."""

    url: str
    api_key: str
    supervisor: ProcessId
    run: str = ""
    started_at: float
    engine: str = ""
    policy: str = ""
    model: str = ""
    ready: bool = False
    ready_at: float = 0.0
    stopping: bool = False
    parts: tuple[PartState, ...] = ()
    ports: dict[str, int] = {}

    @property
    def alive(self) -> bool:
        """Whether the supervisor that wrote this still runs."""
        return self.supervisor.alive

    @property
    def pids(self) -> dict[str, int]:
        return {part.name: part.process.pid for part in self.parts if part.process is not None}


def find_home() -> Path:
    """The state folder by the rule above; it need not exist yet."""
    named = os.environ.get(HOME_VARIABLE)
    if named:
        return Path(named).expanduser().absolute()
    here = Path.cwd() / FOLDER
    return here if here.is_dir() else Path.home() / FOLDER


def find_stack(home: Path | None = None) -> StackState | None:
    """The stack that runs on this machine now, or None."""
    state = Home(home or find_home()).read_state()
    return state if state is not None and state.alive else None


class Home:
    """The files below one state folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.data = root / "data"
        self.logs = root / "logs"
        self.conf = root / "conf"
        self.state_file = root / "stack.json"
        self.keys_file = self.conf / "keys.json"
        self.config_file = self.conf / "stack-config.json"
        self.tenants = root / "tenants"

    def create(self) -> None:
        """Make the folders, readable by their owner only.  Raises ConfigurationError."""
        try:
            for folder in (self.root, self.data, self.logs, self.conf):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"cannot use {self.root} as state folder: {error}") from error

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @contextlib.contextmanager
    def locked(self) -> Iterator[bool]:
        """Hold the folder for one supervisor; False when another has it.  The kernel drops it with the process."""
        with open(self.root / "lock", "a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True

    def read_state(self) -> StackState | None:
        return read_json(self.state_file, StackState)

    def write_state(self, state: StackState) -> None:
        write_private(self.state_file, msgspec.json.format(msgspec.json.encode(state)))

    def clear_state(self) -> None:
        self.state_file.unlink(missing_ok=True)

    def credentials(self) -> Credentials:
        """The stack's secrets, made on first use, and ingest's keys file beside them."""
        path = self.root / "credentials.json"
        found = read_json(path, Credentials)
        if found is None:
            if path.exists():
                raise ConfigurationError(f"{path} is damaged; the data below {self.data} was written under it")
            found = Credentials(
                nats_password=secrets.token_urlsafe(24),
                redis_password=secrets.token_urlsafe(24),
                s3_access_key=secrets.token_hex(10),
                s3_secret_key=secrets.token_hex(24),
                api_key="rg-" + secrets.token_urlsafe(32),
            )
            write_private(path, msgspec.json.format(msgspec.json.encode(found)))
        entry = {
            "key_sha256": hashlib.sha256(found.api_key.encode()).hexdigest(),
            "tenant": "local",
            "scopes": ["submit", "read", "admin"],
            "name": "rollgrid up",
        }
        if not self.keys_file.exists():
            write_private(self.keys_file, msgspec.json.encode([entry]))
        return found

    def read_ports(self) -> dict[str, int]:
        """Ports of earlier starts, kept where they are free so that URLs survive a restart."""
        return read_json(self.root / "ports.json", dict[str, int]) or {}

    def write_ports(self, ports: dict[str, int]) -> None:
        write_private(self.root / "ports.json", msgspec.json.encode(ports))

    def trim_log(self, path: Path) -> None:
        """Bound a log that a running part appends to: the old text moves to <name>.log.1."""
        try:
            if path.stat().st_size < LOG_LIMIT_BYTES:
                return
            path.with_suffix(".log.1").write_bytes(path.read_bytes())
            os.truncate(path, 0)
        except FileNotFoundError:
            return


class TenantFile(msgspec.Struct, frozen=True, kw_only=True):
    """`tenants/<name>.json`: what a tenant of this stack needs to know, secrets included."""

    tenant: str
    url: str = ""
    api_key: str
    nats_url: str = ""
    nats_user: str
    nats_password: str
    followers: tuple[str, ...] = ("default",)

    @property
    def account(self) -> TenantAccount:
        return TenantAccount(tenant=self.tenant, password=self.nats_password, followers=self.followers)


def read_tenants(home: Home) -> list[TenantAccount]:
    """The tenants that were added to this stack.  Raises ConfigurationError for a file nobody can read."""
    return [found.account for found in tenant_files(home)]


def tenant_files(home: Home) -> list[TenantFile]:
    found: list[TenantFile] = []
    for path in sorted(home.tenants.glob("*.json")):
        tenant = read_json(path, TenantFile)
        if tenant is None:
            raise ConfigurationError(f"{path} is damaged; remove it or bring it back")
        found.append(tenant)
    return found


def read_json(path: Path, kind: type[T]) -> T | None:
    """None when the file is absent or not what it should be."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return None


def write_private(path: Path, data: bytes) -> None:
    """Write a 0600 file, durably and atomically."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as handle:
        handle.write(data)
        handle.flush()
        os.fsync(handle.fileno())
    unfinished.replace(path)
