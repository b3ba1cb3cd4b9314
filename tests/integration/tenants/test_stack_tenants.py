"""`rollgrid tenants` on an embedded stack: a tenant made while it runs submits and follows by its own user."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats as nats_py
import pytest
from nats.aio.client import Client
from nats.errors import Error
from nats.js.errors import NoStreamResponseError
from rollgrid.stack.servers import adopt_streams
from rollgrid_contracts import codec, subjects, topology
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import ensure_stream, provision

from tests.integration.stack.stack_process import Stack, stack
from tests.support.servers import NatsServer, nats_server

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    with stack() as running:
        running.up("--samplers", "1")
        yield running


def add(pipe: Stack, name: str, *words: str) -> dict[str, Any]:
    answer = pipe.run("tenants", "add", name, "--json", *words, timeout_s=60)
    assert answer.returncode == 0, answer.stderr
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


async def connect(tenant: dict[str, Any], **options: Any) -> Client:
    return await nats_py.connect(
        tenant["nats_url"], user=tenant["nats_user"], password=tenant["nats_password"], **options
    )


async def sampled(tenant: dict[str, Any], run: str, follower: str) -> GroupClosed:
    """One group through the queue, in and out, by the tenant's own user."""
    client = await connect(tenant)
    try:
        name = tenant["tenant"]
        body = {"run": run, "tasks": [{"prompt_token_ids": [5, 6]}], "n": 2, "sampling": {"max_tokens": 3}}
        ack = await client.jetstream().publish(subjects.submit(name), json.dumps(body).encode())
        assert ack.stream == "RG_SUBMIT"
        reader = await client.jetstream().pull_subscribe_bind(f"tenant_{name}_{follower}", stream="RG_TRAJECTORIES")
        (message,) = await reader.fetch(1, timeout=60)
        await message.ack_sync(timeout=10)
        return codec.decode(message.data, GroupClosed, codec.JSON)
    finally:
        await client.close()


def test_a56_a_tenant_is_made_while_the_stack_runs(pipe: Stack) -> None:
    before = pipe.process("nats")
    acme = add(pipe, "acme", "--follower", "eval")
    file = Path(acme["file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    closed = asyncio.run(sampled(acme, "first", "default"))
    assert (closed.tenant, closed.run, len(closed.entries)) == ("acme", "first", 2)
    assert pipe.process("nats") == before  # reloaded, not restarted

    bolt = add(pipe, "bolt")
    asyncio.run(refused(bolt, subjects.submit("acme")))
    again = add(pipe, "acme", "--follower", "third")
    assert "api_key" not in again
    assert again["followers"] == ["default", "eval", "third"]
    listed = [json.loads(line) for line in pipe.run("tenants", "list", "--json").stdout.splitlines()]
    assert [one["tenant"] for one in listed] == ["acme", "bolt"]

    removed = pipe.run("tenants", "remove", "bolt", "--json", timeout_s=60)
    assert json.loads(removed.stdout) == {"tenant": "bolt", "removed": True}, removed.stderr
    with pytest.raises(Error):
        asyncio.run(connect(bolt, allow_reconnect=False, connect_timeout=2))
    asyncio.run(sampled({**acme}, "still-there", "default"))


async def refused(tenant: dict[str, Any], subject: str) -> None:
    client = await connect(tenant)
    try:
        with pytest.raises((NoStreamResponseError, TimeoutError)):
            await client.jetstream().publish(subject, b"{}", timeout=1)
    finally:
        await client.close()


def test_tenants_survive_a_restart_of_the_stack(pipe: Stack) -> None:
    cato = add(pipe, "cato")
    asyncio.run(sampled(cato, "before", "default"))
    assert pipe.down().returncode == 0
    pipe.up("--samplers", "1")
    state = pipe.state()
    moved = {**cato, "nats_url": f"nats://127.0.0.1:{state.ports['nats']}"}
    closed = asyncio.run(sampled(moved, "after", "default"))
    assert closed.run == "after"


@pytest.mark.parametrize("name", ["local", "shared", "rollgrid", "Not-A-Name", "a.b", "*"])
def test_names_that_would_be_anothers_are_refused(pipe: Stack, name: str) -> None:
    answer = pipe.run("tenants", "add", name, timeout_s=60)
    assert answer.returncode == 2, answer.stderr
    assert "cannot be a tenant" in answer.stderr


def test_without_a_stack_the_command_says_so(tmp_path: Path) -> None:
    with stack() as nothing:
        nothing.home.mkdir(parents=True)
        answer = nothing.run("tenants", "add", "acme", timeout_s=60)
        assert answer.returncode == 2
        assert "no stack runs" in answer.stderr


async def test_streams_of_a_stack_without_accounts_become_the_operators(tmp_path: Path) -> None:
    """An upgrade keeps everything: messages, sequences, consumers and where they stand."""
    with nats_server() as old:
        client = await nats_py.connect(old.url, user=old.user, password=old.password)
        context = client.jetstream()
        await context.add_stream(name="RG_TRAJECTORIES", subjects=[subjects.TRAJECTORIES_ALL])
        for number in range(5):
            await context.publish(subjects.trajectories("local", "r"), b"%d" % number)
        reader = await context.pull_subscribe(subjects.TRAJECTORIES_ALL, durable="archiver", stream="RG_TRAJECTORIES")
        for message in await reader.fetch(2, timeout=5):
            await message.ack_sync()
        await client.close()
        old.stop()
        shutil.copytree(old.store, tmp_path / "nats")
    adopt_streams(tmp_path / "nats")
    adopt_streams(tmp_path / "nats")  # at every start, and harmless
    with AccountsAt(tmp_path) as new:
        new.start().wait_ready(10)
        client = await nats_py.connect(new.url, user=new.user, password=new.password)
        context = client.jetstream()
        info = await context.stream_info("RG_TRAJECTORIES")
        assert (info.state.messages, info.state.last_seq) == (5, 5)
        reader = await context.pull_subscribe_bind("archiver", stream="RG_TRAJECTORIES")
        assert [bytes(message.data) for message in await reader.fetch(3, timeout=5)] == [b"2", b"3", b"4"]
        assert (await context.publish(subjects.trajectories("local", "r"), b"5")).seq == 6
        await client.close()


class AccountsAt(NatsServer):
    """A server as the embedded stack configures it, on the data below `folder`."""

    def __init__(self, folder: Path) -> None:
        from rollgrid.stack.home import Home
        from rollgrid.stack.servers import write_nats_conf

        super().__init__(folder / "server")
        home = Home(folder)
        home.data, found = folder, home.credentials()
        self.user, self.password = found.nats_user, found.nats_password
        self.argv[-1] = str(write_nats_conf(home, found, self.port, []))


async def test_an_earlier_submission_stream_gets_its_new_bounds(nats: NatsServer) -> None:
    """RG_SUBMIT as it was made before the queue door was served: kept, with what waits in it."""
    bus = await Bus.connect(nats.settings(), "test")
    old = msgspec.structs.replace(
        topology.SUBMIT,
        max_bytes=2**30,
        max_msgs_per_subject=-1,
        discard_new_per_subject=False,
        duplicate_window_s=120.0,
    )
    await ensure_stream(bus, old)
    await bus.publish(subjects.submit("local"), b"{}")
    await provision(bus)
    info = await bus.stream_info(topology.SUBMIT.name)
    assert (info.state.messages, info.config.max_msgs_per_subject) == (1, topology.SUBMIT.max_msgs_per_subject)
    assert info.config.duplicate_window == pytest.approx(0.1)
    await bus.close()
