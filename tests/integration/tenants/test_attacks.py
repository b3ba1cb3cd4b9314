"""I7, done-when 4: what a tenant's NATS user can do to others, judged by what happened to the streams.

Each attack is tried by the user as rendered, and by one whom only the account holds (no permissions
of his own); the last tests show that permissions without the account do not hold him.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error
from rollgrid import NatsClient
from rollgrid.errors import Forbidden
from rollgrid_contracts import subjects, topology
from rollgrid_contracts.jobs import Priority
from rollgrid_contracts.scoring import ScorerKind
from rollgrid_contracts.trajectories import CloseReason, GroupClosed
from rollgrid_runtime.bus import Bus
from rollgrid_runtime.provision import ensure_consumer

from tests.support.waiting import until

from .accounts import ACME, BOLT, FREE, PERMITTED, AccountsServer

ANSWER_S = 0.15
"""Waited for an answer that should not come; what counts is what happened to the streams."""

NEXT = "$JS.API.CONSUMER.MSG.NEXT.RG_TRAJECTORIES.tenant_acme_default"
USERS = pytest.mark.parametrize("user", [ACME, FREE])
FOREIGN = [
    subjects.submit(BOLT),
    subjects.jobs_pool("p", Priority.NORMAL, ACME),
    subjects.jobs_worker("w1"),
    subjects.samples(ScorerKind.DONE, ACME),
    subjects.trajectories(ACME, "forged"),
    subjects.trajectories(BOLT, "forged"),
    subjects.run_rewards(ACME, "forged"),
    subjects.checkpoints(ACME, "p"),
    subjects.audit(ACME),
    subjects.worker_control(subjects.EVERY_WORKER),
    subjects.reply("g1"),
    subjects.resume("g1"),
    subjects.LEDGER_QUERY,
    "$KV.rg_policies.acme.p",
    "$KV.rg_ledger.lease",
]


class Scene:
    """Streams with something in them, and an operator who listens to everything that is not theirs to send."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.heard = bus, list[str]()

    async def prepare(self) -> None:
        await self.bus.js.purge_stream("RG_SUBMIT")
        await ensure_consumer(self.bus, topology.submit_consumer(BOLT))
        for tenant in (ACME, BOLT):
            await self.bus.publish(subjects.trajectories(tenant, "run"), f"secret of {tenant}".encode())
        await self.bus.publish(subjects.jobs_pool("p", Priority.NORMAL, BOLT), b"a job")
        kv = await self.bus.js.key_value("rg_policies")
        await kv.put("bolt.policy", b"secret of bolt")

        async def hear(message: Msg) -> None:
            self.heard.append(message.subject)

        for subject in ("rg.ctl.>", "rg.reply.>", "rg.resume.>", "rg.ledger.>"):
            await self.bus.subscribe_raw(subject, hear)
        await self.bus.client.flush()

    async def state(self) -> dict[str, Any]:
        """Everything an attack may change: messages and bounds of all streams, and their consumers."""
        names = [stream.name for stream in topology.STREAMS] + [f"KV_{bucket.name}" for bucket in topology.BUCKETS]
        found: dict[str, Any] = {}
        for name in names:
            info = await self.bus.stream_info(name)
            state = info.state
            found[name] = (state.messages, state.first_seq, state.last_seq, sorted(await self.bus.consumer_names(name)))
        return found


@pytest.fixture
async def scene(operator: Bus) -> Scene:
    found = Scene(operator)
    await found.prepare()
    return found


@contextlib.asynccontextmanager
async def logged_in(server: AccountsServer, user: str) -> AsyncIterator[tuple[Client, list[Exception]]]:
    errors: list[Exception] = []
    client = await server.connect(user, errors)
    try:
        yield client, errors
    finally:
        await client.close()


async def attempt(client: Client, subject: str, body: bytes = b"", reply: str = "") -> bytes | None:
    """The answer, None without one.  The server has handled the message when this returns."""
    if reply:
        await client.publish(subject, body, reply=reply)
        await client.flush(5)
        return None
    try:
        return bytes((await client.request(subject, body, timeout=ANSWER_S)).data)
    except (Error, TimeoutError):
        await client.flush(5)
        return None


@USERS
async def test_i7_nothing_can_be_published_but_ones_own_submissions(
    server: AccountsServer, scene: Scene, user: str
) -> None:
    before = await scene.state()
    async with logged_in(server, user) as (client, errors):
        for subject in FOREIGN:
            assert await attempt(client, subject, b"forged") is None, subject
    await scene.bus.client.flush()
    assert scene.heard == []
    assert await scene.state() == before
    assert len(errors) >= (len(FOREIGN) if user == ACME else 0)


@USERS
@pytest.mark.parametrize("stolen", [subjects.trajectories_of(BOLT), subjects.TRAJECTORIES_ALL, ">", "rg.>", "$SYS.>", "$JS.>", "$KV.>", "_INBOX.>"])  # fmt: skip
async def test_i7_a_subscription_hears_nothing_of_others(
    server: AccountsServer, scene: Scene, user: str, stolen: str
) -> None:
    heard: list[str] = []

    async def hear(message: Msg) -> None:
        heard.append(message.subject)

    async with logged_in(server, user) as (client, _), logged_in(server, BOLT) as (other, _):
        await client.subscribe(stolen, cb=hear)
        await client.flush(5)
        await scene.bus.publish(subjects.trajectories(BOLT, "run"), b"another secret")
        await scene.bus.publish_raw(subjects.worker_control("w1"), b"control")
        kv = await scene.bus.js.key_value("rg_policies")
        await kv.put("bolt.policy", b"changed")
        assert json.loads((await other.request(subjects.submit(BOLT), b"{}", timeout=5)).data)["stream"] == "RG_SUBMIT"
        await client.flush(5)
    assert [subject for subject in heard if not subject.startswith("$SYS.REQ.USER")] == []


@USERS
async def test_i7_anothers_trajectories_cannot_be_read(server: AccountsServer, scene: Scene, user: str) -> None:
    before = await scene.state()
    everything = json.dumps({"seq": 1, "next_by_subj": "rg.>", "batch": 100}).encode()
    calls = {
        "$JS.API.CONSUMER.MSG.NEXT.RG_TRAJECTORIES.tenant_bolt_default": b'{"batch": 10, "no_wait": true}',
        "$JS.API.CONSUMER.MSG.NEXT.RG_TRAJECTORIES.archiver": b"1",
        "$JS.API.CONSUMER.MSG.NEXT.RG_JOBS.ledger-0": b"1",
        "$JS.API.DIRECT.GET.RG_TRAJECTORIES": everything,
        "$JS.API.STREAM.MSG.GET.RG_TRAJECTORIES": b'{"last_by_subj": "rg.0.trajectories.bolt.run"}',
        "$JS.API.DIRECT.GET.KV_rg_policies.$KV.rg_policies.bolt.policy": b"",
        "$JS.API.STREAM.MSG.GET.KV_rg_policies": b'{"last_by_subj": "$KV.rg_policies.bolt.policy"}',
        "$JS.API.STREAM.INFO.RG_TRAJECTORIES": b'{"subjects_filter": ">"}',
        "$JS.API.STREAM.LIST": b"",
        "$JS.API.STREAM.NAMES": b"",
        "$JS.API.CONSUMER.LIST.RG_TRAJECTORIES": b"",
    }
    async with logged_in(server, user) as (client, _):
        for subject, body in calls.items():
            answer = await attempt(client, subject, body)
            assert answer is None or b"secret" not in answer, subject
            assert answer is None or "error" in json.loads(answer) or json.loads(answer).get("streams") in (None, [])
        own = await pulled(client, NEXT, 100)
        assert own
        assert {bytes(message.data) for message in own} == {b"secret of acme"}
    assert await scene.state() == before


async def pulled(client: Client, subject: str, batch: int) -> list[Msg]:
    """What a pull without waiting gives."""
    inbox = client.new_inbox()
    subscription = await client.subscribe(inbox)
    await client.publish(subject, json.dumps({"batch": batch, "no_wait": True}).encode(), reply=inbox)
    found: list[Msg] = []
    while len(found) < batch:
        message = await subscription.next_msg(timeout=5)
        if message.headers and "Status" in message.headers:
            break
        found.append(message)
    await subscription.unsubscribe()
    return found


def consumer_requests() -> dict[str, dict[str, Any]]:
    """The push-consumer attack: deliveries that arrive on worker control as if the services had sent them."""
    push = {
        "durable_name": "evil",
        "deliver_subject": subjects.worker_control(subjects.EVERY_WORKER),
        "filter_subject": subjects.trajectories_of(ACME),
        "ack_policy": "none",
        "deliver_policy": "all",
    }
    created = {"stream_name": "RG_TRAJECTORIES", "config": push}
    own = {**push, "durable_name": "tenant_acme_default", "ack_policy": "explicit"}
    return {
        "$JS.API.CONSUMER.CREATE.RG_TRAJECTORIES": {**created, "config": {**push, "durable_name": ""}},
        "$JS.API.CONSUMER.CREATE.RG_TRAJECTORIES.evil": {**created, "config": {**push, "name": "evil"}},
        "$JS.API.CONSUMER.CREATE.RG_TRAJECTORIES.evil.rg.0.trajectories.acme.>": {
            **created,
            "config": {**push, "name": "evil"},
        },
        "$JS.API.CONSUMER.DURABLE.CREATE.RG_TRAJECTORIES.evil": created,
        "$JS.API.CONSUMER.DURABLE.CREATE.RG_TRAJECTORIES.tenant_acme_default": {**created, "config": own},
    }


@USERS
async def test_i7_the_push_consumer_attack_delivers_nothing(server: AccountsServer, scene: Scene, user: str) -> None:
    before = await scene.state()
    async with logged_in(server, user) as (client, _):
        for subject, body in consumer_requests().items():
            answer = await attempt(client, subject, json.dumps(body).encode())
            assert answer is None or "error" in json.loads(answer), subject
    await scene.bus.client.flush()
    assert scene.heard == []
    assert await scene.state() == before


ADMIN = {
    "$JS.API.STREAM.PURGE.RG_JOBS": b"",
    "$JS.API.STREAM.PURGE.RG_TRAJECTORIES": b"",
    "$JS.API.STREAM.DELETE.RG_JOBS": b"",
    "$JS.API.STREAM.DELETE.RG_SUBMIT": b"",
    "$JS.API.STREAM.MSG.DELETE.RG_TRAJECTORIES": b'{"seq": 1}',
    "$JS.API.STREAM.UPDATE.RG_SUBMIT": b'{"name": "RG_SUBMIT", "subjects": [">"]}',
    "$JS.API.STREAM.CREATE.EVIL": b'{"name": "EVIL", "subjects": ["rg.>"]}',
    "$JS.API.CONSUMER.DELETE.RG_JOBS.ledger-0": b"",
    "$JS.API.CONSUMER.DELETE.RG_TRAJECTORIES.tenant_bolt_default": b"",
    "$JS.API.CONSUMER.DELETE.RG_TRAJECTORIES.tenant_acme_default": b"",
    "$JS.API.CONSUMER.PAUSE.RG_JOBS.ledger-0": b'{"pause_until": "2100-01-01T00:00:00Z"}',
    "$JS.ACK.RG_JOBS.ledger-0.1.1.1.1795975417634735027.0": b"+ACK",
    "$JS.ACK.RG_TRAJECTORIES.tenant_bolt_default.1.2.1.1795975417634735027.0": b"+ACK",
    "$JS.API.ACCOUNT.PURGE.RG": b"",
    "$SYS.REQ.SERVER.PING": b"",
    "$SYS.REQ.ACCOUNT.RG.CONNZ": b"",
    "$SYS.REQ.SERVER.PING.JSZ": b"",
}


@USERS
async def test_i7_streams_and_consumers_cannot_be_administered(server: AccountsServer, scene: Scene, user: str) -> None:
    before = await scene.state()
    async with logged_in(server, user) as (client, _):
        for subject, body in ADMIN.items():
            answer = await attempt(client, subject, body)
            assert answer is None or "error" in json.loads(answer), subject
    assert await scene.state() == before


REPLIES = [
    "$JS.API.STREAM.PURGE.RG_JOBS",
    "$JS.API.STREAM.DELETE.RG_JOBS",
    "$JS.API.CONSUMER.DELETE.RG_JOBS.ledger-0",
    subjects.worker_control(subjects.EVERY_WORKER),
    subjects.submit(BOLT),
    subjects.samples(ScorerKind.DONE, BOLT),
]


@USERS
@pytest.mark.parametrize("reply", REPLIES)
async def test_i7_the_reply_subject_attack_reaches_nothing(
    server: AccountsServer, scene: Scene, user: str, reply: str
) -> None:
    """The server answers pulls, acks and submissions to the reply subject: it must be the tenant's own."""
    before = await scene.state()
    async with logged_in(server, user) as (client, _):
        message = next(iter(await pulled(client, NEXT, 1)), None)
        await attempt(client, NEXT, b'{"batch": 1, "no_wait": true}', reply=reply)
        await attempt(client, NEXT, b"1", reply=reply)
        if message is not None:
            await attempt(client, message.reply, b"+NXT", reply=reply)
            await attempt(client, message.reply, b"-NAK", reply=reply)
            await attempt(client, message.reply, b"+ACK", reply=reply)
        await attempt(client, subjects.submit(ACME), b"{}", reply=reply)
        submitted = json.loads((await client.request(subjects.submit(ACME), b"{}", timeout=5)).data)
    await scene.bus.client.flush()
    assert submitted["stream"] == "RG_SUBMIT"
    assert scene.heard == []
    after = await scene.state()
    assert after.pop("RG_SUBMIT")[0] == before.pop("RG_SUBMIT")[0] + 2  # the tenant's own two, and nobody's else
    assert after == before


@USERS
async def test_i8_connections_subscriptions_and_payloads_are_bounded(
    server: AccountsServer, scene: Scene, user: str
) -> None:
    before = await scene.state()
    async with contextlib.AsyncExitStack() as exits:
        clients = [(await exits.enter_async_context(logged_in(server, user)))[0] for _ in range(4)]
        with pytest.raises(Error):
            await server.connect(user, allow_reconnect=False, connect_timeout=2)
        other, _ = await exits.enter_async_context(logged_in(server, BOLT))  # the neighbour has room
        assert await attempt(other, subjects.submit(BOLT), b"{}")
        for client in clients:
            await client.close()
    many = b"".join(b"SUB _INBOX.flood.%d %d\r\n" % (number, number) for number in range(1, 30))
    assert b"maximum subscriptions exceeded" in await said(server, user, many)
    for size, taken in ((64 * 1024, True), (64 * 1024 + 1, False)):
        publish = b"PUB %b %d\r\n%b\r\n" % (subjects.submit(ACME).encode(), size, b"x" * size)
        assert (b"pong" in await said(server, user, publish)) is taken
    after = await scene.state()
    assert after.pop("RG_SUBMIT")[0] == before.pop("RG_SUBMIT")[0] + 2
    assert after == before


async def said(server: AccountsServer, user: str, lines: bytes) -> bytes:
    """All that the server says to these lines until it answers a ping or hangs up, in lower case."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    hello = {"user": user, "pass": server.passwords[user], "verbose": False, "pedantic": False}
    heard = b""
    with contextlib.suppress(ConnectionError):
        writer.write(b"CONNECT " + json.dumps(hello).encode() + b"\r\n" + lines + b"PING\r\n")
        while b"PONG" not in heard and (line := await asyncio.wait_for(reader.readline(), 10)):
            heard += line
    writer.close()
    return heard.lower()


async def test_i8_one_tenants_flood_leaves_room_for_anothers_submission(server: AccountsServer, scene: Scene) -> None:
    most = topology.SUBMIT.max_msgs_per_subject
    async with logged_in(server, ACME) as (flooder, _), logged_in(server, BOLT) as (other, _):
        answers = [json.loads(await attempt(flooder, subjects.submit(ACME), b"{}") or b"{}") for _ in range(most + 3)]
        assert sum("error" in answer for answer in answers) == 3
        assert "error" not in json.loads(await attempt(other, subjects.submit(BOLT), b"{}") or b'{"error": 1}')
    info = await scene.bus.stream_info("RG_SUBMIT")
    assert info.state.messages == most + 1


async def test_i7_a_message_id_of_one_tenant_does_not_swallow_anothers_submission(
    server: AccountsServer, scene: Scene
) -> None:
    """Nats-Msg-Id is one name space of the stream, so the stream forgets it at once (0.1 s is the least)."""
    info = await scene.bus.stream_info("RG_SUBMIT")
    assert info.config.duplicate_window == pytest.approx(0.1)
    stored: list[bool] = []

    async def anew() -> bool:
        async with logged_in(server, BOLT) as (other, _):
            ack = await other.jetstream().publish(subjects.submit(BOLT), b"{}", headers={"Nats-Msg-Id": "step-1"})
            stored.append(not ack.duplicate)
            return stored[-1]

    async with logged_in(server, ACME) as (client, _):
        await client.jetstream().publish(subjects.submit(ACME), b"{}", headers={"Nats-Msg-Id": "step-1"})
    await until(anew, 30, "the id is forgotten", every_s=0.05)


# -- permissions of a user alone ------------------------------------------------------------------


async def test_permissions_without_an_account_are_broken_by_the_reply_subject(
    server: AccountsServer, scene: Scene
) -> None:
    """Why tenants are accounts: with the very same subjects allowed, a pull purges the jobs stream."""
    assert (await scene.bus.stream_info("RG_JOBS")).state.messages
    async with logged_in(server, PERMITTED) as (client, errors):
        await pulled(client, NEXT, 1000)  # then the answer has no body, as a purge wants it
        await attempt(client, NEXT, b'{"batch": 1, "no_wait": true}', reply="$JS.API.STREAM.PURGE.RG_JOBS")

        async def emptied() -> bool:
            return (await scene.bus.stream_info("RG_JOBS")).state.messages == 0

        await until(emptied, 10, "the attack purges RG_JOBS")
    assert errors == []


async def test_the_sdk_raises_what_only_the_error_callback_hears(server: AccountsServer, scene: Scene) -> None:
    """A permission violation is told to nobody who waits for an answer."""
    client = NatsClient(server.url, tenant=BOLT, user=ACME, password=server.passwords[ACME], budget_s=20)
    async with client:
        with pytest.raises(Forbidden, match=r"rg\.0\.submit\.bolt"):
            await client.submit([[1, 2]], sampling={"max_tokens": 1})
        with pytest.raises(Forbidden, match="tenant_bolt_default"):
            await anext(client.trajectories(timeout=20))


async def test_a_tenant_submits_and_follows_by_the_sdk_under_its_own_user(server: AccountsServer, scene: Scene) -> None:
    closed = GroupClosed(
        tenant=BOLT, run="mine", batch_id="b", group_id="g", n=0, policy="p", reason=CloseReason.COMPLETE,
        created_at=0.0, closed_at=0.0, entries=(),
    )  # fmt: skip
    async with NatsClient(server.url, tenant=BOLT, user=BOLT, password=server.passwords[BOLT]) as client:
        queued = await client.submit([[1, 2]], sampling={"max_tokens": 1})
        stored = await scene.bus.stored("RG_SUBMIT", queued.sequence)
        assert stored is not None
        assert (stored.headers or {})["Idempotency-Key"] == queued.idempotency_key
        await scene.bus.js.purge_stream("RG_TRAJECTORIES")
        await scene.bus.publish(subjects.trajectories(BOLT, "mine"), closed)
        async for group in client.trajectories("mine", follower="eval", timeout=30):
            assert group.closed == closed
            break
