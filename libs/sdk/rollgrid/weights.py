"""New weights for a policy: `client.weights`.

Nothing is visible before the commit; a version is immutable after it; numbers only grow.  Both clients
upload from threads, with the same code; the asyncio one awaits it.
"""

from __future__ import annotations

import asyncio
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack, overload

from . import calls
from .answers import Version, VersionList
from .errors import DeadlineExceeded
from .transport import SyncTransport
from .weights_live import AsyncPublishedVersion, PublishedVersion
from .weights_source import ADAPTER_CONFIG, Source, Tensors, read_source
from .weights_upload import TIMEOUT_S, Sent, UploadOptions, WeightsUpload

if TYPE_CHECKING:
    from .transport import AsyncTransport

T = TypeVar("T")
PENDING = 2
"""Publications of one client beside the trainer, waiting or under way; each holds a snapshot."""

Weightlike = Tensors | str | os.PathLike[str]


class PublishOptions(TypedDict, total=False):
    """Of `Weights.publish`, which says what they mean."""

    kind: str | None
    step: int | None
    version: int | None
    base_version: int | None
    adapter_config: Any
    next_within_s: float | None
    rollout: Mapping[str, Any] | None
    upload: str | None
    timeout: float
    sent: Sent | None


class Publication:
    """One publication, from what was read to the commit.  `run` blocks; `stop` from another thread ends it."""

    def __init__(self, transport: SyncTransport, policy: str, source: Source, options: PublishOptions) -> None:
        self._transport, self._policy, self._source, self._options = transport, policy, source, options
        self._upload: WeightsUpload | None = None
        self._stopped = threading.Event()

    def run(self) -> PublishedVersion:
        options = self._options
        with WeightsUpload(
            self._transport, self._policy, kind=self._source.kind, step=options.get("step"), upload=options.get("upload"),
            version=options.get("version"), base_version=options.get("base_version"),
            next_within_s=options.get("next_within_s"), timeout=options.get("timeout", TIMEOUT_S), sent=options.get("sent"),
        ) as upload:  # fmt: skip
            self._upload = upload
            if self._stopped.is_set():
                upload.stop()
            if self._source.config is not None:
                upload.put_bytes(ADAPTER_CONFIG, self._source.config)
            for path in self._source.files:
                upload.put_file(path)
            for name, tensor in self._source.tensors.items():
                upload.put(name, tensor, copy=False)
            return upload.commit(rollout=options.get("rollout"))

    def stop(self) -> None:
        self._stopped.set()
        if self._upload is not None:
            self._upload.stop()


class Publishing:
    """A publication under way beside the trainer (`block=False`)."""

    def __init__(self, future: Future[PublishedVersion], what: str) -> None:
        self.future, self.what = future, what

    def done(self) -> bool:
        return self.future.done()

    def result(self, timeout: float = TIMEOUT_S) -> PublishedVersion:
        """The committed version.

        Raises:
            DeadlineExceeded: it is not committed after `timeout` seconds; the publication goes on.
            RollgridError: whatever ended it; nothing was published.
        """
        try:
            return self.future.result(timeout)
        except TimeoutError:
            if self.future.done():
                return self.future.result()
            raise _still_going(self.what, timeout) from None

    def wait_live(self, timeout: float = TIMEOUT_S, *, min_workers: int | None = None) -> PublishedVersion:
        """`result`, then `PublishedVersion.wait_live`, within one `timeout`."""
        deadline = time.monotonic() + timeout
        return self.result(timeout).wait_live(max(0.0, deadline - time.monotonic()), min_workers=min_workers)


class Weights:
    """`client.weights`."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport
        self._places = threading.Semaphore(PENDING)
        self._starting = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None

    @overload
    def publish(
        self, policy: str, source: Weightlike, *, block: Literal[True] = True, **options: Unpack[PublishOptions]
    ) -> PublishedVersion: ...

    @overload
    def publish(
        self, policy: str, source: Weightlike, *, block: Literal[False], **options: Unpack[PublishOptions]
    ) -> Publishing: ...

    def publish(
        self, policy: str, source: Weightlike, *, block: bool = True, **options: Unpack[PublishOptions]
    ) -> PublishedVersion | Publishing:
        """Publish `source` as a new version: a state dict of torch tensors or numpy arrays, a folder, or a file.

        With `block=False` it returns as soon as the tensors are copied to host memory (of a folder: at
        once) and the rest goes on in threads, publications in the order of the calls; `result` of what is
        given is the version.  Two may be pending, the next call waits.

        - `kind` is "full" or "lora"; left out, a folder as PEFT saves it is lora.  The tensors of an adapter
          need `adapter_config`, PEFT's LoraConfig or its dict.  It sits on the newest full version, or on
          `base_version`.  Tensors that share memory are written once, under the name the base has.
        - The number is the next free one, or `version`.  `step` is kept with it.
        - `next_within_s` promises when the next version comes; `rollout` asks for canaries and the like.
        - `upload` names this publication: published again under the name, it is the same version.
        - `timeout` seconds it may take (an hour); `sent(file, bytes, size)` is told of the progress.

        Raises:
            VersionUnavailable: `version` exists already.
            InvalidRequest: the server refused a file, the configuration or an option; `field` names it.
            ConfigurationError: `source` holds nothing to publish.
            DeadlineExceeded: it is not committed in time.
        """
        if block:
            return self.publication(policy, source, options, copy=False).run()
        timeout = options.get("timeout", TIMEOUT_S)
        if not self._places.acquire(timeout=timeout):
            raise _still_going(policy, timeout)
        try:
            publication = self.publication(policy, source, options, copy=True)
            future = self._executor().submit(publication.run)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return Publishing(future, policy)

    def publication(self, policy: str, source: Weightlike, options: PublishOptions, *, copy: bool) -> Publication:
        found = read_source(source, options.get("kind"), options.get("adapter_config"), copy=copy)
        return Publication(self._transport, policy, found, options)

    def begin(self, policy: str, **options: Unpack[UploadOptions]) -> WeightsUpload:
        """Begin a publication from one or several processes: `put` tensors, `finish` on every rank, `commit` on one.

        The ranks of a sharded trainer pass the same `upload` name and `world`, and each its `rank`.  A
        name is used for one publication; a rank that comes again with other weights is refused.

            with client.weights.begin("policy", step=12, upload="run7-step-12", rank=rank, world=4) as upload:
                for name, tensor in shard.items():
                    upload.put(name, tensor)
                if rank == 0:
                    version = upload.commit(timeout=600)
        """
        return WeightsUpload(self._transport, policy, **options)

    def versions(self, policy: str) -> VersionList:
        """The versions that are kept, and how the newest is being rolled out."""
        return self._transport.send(calls.versions(policy))

    def version(self, policy: str, number: int) -> Version:
        """Where one version stands; raises NotFound for one that was never published."""
        return self._transport.send(calls.version(policy, number))

    def rollback(self, policy: str, number: int) -> PublishedVersion:
        """Go back to a version that was adopted before (0 = the base), on all workers at once.

        It holds until something newer than everything so far is published.

        Raises:
            VersionUnavailable: it was never adopted.
            VersionGone: its files were deleted.
        """
        changed = self._transport.send(calls.roll_back(policy, number))
        return PublishedVersion(self._transport, policy, number, changed.revision)

    def close(self) -> None:
        """Wait for the publications that are under way."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _executor(self) -> ThreadPoolExecutor:
        with self._starting:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="rollgrid-publish")
            return self._thread


def _still_going(what: str, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what}: what was to be published is still on its way after {timeout:g} s")


class AsyncPublishing:
    """As `Publishing`."""

    def __init__(self, publishing: Publishing, transport: AsyncTransport) -> None:
        self._publishing, self._transport = publishing, transport

    def done(self) -> bool:
        return self._publishing.done()

    async def result(self, timeout: float = TIMEOUT_S) -> AsyncPublishedVersion:
        """As `Publishing.result`; giving up waiting ends nothing."""
        try:
            async with asyncio.timeout(timeout):
                found = await asyncio.shield(asyncio.wrap_future(self._publishing.future))
        except TimeoutError:
            if not self._publishing.done():
                raise _still_going(self._publishing.what, timeout) from None
            found = self._publishing.result()
        return AsyncPublishedVersion(self._transport, found.policy, found.version)

    async def live(self, timeout: float = TIMEOUT_S, *, min_workers: int | None = None) -> AsyncPublishedVersion:
        """As `Publishing.wait_live`."""
        deadline = time.monotonic() + timeout
        version = await self.result(timeout)
        return await version.live(max(0.0, deadline - time.monotonic()), min_workers=min_workers)


class AsyncWeightsUpload:
    """As `WeightsUpload`, for `async with`."""

    def __init__(self, begin: Callable[[], WeightsUpload], transport: AsyncTransport) -> None:
        self._begin, self._transport = begin, transport
        self._upload: WeightsUpload | None = None

    @property
    def _begun(self) -> WeightsUpload:
        if self._upload is None:
            raise RuntimeError("use it as `async with client.weights.begin(…) as upload`")
        return self._upload

    async def put(self, name: str, tensor: Any) -> None:
        await asyncio.to_thread(self._begun.put, name, tensor)

    async def put_file(self, path: pathlib.Path, name: str | None = None) -> None:
        await asyncio.to_thread(self._begun.put_file, path, name)

    async def finish(self) -> None:
        await _stoppable(self._begun.finish, self._begun.stop)

    async def commit(
        self, *, rollout: Mapping[str, Any] | None = None, timeout: float | None = None
    ) -> AsyncPublishedVersion:
        upload = self._begun
        found = await _stoppable(lambda: upload.commit(rollout=rollout, timeout=timeout), upload.stop)
        return AsyncPublishedVersion(self._transport, found.policy, found.version)

    async def __aenter__(self) -> AsyncWeightsUpload:
        self._upload = await asyncio.to_thread(self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        upload = self._begun
        await _stoppable(lambda: upload.__exit__(kind, error, trace), upload.stop)


class AsyncWeights:
    """`client.weights` of the asyncio client."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._made: tuple[SyncTransport, Weights] | None = None

    def _blocking(self) -> Weights:
        """The same for threads, with connections of its own; made when it is first needed."""
        if self._made is None:
            transport = SyncTransport(self._transport.endpoint, self._transport.retries)
            self._made = transport, Weights(transport)
        return self._made[1]

    @overload
    async def publish(
        self, policy: str, source: Weightlike, *, block: Literal[True] = True, **options: Unpack[PublishOptions]
    ) -> AsyncPublishedVersion: ...

    @overload
    async def publish(
        self, policy: str, source: Weightlike, *, block: Literal[False], **options: Unpack[PublishOptions]
    ) -> AsyncPublishing: ...

    async def publish(
        self, policy: str, source: Weightlike, *, block: bool = True, **options: Unpack[PublishOptions]
    ) -> AsyncPublishedVersion | AsyncPublishing:
        """As `Weights.publish`; cancelled, it publishes nothing unless it was committing already."""
        blocking = self._blocking()
        if not block:
            publishing = await asyncio.to_thread(lambda: blocking.publish(policy, source, block=False, **options))
            return AsyncPublishing(publishing, self._transport)
        publication = await asyncio.to_thread(blocking.publication, policy, source, options, copy=False)
        found = await _stoppable(publication.run, publication.stop)
        return AsyncPublishedVersion(self._transport, found.policy, found.version)

    def begin(self, policy: str, **options: Unpack[UploadOptions]) -> AsyncWeightsUpload:
        """As `Weights.begin`, for `async with`."""
        blocking = self._blocking()
        return AsyncWeightsUpload(lambda: blocking.begin(policy, **options), self._transport)

    async def versions(self, policy: str) -> VersionList:
        return await self._transport.send(calls.versions(policy))

    async def version(self, policy: str, number: int) -> Version:
        return await self._transport.send(calls.version(policy, number))

    async def rollback(self, policy: str, number: int) -> AsyncPublishedVersion:
        """As `Weights.rollback`."""
        changed = await self._transport.send(calls.roll_back(policy, number))
        return AsyncPublishedVersion(self._transport, policy, number, changed.revision)

    async def close(self) -> None:
        if self._made is not None:
            transport, weights = self._made
            await asyncio.to_thread(weights.close)
            transport.close()


async def _stoppable(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """The result of `work` in a thread; a cancel makes it `stop` and waits for that, which is soon."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at: the cancel is what the caller hears of
        raise
