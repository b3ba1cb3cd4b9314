"""New weights for a policy: upload, commit, wait until the fleet runs them.

A version is a folder with safetensors files.  Nothing is visible before the commit; a version is
immutable after it; numbers only grow.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pathlib
import time
from typing import TYPE_CHECKING

from . import calls
from .answers import Policy, Version
from .errors import ConfigurationError, DeadlineExceeded, VersionRefused, VersionUnavailable

if TYPE_CHECKING:
    from .transport import AsyncTransport, SyncTransport

_POLL_S = 0.1
_RACES = 5
"""How often to try the next number when other publishers keep taking it."""


def weight_files(source: str | os.PathLike[str]) -> tuple[pathlib.Path, ...]:
    """The safetensors files of `source`, a folder or one file, sorted by name.

    Raises:
        ConfigurationError: there are none.
    """
    path = pathlib.Path(source)
    files = (path,) if path.is_file() else tuple(sorted(path.glob("*.safetensors")))
    if not files or any(file.suffix != ".safetensors" for file in files):
        raise ConfigurationError(f"{path} holds no *.safetensors file to publish")
    return files


def file_digest(path: pathlib.Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def facts_of(files: tuple[pathlib.Path, ...], step: int | None) -> dict[str, object]:
    """The body of a commit: what was uploaded, so that the server proves it before it counts."""
    listed = [{"name": file.name, "size": file.stat().st_size, "sha256": file_digest(file)} for file in files]
    return {"kind": "full", "files": listed, "step": step}


def live_on(policy: Policy, version: int) -> bool:
    """Every worker of the policy that takes work runs `version` or a later one, and there is one."""
    running = [
        loaded.version
        for worker in policy.workers
        if not worker.draining and worker.quarantined is None
        for loaded in worker.loaded
        if loaded.policy == policy.policy
    ]
    return bool(running) and min(running) >= version


def _not_live(policy: Policy, version: int, timeout: float) -> DeadlineExceeded:
    running = {w.worker: [v.version for v in w.loaded if v.policy == policy.policy] for w in policy.workers}
    return DeadlineExceeded(
        f"{policy.policy}@{version} is not live after {timeout:g} s: desired {policy.desired}, "
        f"newest {policy.newest}, running {running or 'nowhere'}"
    )


def _refuse(state: Version) -> None:
    if state.status == "refused" and state.error is not None:
        error = state.error
        raise VersionRefused(state.policy, state.version, error.code, error.message, error.field, error.limit)


class _Numbers:
    """Chooses version numbers: beyond the newest the server names, and beyond those tried here.

    The server learns of a commit a moment after it, so its `newest` alone may name a taken number.
    """

    def __init__(self) -> None:
        self._tried: dict[str, int] = {}

    def next(self, policy: str, state: Policy) -> int:
        self._tried[policy] = max(self._tried.get(policy, 0), state.newest) + 1
        return self._tried[policy]


def _lost_races(policy: str) -> VersionUnavailable:
    return VersionUnavailable(
        f"other publishers took the next version of {policy} {_RACES} times", code="version_unavailable", status=409
    )


class PublishedVersion:
    """A committed version; samples may run on it from now on."""

    def __init__(self, transport: SyncTransport, policy: str, version: int) -> None:
        self._transport = transport
        self.policy = policy
        self.version = version

    def wait_live(self, timeout: float = 120.0) -> PublishedVersion:
        """Return once every worker of the policy runs it.

        Raises:
            DeadlineExceeded: it does not after `timeout` seconds.
            VersionRefused: its bytes were examined and refused.
        """
        deadline = time.monotonic() + timeout
        while True:
            state = self._transport.send(calls.policy(self.policy), deadline=deadline, budget_s=timeout)
            if live_on(state, self.version):
                return self
            if state.desired < self.version:
                _refuse(self._transport.send(calls.version(self.policy, self.version), deadline=deadline))
            if time.monotonic() + _POLL_S > deadline:
                raise _not_live(state, self.version, timeout)
            time.sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"PublishedVersion({self.policy}@{self.version})"


class Weights:
    """`client.weights`."""

    def __init__(self, transport: SyncTransport) -> None:
        self._transport = transport
        self._numbers = _Numbers()

    def publish(
        self, policy: str, source: str | os.PathLike[str], *, step: int | None = None, version: int | None = None
    ) -> PublishedVersion:
        """Upload the safetensors of `source` (a folder or a file) and commit them as a new version.

        The version's number is the next free one unless `version` names it.

        Raises:
            VersionUnavailable: `version` exists already.
        """
        files = weight_files(source)
        facts = facts_of(files, step)
        for _ in range(_RACES):
            number = version or self._numbers.next(policy, self._transport.send(calls.policy(policy)))
            try:
                for file in files:
                    self._transport.send(calls.put_file(policy, number, file))
                self._transport.send(calls.commit_version(policy, number, facts))
            except VersionUnavailable:
                if version is not None:
                    raise
                continue
            return PublishedVersion(self._transport, policy, number)
        raise _lost_races(policy)


class AsyncPublishedVersion:
    """As `PublishedVersion`."""

    def __init__(self, transport: AsyncTransport, policy: str, version: int) -> None:
        self._transport = transport
        self.policy = policy
        self.version = version

    async def wait_live(self, timeout: float = 120.0) -> AsyncPublishedVersion:
        """As `PublishedVersion.wait_live`."""
        deadline = time.monotonic() + timeout
        while True:
            state = await self._transport.send(calls.policy(self.policy), deadline=deadline, budget_s=timeout)
            if live_on(state, self.version):
                return self
            if state.desired < self.version:
                _refuse(await self._transport.send(calls.version(self.policy, self.version), deadline=deadline))
            if time.monotonic() + _POLL_S > deadline:
                raise _not_live(state, self.version, timeout)
            await asyncio.sleep(_POLL_S)

    def __repr__(self) -> str:
        return f"AsyncPublishedVersion({self.policy}@{self.version})"


class AsyncWeights:
    """`client.weights` of the asyncio client."""

    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport
        self._numbers = _Numbers()

    async def publish(
        self, policy: str, source: str | os.PathLike[str], *, step: int | None = None, version: int | None = None
    ) -> AsyncPublishedVersion:
        """As `Weights.publish`."""
        files = await asyncio.to_thread(weight_files, source)
        facts = await asyncio.to_thread(facts_of, files, step)
        for _ in range(_RACES):
            number = version or self._numbers.next(policy, await self._transport.send(calls.policy(policy)))
            try:
                for file in files:
                    await self._transport.send(calls.put_file(policy, number, file))
                await self._transport.send(calls.commit_version(policy, number, facts))
            except VersionUnavailable:
                if version is not None:
                    raise
                continue
            return AsyncPublishedVersion(self._transport, policy, number)
        raise _lost_races(policy)
