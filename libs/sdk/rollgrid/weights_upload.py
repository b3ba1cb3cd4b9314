"""One rank's part of a publication: tensors and files out, in threads, then its shard, then perhaps the commit."""

from __future__ import annotations

import hashlib
import pathlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
from rollgrid_contracts import ids

from . import calls
from .errors import ConfigurationError, DeadlineExceeded, RollgridError, UploadIncomplete, VersionSuperseded
from .transport import Call
from .weights_delta import Snapshot, delta_body, snapshot_of
from .weights_live import PublishedVersion
from .weights_source import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DELTA,
    FULL,
    LORA,
    SHARD_BYTES,
    Source,
    adapter_tensor_name,
    config_bytes,
    host_tensor,
    nbytes,
    read_source,
    serialised,
)

if TYPE_CHECKING:
    from rollgrid_contracts.checkpoints import TensorInfo

    from .transport import SyncTransport

PARALLEL = 4
"""Files written and sent at once; so many shards are in memory beside the one that is being filled."""

Sent = Callable[[str, int, int], None]
"""Told (file, bytes sent, its size) while a file goes out."""

TRIES = 3
"""How often a file is sent that does not arrive as it left."""

TIMEOUT_S = 3600.0
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 2.0


class UploadOptions(TypedDict, total=False):
    """Of `Weights.begin`; the meanings as in `Weights.publish`.  `rank` of `world` ranks is this one."""

    kind: str
    step: int | None
    upload: str | None
    rank: int
    world: int
    version: int | None
    base_version: int | None
    adapter_config: Any
    base: Any
    next_within_s: float | None
    timeout: float
    sent: Sent | None


class WeightsUpload:
    """What `client.weights.begin` gives: `put` this rank's tensors, then `finish`, and on one rank `commit`.

    As a context manager it finishes at the end of the block; an exception inside publishes nothing.
    Not for several threads at once.
    """

    def __init__(self, transport: SyncTransport, policy: str, **options: Unpack[UploadOptions]) -> None:
        kind, upload = options.get("kind", FULL), options.get("upload")
        rank, world = options.get("rank", 0), options.get("world", 1)
        if kind not in (FULL, LORA, DELTA):
            raise ConfigurationError(f"kind is {kind!r}; full, lora and delta are offered")
        self._base: Snapshot | None = None
        if (base := options.get("base")) is not None:
            self._base = snapshot_of(read_source(base, FULL, None, copy=True))
        self._described: list[TensorInfo] = []
        if world > 1 and upload is None:
            raise ConfigurationError("several ranks publish under one name: give upload, the same on every rank")
        if not 0 <= rank < world:
            raise ConfigurationError(f"rank is {rank}, not in 0..{world - 1}")
        config = options.get("adapter_config")
        given = config_bytes(config) if config is not None else None
        self._transport, self._sent = transport, options.get("sent")
        self.policy, self.kind, self.rank, self.world = policy, kind, rank, world
        self._timeout = options.get("timeout", TIMEOUT_S)
        self.deadline = time.monotonic() + self._timeout
        named = ("step", "version", "base_version", "next_within_s")
        terms = {"kind": kind, "upload": upload or ids.new_key(), "world": world}
        terms |= {name: options.get(name) for name in named}
        self.upload: str = self._send(calls.begin_upload(policy, terms)).upload
        self._pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="rollgrid-weights")
        self._places = threading.Semaphore(PARALLEL)
        self._sending: list[Future[dict[str, Any]]] = []
        self._held: dict[str, Any] = {}
        self._held_bytes = 0
        self._names: set[str] = set()
        self._files = 0
        self._finished = False
        if given is not None:
            self.put_bytes(ADAPTER_CONFIG, given)

    def put(self, name: str, tensor: Any, *, copy: bool = True) -> None:
        """Take a tensor (torch or numpy), whole; each belongs to one rank.

        It is copied to host memory before this returns, unless not even a `copy` is wanted: then it must
        not change until `finish`.  Waits while four files of 256 MiB are on their way.

        Raises:
            ConfigurationError: it is no tensor, or the name came before.
            RollgridError: an earlier part could not be sent.
        """
        self._refuse_finished()
        self._raise_failed()
        name = adapter_tensor_name(name) if self.kind == LORA else name
        if name in self._names:
            raise ConfigurationError(f"{name} was put twice")
        held = host_tensor(name, tensor, copy=copy)
        size = nbytes(held)
        if self._held and self._held_bytes + size > SHARD_BYTES and self.kind != LORA:
            self._flush()
        self._held[name] = held
        self._names.add(name)
        self._held_bytes += size

    def put_file(self, path: pathlib.Path, name: str | None = None) -> None:
        """Send a file as it is."""
        self._refuse_finished()
        self._submit(name or path.name, lambda: path)

    def describe(self, tensors: Iterable[TensorInfo]) -> None:
        """What the tensors of this rank are once the version is whole; of a delta they must be told."""
        self._described += tensors

    def put_bytes(self, name: str, content: bytes) -> None:
        self._refuse_finished()
        self._submit(name, lambda: content)

    def finish(self) -> None:
        """Wait until everything of this rank is stored, and say so.  Safe to repeat."""
        if self._finished:
            return
        if self._held:
            self._flush()
        files = [self._result(future) for future in self._sending]
        shard: dict[str, Any] = {"rank": self.rank, "files": files}
        if self._described:
            shard["tensors"] = [msgspec.to_builtins(tensor) for tensor in self._described]
        self._send(calls.finish_shard(self.policy, self.upload, shard))
        self._finished = True
        self._pool.shutdown()

    def commit(self, *, rollout: Mapping[str, Any] | None = None, timeout: float | None = None) -> PublishedVersion:
        """Finish, wait for the other ranks, and make it a version; safe to repeat, also from several ranks.

        `rollout` asks for canaries and the like (docs/reference/weights.md).

        Raises:
            UploadIncomplete: ranks have not finished after `timeout` seconds; it names them.
            VersionUnavailable: another publisher has the number.
            VersionSuperseded: this upload was committed before, and later versions have followed.
        """
        self.finish()
        deadline = self.deadline if timeout is None else min(self.deadline, time.monotonic() + timeout)
        body = {} if rollout is None else {"rollout": dict(rollout)}
        pause = _FIRST_PAUSE_S
        while True:
            try:
                committed = self._send(calls.commit_upload(self.policy, self.upload, body))
            except UploadIncomplete:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                pause = min(pause * 2, _MAX_PAUSE_S)
            else:
                if not committed.created:
                    self._refuse_superseded(committed.version)
                return PublishedVersion(self._transport, self.policy, committed.version)

    def stop(self) -> None:
        """From another thread: whatever goes on here ends at its next request, with DeadlineExceeded."""
        self.deadline = float("-inf")

    def abandon(self) -> None:
        """Send nothing more; what was sent expires by itself."""
        self.stop()
        self._finished = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> WeightsUpload:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.abandon()
            return
        try:
            self.finish()
        except BaseException:
            self.abandon()
            raise

    # -- sending --------------------------------------------------------------------------------

    def _flush(self) -> None:
        tensors, self._held, self._held_bytes = self._held, {}, 0
        self._files += 1
        if self.kind == DELTA:
            self._put_delta(tensors)
            return
        name = ADAPTER_WEIGHTS if self.kind == LORA else f"model-{self.rank:05d}-{self._files:05d}.safetensors"
        self._submit(name, lambda: serialised(tensors))

    def _put_delta(self, tensors: Mapping[str, Any]) -> None:
        if self._base is None:
            raise ConfigurationError("the tensors of a delta need base: those of base_version, as this rank had them")
        target = snapshot_of(Source(DELTA, tensors=tensors))
        body = delta_body(self._base, target, sorted(tensors))
        assert body is not None, "no bound was given"
        self.describe(target.tensors.values())
        self.put_bytes(f"model-{self.rank:05d}-{self._files:05d}.rgdelta", body)

    def _submit(self, name: str, content: Callable[[], bytes | pathlib.Path]) -> None:
        if not self._places.acquire(timeout=max(0.0, self.deadline - time.monotonic())):
            raise self._out_of_time()
        self._sending.append(self._pool.submit(self._put, name, content))

    def _put(self, name: str, content: Callable[[], bytes | pathlib.Path]) -> dict[str, Any]:
        """In a thread of the pool: write, send, and give what was sent as the shard lists it."""
        try:
            body = content()
            size = len(body) if isinstance(body, bytes) else body.stat().st_size
            report = self._sent
            sent = None if report is None else lambda told: report(name, told, size)
            digest = sha256_of(body)
            for _ in range(TRIES):
                taken = self._send(calls.put_file(self.policy, self.upload, name, body, sent))
                if taken.sha256 == digest:
                    break  # else it changed on its way; after the last try the shard is refused for it
            if report is not None:
                report(name, size, size)  # a small body goes out at once and says nothing on its way
            return {"name": name, "size": size, "sha256": digest}
        finally:
            self._places.release()

    def _send(self, call: Call[Any]) -> Any:
        return self._transport.send(call, deadline=self.deadline, budget_s=self._transport.retries.outage_budget_s)

    def _result(self, future: Future[dict[str, Any]]) -> dict[str, Any]:
        try:
            return future.result(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError as error:
            if isinstance(error, RollgridError):
                raise
            raise self._out_of_time() from error

    def _raise_failed(self) -> None:
        for future in self._sending:
            if future.done():
                future.result()

    def _refuse_superseded(self, version: int) -> None:
        """Of a trainer that went back and publishes a step again under its name: nobody would serve it."""
        if self._send(calls.version(self.policy, version)).status == "superseded":
            why = f"upload {self.upload} was committed before, and later versions have followed: take a new name to publish it again"
            raise VersionSuperseded(self.policy, version, "version_unavailable", why, "upload", None)

    def _refuse_finished(self) -> None:
        if self._finished:
            raise ConfigurationError(f"upload {self.upload} of {self.policy} has ended")

    def _out_of_time(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.policy}: not uploaded after {self._timeout:g} s; nothing was published")


def sha256_of(body: bytes | pathlib.Path) -> str:
    if isinstance(body, bytes):
        return hashlib.sha256(body).hexdigest()
    with open(body, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
