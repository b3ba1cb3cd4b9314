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
    from .async_sessions import AsyncSession
    from .batching import group_advantages, to_arrays
    from .client import Batch, Client
    from .cursor import CursorFile
    from .episodes import EpisodeEnded, run_episodes, run_episodes_async
    from .errors import (
        DeadlineExceeded,
        RollgridAPIError,
        RollgridError,
        Unreachable,
        Unsendable,
        VersionRefused,
        VersionRolledBack,
        VersionSuperseded,
    )
    from .nats_client import NatsClient, Queued
    from .paths import Path
    from .results import Group, Sample, SampledTurn
    from .rewards import Post, Standing
    from .sessions import Session
    from .transport import Retries
    from .turns import Turn

_HOMES = {
    "AsyncBatch": "async_client",
    "AsyncClient": "async_client",
    "AsyncSession": "async_sessions",
    "Batch": "client",
    "Client": "client",
    "CursorFile": "cursor",
    "DeadlineExceeded": "errors",
    "EpisodeEnded": "episodes",
    "Group": "results",
    "NatsClient": "nats_client",
    "Path": "paths",
    "Post": "rewards",
    "Queued": "nats_client",
    "Retries": "transport",
    "RollgridAPIError": "errors",
    "RollgridError": "errors",
    "Sample": "results",
    "SampledTurn": "results",
    "Session": "sessions",
    "Standing": "rewards",
    "Turn": "turns",
    "Unreachable": "errors",
    "Unsendable": "errors",
    "VersionRefused": "errors",
    "VersionRolledBack": "errors",
    "VersionSuperseded": "errors",
    "group_advantages": "batching",
    "run_episodes": "episodes",
    "run_episodes_async": "episodes",
    "to_arrays": "batching",
}

__all__ = [
    "AsyncBatch",
    "AsyncClient",
    "AsyncSession",
    "Batch",
    "Client",
    "CursorFile",
    "DeadlineExceeded",
    "EpisodeEnded",
    "Group",
    "NatsClient",
    "Path",
    "Post",
    "Queued",
    "Retries",
    "RollgridAPIError",
    "RollgridError",
    "Sample",
    "SampledTurn",
    "Session",
    "Standing",
    "Turn",
    "Unreachable",
    "Unsendable",
    "VersionRefused",
    "VersionRolledBack",
    "VersionSuperseded",
    "group_advantages",
    "run_episodes",
    "run_episodes_async",
    "to_arrays",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value
