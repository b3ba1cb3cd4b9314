"""The fixtures themselves: each server answers, and comes back after a kill."""

from __future__ import annotations

from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.bus import Bus

from tests.support.servers import NatsServer, ValkeyServer
from tests.support.waiting import wait_until


async def test_a_provisioned_bus_and_bucket_answer(bus: Bus, blobs: Blobs) -> None:
    assert (await bus.stream_info("RG_JOBS")).config.name == "RG_JOBS"
    await blobs.probe("test")


def test_servers_come_back_after_a_kill(nats: NatsServer, valkey: ValkeyServer) -> None:
    for server in (nats, valkey):
        server.restart()
        assert server.is_ready()


def test_a_paused_server_does_not_answer_until_it_goes_on(nats: NatsServer) -> None:
    nats.pause()
    wait_until(lambda: not nats.is_ready(), 30, "the stop has arrived")
    assert not nats.is_ready()
    nats.resume()
    nats.wait_ready(5)
