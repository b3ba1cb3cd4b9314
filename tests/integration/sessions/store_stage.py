"""Two replicas' session stores on real servers and a real ledger, without doors and samplers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

from rollgrid_contracts.episodes import SessionOpened, TurnNode
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_ingest.ledger_client import LedgerClient
from rollgrid_ingest.session_episode import Episode
from rollgrid_ingest.session_expiry import Expiry
from rollgrid_ingest.session_store import Begun, SessionStore
from rollgrid_ingest.settings import IngestSettings
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.settings import S3Settings
from rollgrid_runtime.state import State

from tests.support.episodes import (
    TENANT,
    assert_kept_is_the_fold,
    finish_of,
    job_of,
    opening,
    store_finish,
    store_job,
)
from tests.support.servers import NatsServer, SeaweedServer, ValkeyServer, nats_server, new_bucket, valkey_server
from tests.support.services import ServiceProcess, run_service
from tests.support.waiting import until

TURN_S = 120.0


class Grid(NamedTuple):
    """What a module's tests share: NATS with a ledger, S3."""

    nats: NatsServer
    s3: S3Settings
    ledger: ServiceProcess


@contextlib.contextmanager
def grid(s3_server: SeaweedServer) -> Iterator[Grid]:
    bucket = new_bucket()
    with nats_server() as nats, valkey_server() as unused:
        env = {**nats.env(), **unused.env(), **s3_server.env(bucket)}
        with run_service("trajectory_logger", env) as ledger:
            yield Grid(nats, s3_server.settings(bucket), ledger)


class Clock:
    """The time of day, and `ahead` seconds."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.time() + self.ahead


class Replica(NamedTuple):
    bus: Bus
    store: SessionStore
    expiry: Expiry


class Stage:
    """`a` and `b` are two ingest replicas; `clock` is theirs."""

    def __init__(self, bus: Bus, valkey: ValkeyServer, replicas: list[Replica], clock: Clock) -> None:
        self.bus, self.valkey, self.replicas, self.clock = bus, valkey, replicas, clock
        self.a, self.b = (replica.store for replica in replicas)

    async def open(self, **terms: Any) -> SessionOpened:
        opened, episode = opening(**terms)
        return await self.a.open(opened, episode)

    async def begin(self, opened: SessionOpened, node: TurnNode | None = None, *, by: int = 0) -> Begun:
        store = self.replicas[by].store
        return await store.begin_turn(TENANT, opened.session, node or TurnNode(), time.time() + TURN_S)

    async def dispatch(self, opened: SessionOpened, begun: Begun, *, by: int = 0) -> tuple[SampleGroup, int]:
        job = job_of(opened, begun.turn, begun.node, time.time() + TURN_S)
        seq = await store_job(self.bus, job)
        await self.replicas[by].store.dispatched(TENANT, opened.session, begun.turn, seq)
        return job, seq

    async def play(self, opened: SessionOpened, node: TurnNode | None = None, *, by: int = 0, **sample: Any) -> int:
        """A whole turn; its number."""
        begun = await self.begin(opened, node, by=by)
        job, seq = await self.dispatch(opened, begun, by=by)
        at = await store_finish(self.bus, finish_of(job, seq, **sample))
        tree = (await self.replicas[by].store.read(TENANT, opened.session, at_least=at)).tree
        assert begun.turn in tree.nodes or begun.turn in tree.lost
        return begun.turn

    async def checked(self, opened: SessionOpened, *, by: int = 0) -> Episode:
        """Read by one replica, and Redis compared with the stream."""
        episode = await self.replicas[by].store.read(TENANT, opened.session)
        found = await assert_kept_is_the_fold(self.bus, self.valkey, TENANT, opened.session)
        assert found is not None
        assert found.at == episode.at
        return episode


@contextlib.asynccontextmanager
async def stage(made: Grid, valkey: ValkeyServer, **changes: Any) -> AsyncIterator[Stage]:
    """`changes` are of the replicas' settings."""
    settings = IngestSettings(**{"session_rebuild_s": 5.0, "session_rebuild_wait_s": 0.3, **changes})
    clock, replicas = Clock(), list[Replica]()
    async with contextlib.AsyncExitStack() as stack:
        blobs = Blobs(made.s3)
        stack.callback(blobs.close)
        for name in "ab":
            bus = await Bus.connect(made.nats.settings(), name, blobs)
            stack.push_async_callback(bus.close)
            state = State(valkey.settings())
            stack.push_async_callback(state.close)
            store = SessionStore(state, bus, LedgerClient(bus), settings, clock=clock)
            replicas.append(Replica(bus, store, Expiry(state, store, every_s=0.05, clock=clock)))
        await until(lambda: answers(LedgerClient(replicas[0].bus)), 20, "the ledger answers", every_s=0.1)
        yield Stage(replicas[0].bus, valkey, replicas, clock)


async def answers(ledger: LedgerClient) -> bool:
    try:
        await ledger.groups(TENANT, ["g"])
    except RollgridError:
        return False
    return True
