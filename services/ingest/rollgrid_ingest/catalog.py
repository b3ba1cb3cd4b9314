"""Which models a tenant may ask for, and their tokenizers: follows `rg_policies`."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_contracts.jobs import VersionRule, WeightConstraint
from rollgrid_contracts.topology import POLICIES
from rollgrid_rendering.files import digest_of
from rollgrid_rendering.offload import RenderThreads
from rollgrid_rendering.renderer import Renderer, RenderingError
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError, StorageError
from rollgrid_runtime.kv import Table, Versioned, View
from rollgrid_runtime.logging import get_logger

from .wire import invalid

log = get_logger(__name__)
SHARED = "shared"
RETRY_S = 1.0


class Catalog:
    """Run `follow` as a task.  Lookups are local; renderers are loaded beside the event loop."""

    def __init__(self, bus: Bus, blobs: Blobs, threads: RenderThreads, cache: Path | None) -> None:
        self._blobs, self._threads = blobs, threads
        self._temporary = None if cache else tempfile.TemporaryDirectory(prefix="rollgrid-tokenizers-")
        self._cache = Path(cache or self._temporary.name)  # type: ignore[union-attr]
        self._view: View[PolicyState] = View(bus, Table(bus, POLICIES, PolicyState), self._changed)
        self._renderers: dict[str, Renderer] = {}
        self._failures: dict[str, str] = {}
        self._dirty = asyncio.Event()
        self.moved = asyncio.Event()
        """Set once something has changed; the next change has an event of its own."""
        self._names: dict[tuple[str, str], str] = {}

    # -- following ------------------------------------------------------------------------------

    async def follow(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._view.follow())
            group.create_task(self._load_renderers())

    async def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    def _changed(self) -> None:
        names: dict[tuple[str, str], str] = {}
        for key, entry in sorted(self._view.values.items()):
            state = entry.value
            for name in (state.base, *state.aliases):
                names.setdefault((state.tenant, name), key)
        for key, entry in self._view.values.items():
            names[entry.value.tenant, entry.value.policy] = key  # a policy's own name wins over aliases
        self._names = names
        self._dirty.set()
        moved, self.moved = self.moved, asyncio.Event()
        moved.set()

    async def _load_renderers(self) -> None:
        while True:
            await self._dirty.wait()
            self._dirty.clear()
            wanted = {entry.value.tokenizer_digest: entry.value for entry in self._view.values.values()}
            self._failures = {digest: why for digest, why in self._failures.items() if digest in wanted}
            for digest, state in wanted.items():
                if digest not in self._renderers:
                    await self._load(digest, state)
            if self._failures:
                await asyncio.sleep(RETRY_S)
                self._dirty.set()

    async def _load(self, digest: str, state: PolicyState) -> None:
        try:
            folder = await self._fetched(digest, state.tokenizer_prefix)
            self._renderers[digest] = await self._threads.run(lambda: Renderer.load(folder, digest))
        except (StorageError, RenderingError, OSError) as error:
            self._failures[digest] = f"tokenizer of {state.tenant}/{state.policy}: {error}"
            log.warning("tokenizer_not_loaded", policy=state.policy, error=str(error))
        else:
            self._failures.pop(digest, None)
            log.info("tokenizer_loaded", policy=state.policy, digest=digest)

    async def _fetched(self, digest: str, prefix: str) -> Path:
        """The folder with the tokenizer's files, fetched from S3 once.  Raises StorageError, OSError."""
        if not digest.isalnum():
            raise StorageError(f"tokenizer digest {digest!r} is not a digest")
        folder = self._cache / digest
        if folder.is_dir():
            return folder
        contents: dict[str, bytes] = {}
        for key in await self._blobs.keys(prefix.rstrip("/") + "/"):
            name = key.rpartition("/")[2]
            data = await self._blobs.get(key)
            if name and data is not None:
                contents[name] = data
        if digest_of(contents) != digest:
            raise StorageError(f"the {len(contents)} files below {prefix} are not the pinned tokenizer {digest}")
        await self._threads.run(lambda: _write_folder(folder, contents))
        return folder

    # -- looking up -----------------------------------------------------------------------------

    def problems(self) -> dict[str, str]:
        if not self._view.loaded.is_set():
            return {"policies": "not read yet"}
        if not self._view.values:
            return {"policies": "no policy is registered"}
        missing = [
            e.value.policy for e in self._view.values.values() if e.value.tokenizer_digest not in self._renderers
        ]
        if missing:
            return {"tokenizers": "; ".join(self._failures.values()) or f"loading those of {', '.join(missing)}"}
        return {}

    def visible(self, tenant: str) -> list[Versioned[PolicyState]]:
        """Policies the tenant may use: its own, then the shared ones, by name.  Raises not_ready."""
        self._refuse_unread()
        found = [entry for entry in self._view.values.values() if entry.value.tenant in (tenant, SHARED)]
        return sorted(found, key=lambda entry: (entry.value.tenant == SHARED, entry.value.policy))

    def policy(self, tenant: str, name: str) -> Versioned[PolicyState] | None:
        """The policy of this name (or alias, or base path) that `tenant` may use; its own wins.  Raises not_ready."""
        self._refuse_unread()
        for owner in (tenant, SHARED):
            key = self._names.get((owner, name))
            if key is not None and key in self._view.values:
                return self._view.values[key]
        return None

    def now(self, state: PolicyState) -> PolicyState:
        """The policy as it is now; as it was where it has gone."""
        entry = self._view.values.get(f"{state.tenant}.{state.policy}")
        return entry.value if entry is not None else state

    def of_pool(self, pool: str) -> list[PolicyState]:
        """Every policy that the pool serves, whoever's it is."""
        return [entry.value for entry in self._view.values.values() if entry.value.pool == pool]

    def _refuse_unread(self) -> None:
        """No policy is unknown before they were read for the first time."""
        if not self._view.loaded.is_set():
            raise RollgridError(ErrorCode.NOT_READY, "the policies are being read", retry_after_s=1.0)

    def resolve(
        self, tenant: str, model: str | None, field: str = "model"
    ) -> tuple[PolicyState, WeightConstraint | None]:
        """The policy behind a request's model name; `<name>@<version>` and `<name>-v<version>` also pin the version.

        A name that is a policy's, an alias or a path is never taken apart.  Without a name the only visible policy is meant.  Raises model_not_found, invalid_request, and
        not_ready before the policies were read for the first time.
        """
        if model is None or model == "":
            found = self.visible(tenant)
            if len(found) != 1:
                raise invalid(f"{field} is required: {len(found)} models are served", field)
            return found[0].value, None
        entry = self.policy(tenant, model)
        if entry is not None:
            return entry.value, None
        for separator in ("@", "-v"):
            name, apart, version = model.rpartition(separator)
            if apart and version.isascii() and version.isdigit() and len(version) < 19:
                entry = self.policy(tenant, name)
                if entry is not None:
                    return entry.value, WeightConstraint(rule=VersionRule.EXACT, value=int(version))
        raise RollgridError(
            ErrorCode.MODEL_NOT_FOUND,
            f"no model {model[:200]!r} is served to this tenant",
            boundary=Boundary.CLIENT,
            field=field,
        )

    def renderer(self, state: PolicyState) -> Renderer:
        """Raises not_ready while the tokenizer is not loaded."""
        renderer = self._renderers.get(state.tokenizer_digest)
        if renderer is None:
            raise RollgridError(
                ErrorCode.NOT_READY,
                self._failures.get(state.tokenizer_digest) or f"the tokenizer of {state.policy} is being loaded",
                retry_after_s=1.0,
            )
        return renderer


def _write_folder(folder: Path, contents: dict[str, bytes]) -> None:
    """Make `folder` whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    for name, data in contents.items():
        (partial / name).write_bytes(data)
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():  # another process was first
            raise
