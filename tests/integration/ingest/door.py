"""An ingest as a real process before real servers, with one policy and nobody behind it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from rollgrid_contracts import codec, ids
from rollgrid_contracts.checkpoints import PolicyState
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.samples import GroupsCancelled
from rollgrid_contracts.topology import JOBS, POLICIES, SAMPLES
from rollgrid_rendering.files import folder_digest, tokenizer_files
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.kv import Table
from rollgrid_runtime.provision import provision
from rollgrid_runtime.reading import read_after

from tests.support.servers import NatsServer, SeaweedServer, nats_server, new_bucket
from tests.support.services import ServiceProcess, run_service
from tests.support.tiny_models import TinyModel, tiny_model

CONTEXT, VOCAB = 512, 512
POOL = ids.pool_id("tiny", "float32", "cpu", "local")


class Door(NamedTuple):
    """A running ingest and the servers behind it."""

    process: ServiceProcess
    nats: NatsServer
    weed: SeaweedServer
    bucket: str

    @property
    def url(self) -> str:
        return self.process.health_url

    def client(self, **options: Any) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=30, **options)

    def jobs(self) -> list[SampleGroup]:
        """Every job in RG_JOBS."""
        return asyncio.run(self.stored_jobs())

    async def stored_jobs(self) -> list[SampleGroup]:
        async with self.connected() as bus:
            found: list[SampleGroup] = []
            sequence = 0
            while True:
                page = await read_after(bus, JOBS.name, "rg.0.jobs.>", sequence, 500)
                for stored in page.messages:
                    found.append(codec.decode(await bus.resolve(stored.data, stored.headers), SampleGroup))
                    sequence = stored.sequence
                if not page.pending:
                    return found

    def cancelled(self) -> set[str]:
        """Batches somebody asked the ledger to end."""

        async def read() -> set[str]:
            async with self.connected() as bus:
                page = await read_after(bus, SAMPLES.name, "rg.0.samples.done.>", 0, 500)
                events = [codec.decode(stored.data, GroupsCancelled) for stored in page.messages]
                return {event.batch_id for event in events}

        return asyncio.run(read())

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Bus]:
        blobs = Blobs(self.weed.settings(self.bucket))
        bus = await Bus.connect(self.nats.settings(), "test", blobs)
        try:
            yield bus
        finally:
            await bus.close()
            blobs.close()


def policy_state(folder: Path, name: str = "tiny", tenant: str = "shared", **changes: Any) -> PolicyState:
    digest = folder_digest(folder)
    fields: dict[str, Any] = {
        "tenant": tenant,
        "policy": name,
        "pool": ids.pool_id(name, "float32", "cpu", "local"),
        "base": str(folder),
        "base_digest": "0" * 64,
        "tokenizer_prefix": f"tokenizers/{digest}/",
        "tokenizer_digest": digest,
        "max_model_len": CONTEXT,
        "vocab_size": VOCAB,
        "dtype": "float32",
        "aliases": ("alias-of-tiny",),
    }
    return PolicyState(**{**fields, **changes})


async def register(nats: NatsServer, weed: SeaweedServer, bucket: str, *states: PolicyState) -> None:
    """What checkpoint-sync does for a policy, as far as ingest looks at it."""
    blobs = Blobs(weed.settings(bucket))
    await blobs.ensure_bucket()
    bus = await Bus.connect(nats.settings(), "test", blobs)
    await provision(bus)
    table = Table(bus, POLICIES, PolicyState)
    for state in states:
        for name, path in tokenizer_files(Path(state.base)).items():
            await blobs.upload(path, state.tokenizer_prefix + name)
        await table.put(f"{state.tenant}.{state.policy}", state)
    await bus.close()
    blobs.close()


@contextlib.contextmanager
def door(
    weed: SeaweedServer, env: Mapping[str, str] | None = None, states: tuple[PolicyState, ...] | None = None
) -> Iterator[Door]:
    folder = tiny_model(TinyModel())
    with nats_server() as nats:
        bucket = new_bucket()
        asyncio.run(register(nats, weed, bucket, *(states or (policy_state(folder),))))
        with run_service("ingest", {**nats.env(), **weed.env(bucket), **(env or {})}) as process:
            yield Door(process, nats, weed, bucket)
