"""A scorer as a process, with a NATS of its own and a customer's HTTP server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus

from tests.support.servers import NatsServer, SeaweedServer, nats_server, new_bucket
from tests.support.services import ServiceProcess, run_service
from tests.support.webhook_server import WebhookServer


class Pipe(NamedTuple):
    nats: NatsServer
    s3: SeaweedServer
    bucket: str
    hook: WebhookServer
    scorer: ServiceProcess

    def url(self, path: str = "/score") -> str:
        return self.hook.url(path, host="localhost")

    @contextlib.asynccontextmanager
    async def connected(self) -> AsyncIterator[Bus]:
        store = Blobs(self.s3.settings(self.bucket))
        connection = await Bus.connect(self.nats.settings(), "test", store)
        yield connection
        await connection.close()
        store.close()


@contextlib.contextmanager
def scorer_pipe(s3: SeaweedServer, hook: WebhookServer, env: dict[str, str]) -> Iterator[Pipe]:
    bucket = new_bucket()
    with nats_server() as nats:
        everything = {**nats.env(), **s3.env(bucket), "ROLLGRID_NATS_ACK_WAIT_S": "3", **env}
        with run_service("scorer", everything) as scorer:
            yield Pipe(nats, s3, bucket, hook, scorer)
