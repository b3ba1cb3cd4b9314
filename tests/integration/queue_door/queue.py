"""A plain NATS client beside a stack: publishes submissions and sees where they end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import nats
from nats.aio.client import Client
from rollgrid_contracts import codec, ids, subjects, topology
from rollgrid_contracts.topology import Header
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.reading import Stored, read_after

from tests.support.servers import NatsServer
from tests.support.stack import TENANT, Stack
from tests.support.waiting import until

PROMPT = [5, 6, 7]


def body(run: str, tasks: int = 1, n: int = 2, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 4}
    return {"run": run, "n": n, "sampling": sampling, "tasks": [{"prompt_token_ids": PROMPT}] * tasks, **fields}


class Closed(msgspec.Struct):
    stored: Stored
    record: GroupClosed

    @property
    def content_type(self) -> str:
        return self.stored.headers[Header.CONTENT_TYPE]


class Queue:
    """`client` is any NATS client; `bus` looks at the streams as an operator can."""

    def __init__(self, client: Client, bus: Bus) -> None:
        self.client, self.bus = client, bus

    async def submit(self, message: Any, *, tenant: str = TENANT, **headers: str) -> int:
        """The RG_SUBMIT sequence of the acknowledged message; bytes go as they are, the rest as JSON."""
        raw = message if isinstance(message, bytes) else json.dumps(message).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        ack = await self.client.jetstream().publish(subjects.submit(tenant), raw, headers=named or None)
        return int(ack.seq)

    async def waiting(self) -> int:
        return int((await self.bus.stream_info(topology.SUBMIT.name)).state.messages)

    async def drained(self, timeout_s: float = 30.0) -> None:
        """Every submission has ended: the work queue is empty."""

        async def empty() -> bool:
            return await self.waiting() == 0

        await until(empty, timeout_s, "RG_SUBMIT is empty", every_s=0.05)

    async def closes(self, run: str, *, tenant: str = TENANT) -> list[Closed]:
        """What the run holds now, in order."""
        found: list[Closed] = []
        after, subject = 0, subjects.trajectories(tenant, run)
        while True:
            page = await read_after(self.bus, topology.TRAJECTORIES.name, subject, after, 500)
            for stored in page.messages:
                data = await self.bus.resolve(stored.data, stored.headers)
                record = codec.decode(data, GroupClosed, stored.headers.get(Header.CONTENT_TYPE, codec.MSGPACK))
                found.append(Closed(stored, record))
                after = stored.sequence
            if not page.pending:
                return found

    async def closed(self, run: str, groups: int, *, tenant: str = TENANT, timeout_s: float = 30.0) -> list[Closed]:
        """The run's closes, once there are `groups` of them."""
        found: list[Closed] = []

        async def enough() -> bool:
            found[:] = await self.closes(run, tenant=tenant)
            return len(found) >= groups

        await until(enough, timeout_s, f"{groups} closes in {run}", every_s=0.05)
        return found

    async def rejected(self, sequence: int, *, tenant: str = TENANT, timeout_s: float = 30.0) -> Closed:
        """The entry of `_rejected` that tells of the submission at `sequence`."""
        found: list[Closed] = []

        async def there() -> bool:
            everything = await self.closes(ids.REJECTED_RUN, tenant=tenant)
            found[:] = [one for one in everything if one.record.metadata["rollgrid_submit"]["sequence"] == sequence]
            return bool(found)

        await until(there, timeout_s, f"submission {sequence} in _rejected", every_s=0.05)
        assert len(found) == 1
        return found[0]


@contextlib.asynccontextmanager
async def queue_of(pipe: Stack) -> AsyncIterator[Queue]:
    from rollgrid_runtime.blobs import Blobs

    blobs = Blobs(pipe.weed.settings(pipe.bucket))
    bus = await Bus.connect(pipe.nats.settings(), "test", blobs)
    client = await connect(pipe.nats)
    try:
        yield Queue(client, bus)
    finally:
        await client.close()
        await bus.close()
        blobs.close()


async def connect(server: NatsServer, **options: Any) -> Client:
    return await nats.connect(server.url, user=server.user, password=server.password, **options)
