"""Client of rollgrid, the sampling fleet for teams that own their RL trainer.

    from rollgrid import Client, group_advantages, to_arrays

    with Client() as client:
        batch = client.submit(["2+2="], n=8, sampling={"max_tokens": 16}, run="my-run")
        arrays = to_arrays(batch.groups())

Names are imported when first used, so that `import rollgrid` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .async_client import AsyncBatch, AsyncClient
    from .batching import group_advantages, to_arrays
    from .client import Batch, Client
    from .cursor import CursorFile
    from .errors import (
        DeadlineExceeded,
        RollgridAPIError,
        RollgridError,
        Unreachable,
        Unsendable,
        VersionRefused,
        VersionRolledBack,
    )
    from .nats_client import NatsClient, Queued
    from .results import Group, Sample
    from .rewards import Post, Standing
    from .transport import Retries

_HOMES = {
    "AsyncBatch": "async_client",
    "AsyncClient": "async_client",
    "Batch": "client",
    "Client": "client",
    "CursorFile": "cursor",
    "DeadlineExceeded": "errors",
    "Group": "results",
    "NatsClient": "nats_client",
    "Post": "rewards",
    "Queued": "nats_client",
    "Retries": "transport",
    "RollgridAPIError": "errors",
    "RollgridError": "errors",
    "Sample": "results",
    "Standing": "rewards",
    "Unreachable": "errors",
    "Unsendable": "errors",
    "VersionRefused": "errors",
    "VersionRolledBack": "errors",
    "group_advantages": "batching",
    "to_arrays": "batching",
}

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "Batch",
    "Client",
    "CursorFile",
    "DeadlineExceeded",
    "Group",
    "NatsClient",
    "Post",
    "Queued",
    "Retries",
    "RollgridAPIError",
    "RollgridError",
    "Sample",
    "Standing",
    "Unreachable",
    "Unsendable",
    "VersionRefused",
    "VersionRolledBack",
    "group_advantages",
    "to_arrays",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
