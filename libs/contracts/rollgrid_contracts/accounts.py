"""Tenants as NATS accounts: the server's `accounts` block for an operator and its tenants, as text.

The streams belong to the operator's account.  A tenant's account has no JetStream of its own and
imports three kinds of services, each of one exact subject: its submit subject, and per follower
(a durable made with the tenant, `topology.tenant_consumer`) the pull and the acks of that durable.
Nothing else crosses: an account's other subjects end in itself, and the reply of an imported service
is mapped, so that a reply subject reaches nothing of the operator's.  Permissions of a user alone do
not do that (measured): they are here only so that a mistake is told at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from . import ids, subjects, topology

OPERATOR = "RG"
"""Account of the services; the streams are its.  The server's own `$G` cannot export anything."""


class TenantAccount(NamedTuple):
    """One tenant: its user's name is the tenant's.  `followers` name its durables."""

    tenant: str
    password: str
    followers: tuple[str, ...] = ("default",)
    max_connections: int = 64
    max_subscriptions: int = 1024
    max_payload: int = topology.MAX_PAYLOAD

    def check(self) -> None:
        """Raises ValueError when a name cannot be a subject's token."""
        if not ids.is_name(self.tenant):
            raise ValueError(f"{self.tenant!r} is not a tenant name: {ids.NAME_PATTERN}")
        for name in self.followers:
            if not ids.is_name(name):
                raise ValueError(f"{name!r} is not the name of a follower: {ids.NAME_PATTERN}")


class Service(NamedTuple):
    """A subject that crosses from the operator to one tenant.  `streamed` when one request has many answers."""

    subject: str
    streamed: bool = False


def account_of(tenant: str) -> str:
    """The tenant's account; no tenant can be named so as to meet the operator's."""
    return f"tenant-{tenant}"


def services_of(tenant: str, followers: Iterable[str]) -> list[Service]:
    """All that a tenant's account imports."""
    found = [Service(subjects.submit(tenant))]
    for name in followers:
        consumer = topology.tenant_consumer(tenant, name)
        place = f"{consumer.stream}.{consumer.durable}"
        found.append(Service(f"$JS.API.CONSUMER.MSG.NEXT.{place}", streamed=True))
        found.append(Service(f"$JS.ACK.{place}.>"))
    return found


def accounts_block(operator: str, password: str, tenants: Iterable[TenantAccount]) -> str:
    """The `accounts` block of nats-server's configuration.  It holds passwords: keep the file to yourself.

    Raises ValueError for a tenant or follower that cannot be named so: names of users are of all accounts.
    """
    accounts: dict[str, Any] = {}
    exports: list[dict[str, Any]] = []
    for tenant in sorted(tenants, key=lambda one: one.tenant):
        tenant.check()
        if tenant.tenant == operator:
            raise ValueError(f"{operator!r} is the operator's user")
        services = services_of(tenant.tenant, tenant.followers)
        exports += [
            {
                "service": service.subject,
                "accounts": [account_of(tenant.tenant)],
                **({"response": "stream"} if service.streamed else {}),
            }
            for service in services
        ]
        accounts[account_of(tenant.tenant)] = _tenant_account(tenant, services)
    own = {"jetstream": "enabled", "users": [{"user": operator, "password": password}], "exports": exports}
    return f"accounts {json.dumps({OPERATOR: own, **accounts}, indent=2)}\n"


def _tenant_account(tenant: TenantAccount, services: list[Service]) -> dict[str, Any]:
    permissions = {"publish": [service.subject for service in services], "subscribe": ["_INBOX.>"]}
    return {
        "limits": {
            "max_connections": tenant.max_connections,
            "max_subscriptions": tenant.max_subscriptions,
            "max_payload": tenant.max_payload,
        },
        "users": [{"user": tenant.tenant, "password": tenant.password, "permissions": permissions}],
        "imports": [{"service": {"account": OPERATOR, "subject": service.subject}} for service in services],
    }
