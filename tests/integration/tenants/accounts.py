"""A real nats-server on the rendered accounts: the operator's streams, and users of two tenants."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nats
from nats.aio.client import Client
from rollgrid_contracts.accounts import OPERATOR, TenantAccount, accounts_block, services_of

from tests.support.servers import NatsServer

ACME, BOLT = "acme", "bolt"
FREE = "unbounded"
"""A second user of acme's account, without permissions of his own: only the account holds him."""

PERMITTED = "permitted"
"""A user of the operator's account with acme's subjects as permissions: what is not enough."""

CONF = """\
server_name: accounts
listen: 127.0.0.1:{port}
max_payload: 2MB
{accounts}
jetstream {{ store_dir: "{store}", sync_interval: always, max_mem: 64MB, max_file: 64GB }}
"""


class AccountsServer(NatsServer):
    """`users` of acme differ in what else holds them: see `FREE` and `PERMITTED`."""

    def __init__(self, folder: Path, **limits: Any) -> None:
        super().__init__(folder)
        self.limits = limits
        self.passwords = {name: f"{name}-secret" for name in (ACME, BOLT, FREE, PERMITTED)}
        self.write([ACME, BOLT])

    def write(self, tenants: list[str]) -> None:
        """The configuration for these tenants; a running server reads it at SIGHUP."""
        rendered = accounts_block(self.user, self.password, [self._tenant(name) for name in tenants])
        accounts = json.loads(rendered.removeprefix("accounts "))
        own = [service.subject for service in services_of(ACME, ["default", "eval"])]
        accounts["tenant-acme"]["users"].append({"user": FREE, "password": self.passwords[FREE]})
        accounts[OPERATOR]["users"].append(
            {
                "user": PERMITTED,
                "password": self.passwords[PERMITTED],
                "permissions": {"publish": own, "subscribe": ["_INBOX.>"]},
            }
        )
        text = CONF.format(port=self.port, accounts="accounts " + json.dumps(accounts), store=self.store)
        (self.folder / "nats.conf").write_text(text)

    def _tenant(self, name: str) -> TenantAccount:
        return TenantAccount(tenant=name, password=self.passwords[name], followers=("default", "eval"), **self.limits)

    async def connect(self, user: str, errors: list[Exception] | None = None, **options: Any) -> Client:
        async def on_error(error: Exception) -> None:
            if errors is not None:
                errors.append(error)

        password = self.password if user == self.user else self.passwords[user]
        return await nats.connect(self.url, user=user, password=password, error_cb=on_error, **options)
