"""Posted rewards to Parquet and back, without loss (extra `[archive]`: pyarrow).

The columns are `rollgrid_contracts.columns.REWARD_COLUMNS`: one row per reward, the whole post beside
the first of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rollgrid_contracts import codec
from rollgrid_contracts.columns import REWARD_COLUMNS
from rollgrid_contracts.trajectories import PostedReward, RewardsPosted

from .archive_rows import parquet_of, pc, schema_of

Numbered = tuple[int, RewardsPosted]
"""A post and its RG_TRAJECTORIES sequence."""

_json = msgspec.json.Encoder(enc_hook=repr)

_OF_POST: dict[str, Callable[[RewardsPosted], Any]] = {
    "tenant": lambda p: p.tenant,
    "run": lambda p: p.run,
    "group_id": lambda p: p.group_id,
    "closed_sequence": lambda p: p.closed_seq,
    "source": lambda p: p.source,
    "metadata": lambda p: _json.encode(p.metadata),
    "posted_at": lambda p: p.posted_at,
    "traceparent": lambda p: p.traceparent,
}
_OF_REWARD: dict[str, Callable[[PostedReward], Any]] = {
    "index": lambda r: r.index,
    "name": lambda r: r.name,
    "kind": lambda r: r.kind,
    "value": lambda r: r.value,
    "turn_values": lambda r: list(r.turn_values),
    "detail": lambda r: r.detail,
}


def to_parquet(posts: Sequence[Numbered]) -> bytes:
    """A Parquet file of `posts`, one row per reward."""
    rows = [row for sequence, post in posts for row in _rows(sequence, post)]
    return parquet_of(pa.Table.from_pylist(rows, schema=schema_of(REWARD_COLUMNS)), REWARD_COLUMNS)


def _rows(sequence: int, post: RewardsPosted) -> Iterable[dict[str, Any]]:
    shared = {"sequence": sequence, **{name: value(post) for name, value in _OF_POST.items()}}
    record: bytes | None = codec.encode(post)
    for reward in post.rewards:
        yield {**shared, **{name: value(reward) for name, value in _OF_REWARD.items()}, "post_record": record}
        record = None


def from_parquet(
    data: bytes, tenant: str | None = None, run: str | None = None, after: int = 0, limit: int | None = None
) -> list[Numbered]:
    """Posts of a Parquet file behind sequence `after`, of one tenant (and run) if given, at most `limit`."""
    columns = ["sequence", "tenant", "run", "post_record"]
    table: Any = pq.read_table(pa.BufferReader(data), columns=columns)
    keep: Any = pc.and_(pc.is_valid(table["post_record"]), pc.greater(table["sequence"], pa.scalar(after, pa.uint64())))
    for name, wanted in (("tenant", tenant), ("run", run)):
        if wanted is not None:
            keep = pc.and_(keep, pc.equal(table[name], wanted))
    found: Any = table.filter(keep).slice(0, limit)
    records = zip(found["sequence"].to_pylist(), found["post_record"].to_pylist(), strict=True)
    return [(sequence, codec.decode(record, RewardsPosted)) for sequence, record in records]
