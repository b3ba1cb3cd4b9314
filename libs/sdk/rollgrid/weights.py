"""New weights for a policy: `client.weights`.

Nothing is visible before the commit; a version is immutable after it; numbers only grow.
"""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypedDict, Unpack, overload

from . import calls
from .answers import Version, VersionList
from .errors import ConfigurationError, DeadlineExceeded
from .transport import SyncTransport
from .weights_delta import (
    ANCHOR_EVERY,
    Anchors,
    Base,
    DeltaFile,
    Snapshot,
    Snapshots,
    delta_files,
    snapshot_of,
)
from .weights_live import PublishedVersion
from .weights_source import ADAPTER_CONFIG, AUTO, DELTA, FULL, Source, Tensors, read_source
from .weights_upload import TIMEOUT_S, Sent, UploadOptions, WeightsUpload

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
    anchor_every: int
    timeout: float
    sent: Sent | None


class Publication:
    """One publication, from what was read to the commit.  `run` blocks; `stop` from another thread ends it."""

    def __init__(
        self, transport: SyncTransport, policy: str, source: Source, options: PublishOptions, snapshots: Snapshots
    ) -> None:
        self._transport, self._policy, self._source, self._options = transport, policy, source, options
        self._snapshots = snapshots
        self._upload: WeightsUpload | None = None
        self._stopped = threading.Event()

    def run(self) -> PublishedVersion:
        if self._source.kind not in (DELTA, AUTO):
            return self._whole(self._source.kind, self._options.get("base_version"))
        snapshot = snapshot_of(self._source)
        delta = self._delta(snapshot)
        if delta is not None:
            base, files = delta
            with self._begun(DELTA, base.version) as upload:
                upload.describe(snapshot.tensors.values())
                for file in files:
                    upload.put_bytes(file.name, file.body)
                published = upload.commit(rollout=self._options.get("rollout"))
        else:
            published = self._whole(FULL, None)
        self._snapshots.keep(published.version, snapshot)
        return published

    def _delta(self, snapshot: Snapshot) -> tuple[Base, list[DeltaFile]] | None:
        """What a delta would be made of; None where a full version is to be published instead."""
        must = self._source.kind == DELTA
        versions = self._transport.send(calls.versions(self._policy))
        base = self._snapshots.base(versions)
        if base is None:
            if must:
                raise ConfigurationError(
                    f"{self._policy}: the fleet holds no version that this process has published and still has in"
                    " memory (it is new, or was restarted), so there is nothing a delta could go on from: publish kind"
                    " auto or full"
                )
            return None
        if must:
            files = delta_files(base.snapshot, snapshot)
            assert files is not None, "no bound was given"
            return base, files
        if self._is_pruned(base):
            return None
        anchors = Anchors(versions, base.version, snapshot.bytes, self._options.get("anchor_every", ANCHOR_EVERY))
        if anchors.due():
            return None
        try:
            files = delta_files(base.snapshot, snapshot, most=anchors.most)
        except ConfigurationError:
            return None  # other tensors than before
        if files is None or anchors.due(sum(len(file.body) for file in files)):
            return None
        return base, files

    def _is_pruned(self, base: Base) -> bool:
        """Whether a delta was refused because what it goes on from cannot be rebuilt any more: the next would be, too."""
        later = [self._transport.send(calls.version(self._policy, one)) for one in self._snapshots.after(base.version)]
        return any(one.error is not None and one.error.field == "base_version" for one in later)

    def _begun(self, kind: str, base_version: int | None) -> WeightsUpload:
        options = self._options
        upload = WeightsUpload(
            self._transport, self._policy, kind=kind, step=options.get("step"), upload=options.get("upload"),
            version=options.get("version"), base_version=base_version,
            next_within_s=options.get("next_within_s"), timeout=options.get("timeout", TIMEOUT_S), sent=options.get("sent"),
        )  # fmt: skip
        self._upload = upload
        if self._stopped.is_set():
            upload.stop()
        return upload

    def _whole(self, kind: str, base_version: int | None) -> PublishedVersion:
        with self._begun(kind, base_version) as upload:
            if self._source.config is not None:
                upload.put_bytes(ADAPTER_CONFIG, self._source.config)
            for path in self._source.files:
                upload.put_file(path)
            for name, tensor in self._source.tensors.items():
                upload.put(name, tensor, copy=False)
            return upload.commit(rollout=self._options.get("rollout"))

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
            raise still_going(self.what, timeout) from None

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
        self._snapshots: defaultdict[str, Snapshots] = defaultdict(Snapshots)
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
        - "delta" sends what has changed since the newest version that this client published and the fleet is known to
          hold (extra `deltas`); "auto" does so where it is possible and less than a third of the full bytes, with a full
          version after every `anchor_every` (32) deltas and where those come to half of one.  Both keep the tensors in host memory for the next one.
        - The number is the next free one, or `version`.  `step` is kept with it.
        - `next_within_s` promises when the next version comes; `rollout` asks for canaries and the like.
        - `upload` names this publication: published again under the name, it is the same version.
        - `timeout` seconds it may take (an hour); `sent(file, bytes, size)` is told of the progress.

        Raises:
            VersionUnavailable: `version` exists already.
            VersionSuperseded: it was published under `upload` before, and later versions have followed.
            InvalidRequest: the server refused a file, the configuration or an option; `field` names it.
            ConfigurationError: `source` holds nothing to publish.
            DeadlineExceeded: it is not committed in time.
        """
        if block:
            return self.publication(policy, source, options, copy=False).run()
        timeout = options.get("timeout", TIMEOUT_S)
        if not self._places.acquire(timeout=timeout):
            raise still_going(policy, timeout)
        try:
            publication = self.publication(policy, source, options, copy=True)
            future = self._executor().submit(publication.run)
        except BaseException:
            self._places.release()
            raise
        future.add_done_callback(lambda _: self._places.release())
        return Publishing(future, policy)

    def publication(self, policy: str, source: Weightlike, options: PublishOptions, *, copy: bool) -> Publication:
        kind = options.get("kind")
        found = read_source(source, kind, options.get("adapter_config"), copy=copy or kind in (DELTA, AUTO))
        return Publication(self._transport, policy, found, options, self._snapshots[policy])

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


def still_going(what: str, timeout: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"{what}: what was to be published is still on its way after {timeout:g} s")
