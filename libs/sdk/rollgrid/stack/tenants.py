"""Tenants of a running stack: an API key, a NATS user in an account of its own, and its durables.

All of it is kept below the state folder and survives restarts.  nats-server reads its accounts again
at a SIGHUP, without ending anybody's connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from rollgrid_contracts import ids, topology

from rollgrid.errors import ConfigurationError

from .home import Home, StackState, TenantFile, read_json, read_tenants, tenant_files, write_private
from .servers import write_nats_conf

RESERVED = frozenset({"local", "shared"})
RELOAD_S = 15.0
SETTLE_S = 0.3
"""Given to nats-server to read its configuration before it is asked what came of it."""

KEY_NAME = "rollgrid tenants"
_NANOSECONDS = 1_000_000_000


class Tenants:
    """The tenants of the stack that runs in `home`.  All methods raise ConfigurationError."""

    def __init__(self, home: Home) -> None:
        self._home = home

    def all(self) -> list[TenantFile]:
        return tenant_files(self._home)

    def add(self, name: str, followers: tuple[str, ...] = ()) -> tuple[TenantFile, bool]:
        """(the tenant, whether it is new).  One that is there only gets the followers it lacks.

        Safe to repeat after a failure: every step leads to the same end.
        """
        self._check(name, followers)
        with self._locked():
            state, port = self._running()
            known = next((one for one in self.all() if one.tenant == name), None)
            wanted = tuple(dict.fromkeys((*(known.followers if known else ("default",)), *followers)))
            tenant = TenantFile(
                tenant=name,
                url=state.url,
                api_key=known.api_key if known else "rg-" + secrets.token_urlsafe(32),
                nats_url=f"nats://127.0.0.1:{port}",
                nats_user=name,
                nats_password=known.nats_password if known else secrets.token_urlsafe(32),
                followers=wanted,
            )
            write_private(self._path(name), msgspec.json.format(msgspec.json.encode(tenant)))
            self._write_keys(name, tenant.api_key)
            asyncio.run(self._make_durables(port, tenant))
            self._write_conf(port)
            asyncio.run(_until(lambda: self._is_served(state, tenant), f"{name} can read its durables"))
            return tenant, known is None

    def remove(self, name: str) -> bool:
        """Its key, user and durables; what it has sampled stays.  False when there is no such tenant."""
        with self._locked():
            state, port = self._running()
            tenant = next((one for one in self.all() if one.tenant == name), None)
            if tenant is None:
                return False
            self._write_keys(name, None)
            self._path(name).unlink()
            self._write_conf(port)
            asyncio.run(_until(lambda: self._is_gone(state, tenant), f"{name} can no longer log in"))
            asyncio.run(self._delete_durables(port, tenant))
            return True

    # -- files ------------------------------------------------------------------------------------

    def _check(self, name: str, followers: tuple[str, ...]) -> None:
        if not ids.is_name(name) or name in RESERVED or name == self._home.credentials().nats_user:
            raise ConfigurationError(f"{name!r} cannot be a tenant: {ids.NAME_PATTERN}, and none of {sorted(RESERVED)}")
        for follower in followers:
            if not ids.is_name(follower):
                raise ConfigurationError(f"{follower!r} cannot be a follower: {ids.NAME_PATTERN}")

    def _path(self, name: str) -> Any:
        return self._home.tenants / f"{name}.json"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """One change at a time."""
        with open(self._home.root / "tenants.lock", "a") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield

    def _write_keys(self, name: str, api_key: str | None) -> None:
        """Ingest reads the file again within seconds."""
        entries = read_json(self._home.keys_file, list[dict[str, Any]])
        if entries is None:
            raise ConfigurationError(f"{self._home.keys_file} is damaged")
        kept = [entry for entry in entries if entry.get("tenant") != name]
        if api_key is not None:
            digest = hashlib.sha256(api_key.encode()).hexdigest()
            kept.append({"key_sha256": digest, "tenant": name, "scopes": ["submit", "read"], "name": KEY_NAME})
        write_private(self._home.keys_file, msgspec.json.format(msgspec.json.encode(kept)))

    # -- the server -------------------------------------------------------------------------------

    def _running(self) -> tuple[StackState, int]:
        """The stack, and the port of its nats-server, which must be its own."""
        state = self._home.read_state()
        if state is None or not state.alive:
            raise ConfigurationError(f"no stack runs in {self._home.root}: start it with `rollgrid up`")
        port = state.ports.get("nats")
        if port is None:
            raise ConfigurationError(
                "this stack uses a NATS server of yours: put the output of `rollgrid tenants render` into its"
                " configuration, and make the durables"
            )
        return state, port

    def _write_conf(self, port: int) -> None:
        write_nats_conf(self._home, self._home.credentials(), port, read_tenants(self._home))

    def _reload(self, state: StackState) -> None:
        server = next((part.process for part in state.parts if part.name == "nats"), None)
        if server is None or not server.alive:
            raise ConfigurationError("nats-server does not run at the moment; try again")
        os.kill(server.pid, signal.SIGHUP)

    async def _is_served(self, state: StackState, tenant: TenantFile) -> bool:
        """nats-server 2.15 resolves what a new account imports only at the reload behind its first (measured)."""
        self._reload(state)
        await asyncio.sleep(SETTLE_S)
        client = await _logged_in(tenant)
        if client is None:
            return False
        try:
            return all([await _answers(client, tenant.tenant, name) for name in tenant.followers])
        finally:
            await client.close()

    async def _is_gone(self, state: StackState, tenant: TenantFile) -> bool:
        self._reload(state)
        await asyncio.sleep(SETTLE_S)
        client = await _logged_in(tenant)
        if client is not None:
            await client.close()
        return client is None

    async def _operator(self, port: int) -> Any:
        found = self._home.credentials()
        return await _connect(f"nats://127.0.0.1:{port}", found.nats_user, found.nats_password)

    async def _make_durables(self, port: int, tenant: TenantFile) -> None:
        client = await self._operator(port)
        try:
            for name in tenant.followers:
                consumer = topology.tenant_consumer(tenant.tenant, name)
                subject = f"$JS.API.CONSUMER.DURABLE.CREATE.{consumer.stream}.{consumer.durable}"
                await _call(client, subject, {"stream_name": consumer.stream, "config": consumer_config(consumer)})
        finally:
            await client.close()

    async def _delete_durables(self, port: int, tenant: TenantFile) -> None:
        client = await self._operator(port)
        try:
            for name in tenant.followers:
                consumer = topology.tenant_consumer(tenant.tenant, name)
                subject = f"$JS.API.CONSUMER.DELETE.{consumer.stream}.{consumer.durable}"
                await _call(client, subject, {}, absent_is_fine=True)
        finally:
            await client.close()


def consumer_config(consumer: topology.Consumer) -> dict[str, Any]:
    """The same durable as the services make, which leave one that is there as it is."""
    return {
        "durable_name": consumer.durable,
        "ack_policy": consumer.ack_policy.value,
        "deliver_policy": "all",
        "filter_subject": consumer.filter_subject,
        "ack_wait": int((consumer.ack_wait_s or topology.ACK_WAIT_S) * _NANOSECONDS),
        "max_deliver": -1,
        "max_ack_pending": consumer.max_ack_pending,
        "replay_policy": "instant",
        "num_replicas": 0,
    }


async def _connect(url: str, user: str, password: str) -> Any:
    import nats

    async def silent(_: Exception) -> None:
        """The exception raised by `connect` says it."""

    return await nats.connect(
        url,
        user=user,
        password=password,
        name="rollgrid-tenants",
        allow_reconnect=False,
        connect_timeout=2,
        error_cb=silent,
    )


async def _call(client: Any, subject: str, body: dict[str, Any], *, absent_is_fine: bool = False) -> None:
    from nats.errors import Error

    try:
        answer = json.loads((await client.request(subject, json.dumps(body).encode(), timeout=5)).data)
    except (Error, TimeoutError) as error:
        raise ConfigurationError(f"nats-server does not answer {subject}: {error!r}") from error
    problem = answer.get("error")
    if problem and not (absent_is_fine and problem.get("code") == 404):
        raise ConfigurationError(f"{subject}: {problem.get('description')}")


async def _logged_in(tenant: TenantFile) -> Any:
    """A connection as the tenant, None when the server refuses it."""
    from nats.errors import Error

    try:
        return await _connect(tenant.nats_url, tenant.nats_user, tenant.nats_password)
    except (Error, OSError, TimeoutError):
        return None


async def _answers(client: Any, tenant: str, follower: str) -> bool:
    """Whether a pull of this durable is answered; one that is malformed takes nothing from it."""
    from nats.errors import Error

    consumer = topology.tenant_consumer(tenant, follower)
    try:
        await client.request(f"$JS.API.CONSUMER.MSG.NEXT.{consumer.stream}.{consumer.durable}", b"{", timeout=2)
    except (Error, TimeoutError):
        return False
    return True


async def _until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + RELOAD_S
    while not await condition():
        if time.monotonic() > deadline:
            raise ConfigurationError(f"not within {RELOAD_S:.0f} s: {what}; see nats-server's log")
        await asyncio.sleep(0.1)
