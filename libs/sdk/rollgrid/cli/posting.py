"""Rewards posted onto a closed group, by the route that customers use."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec
from rollgrid_contracts import codec

from rollgrid.transport import Call

if TYPE_CHECKING:
    from rollgrid.client import Client
    from rollgrid.results import Group


def post_rewards(client: Client, group: Group, rewards: list[dict[str, Any]], *, source: str) -> None:
    """Store `rewards` beside the group; the same ones posted again are one post.  Raises as every call."""
    body = msgspec.json.encode({"rewards": rewards, "cursor": group.cursor, "source": source})
    key = f"{source}-{group.id}-{hashlib.sha256(body).hexdigest()[:32]}"
    headers = {"content-type": codec.JSON, "idempotency-key": key}
    path = f"/v1/groups/{quote(group.id, safe='')}/rewards"
    client._transport.send(Call("POST", path, lambda _body, _type: None, body=body, headers=headers))
