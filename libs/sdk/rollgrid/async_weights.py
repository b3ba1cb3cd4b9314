"""`client.weights` of the asyncio client: the blocking one's code in threads, awaited."""

from __future__ import annotations

import asyncio
import pathlib
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from . import calls
from .answers import Version, VersionList
from .transport import SyncTransport
from .weights import Publishing, PublishOptions, Weightlike, Weights, still_going
from .weights_live import AsyncPublishedVersion
from .weights_upload import TIMEOUT_S, UploadOptions, WeightsUpload

if TYPE_CHECKING:
    from .transport import AsyncTransport

T = TypeVar("T")


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
                raise still_going(self._publishing.what, timeout) from None
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
