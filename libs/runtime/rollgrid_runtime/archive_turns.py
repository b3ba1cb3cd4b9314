"""Turns of sessions to Parquet and back, without loss (extra `[archive]`: pyarrow).

The columns are `rollgrid_contracts.columns.TURN_COLUMNS`: one row per turn, which holds a delta only, so that what
branches share is stored once.  The entries of `archive_rows` are written without their turns; `joined` puts them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from rollgrid_contracts import codec
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_contracts.columns import TURN_COLUMNS
from rollgrid_contracts.episodes import TurnNode
from rollgrid_contracts.samples import Sample
from rollgrid_contracts.trajectories import Entry, GroupClosed

from .archive_rows import Numbered, column_array, packed_column, parquet_of, pc, schema_of

Turns = dict[tuple[int, int], tuple[Sample, ...]]
"""By RG_TRAJECTORIES sequence of the group and index of the sample."""

_json = msgspec.json.Encoder(enc_hook=repr)


class Row(NamedTuple):
    seq: int
    group: GroupClosed
    entry: Entry
    sample: Sample

    @property
    def node(self) -> TurnNode:
        return self.sample.node or TurnNode()


_OF_ROW: dict[str, Callable[[Row], Any]] = {
    "sequence": lambda r: r.seq,
    "tenant": lambda r: r.group.tenant,
    "run": lambda r: r.group.run,
    "group_id": lambda r: r.group.group_id,
    "policy": lambda r: r.group.policy,
    "purposes": lambda r: [purpose.value for purpose in r.group.rights.purposes],
    "grant_id": lambda r: r.group.rights.grant_id,
    "index": lambda r: r.entry.sample.index,
    "session": lambda r: r.entry.session,
    "turn": lambda r: r.sample.turn,
    "parent": lambda r: r.node.parent,
    "branch": lambda r: r.node.branch,
    "fork": lambda r: None if r.node.fork is None else r.node.fork.value,
    "fork_detail": lambda r: r.node.fork_detail,
    "attempt": lambda r: r.sample.attempt,
    "status": lambda r: r.sample.status.value,
    "finish_reason": lambda r: None if r.sample.finish_reason is None else r.sample.finish_reason.value,
    "observation_token_ids": lambda r: r.node.observation,
    "closing": lambda r: r.node.closing,
    "token_ids": lambda r: r.sample.token_ids,
    "logprobs": lambda r: r.sample.logprobs,
    "text": lambda r: r.sample.text,
    "messages": lambda r: _json.encode(r.node.messages),
    "tool_calls": lambda r: _json.encode(r.sample.parsed.tool_calls if r.sample.parsed else ()),
    "parse_status": lambda r: r.sample.parsed.parse_status if r.sample.parsed else None,
    "approvals": lambda r: _json.encode(r.node.approvals),
    "deliverables": lambda r: _json.encode(r.node.deliverables),
    "span_versions": lambda r: [span.version for span in r.sample.version_spans],
    "span_ends": lambda r: [span.end for span in r.sample.version_spans],
    "reward": lambda r: r.entry.turn_rewards.get(r.sample.turn),
    "turn_values": lambda r: _json.encode(found) if (found := _values(r)) else None,
    "weight_fingerprint": lambda r: r.sample.weight_fingerprint,
    "seed": lambda r: r.sample.seed,
    "worker": lambda r: r.sample.worker,
    "cached_tokens": lambda r: r.sample.cached_tokens,
    "gap_s": lambda r: r.node.gap_s,
    "started_at": lambda r: r.sample.timings.started_at,
    "first_token_at": lambda r: r.sample.timings.first_token_at,
    "finished_at": lambda r: r.sample.timings.finished_at,
    "error_code": lambda r: None if r.sample.error is None else r.sample.error.code.value,
    "error_message": lambda r: None if r.sample.error is None else r.sample.error.message,
    "turn_record": lambda r: _record(r.sample),
}


def rows_of(groups: Iterable[Numbered]) -> list[Row]:
    return [Row(seq, group, entry, turn) for seq, group in groups for entry in group.entries for turn in entry.turns]


def to_parquet(rows: Sequence[Row]) -> bytes:
    """A Parquet file of turns."""
    arrays = [column_array(column, [_OF_ROW[column.name](row) for row in rows]) for column in TURN_COLUMNS]
    return parquet_of(pa.Table.from_arrays(arrays, schema=schema_of(TURN_COLUMNS)), TURN_COLUMNS)


def from_parquet(data: bytes, sequences: Iterable[int]) -> Turns:
    """The turns of the groups that closed at `sequences`."""
    columns = ["sequence", "index", "observation_token_ids", "token_ids", "logprobs", "text", "messages", "turn_record"]
    table: Any = pq.read_table(pa.BufferReader(data), columns=columns)
    whole: Any = table.filter(
        pc.is_in(table["sequence"], pa.array(sorted(set(sequences)), pa.uint64()))
    ).combine_chunks()
    observed = packed_column(whole, "observation_token_ids", TokenIds)
    tokens, logprobs = packed_column(whole, "token_ids", TokenIds), packed_column(whole, "logprobs", Floats)
    plain = (whole[name].to_pylist() for name in ("sequence", "index", "text", "messages", "turn_record"))
    found: dict[tuple[int, int], list[Sample]] = {}
    for row, (seq, index, text, messages, record) in enumerate(zip(*plain, strict=True)):
        sample = codec.decode(record, Sample)
        node = sample.node
        if node is not None:
            said = node.messages or tuple(msgspec.json.decode(messages))
            node = msgspec.structs.replace(node, observation=observed[row], messages=said)
        sample = msgspec.structs.replace(sample, token_ids=tokens[row], logprobs=logprobs[row], text=text, node=node)
        found.setdefault((seq, index), []).append(sample)
    return {key: tuple(turns) for key, turns in found.items()}


def joined(groups: Iterable[Numbered], turns: Turns) -> list[Numbered]:
    """The groups with their turns put back."""
    return [(seq, _whole(seq, group, turns)) for seq, group in groups]


def _whole(seq: int, group: GroupClosed, turns: Turns) -> GroupClosed:
    entries = tuple(
        msgspec.structs.replace(entry, turns=turns.get((seq, entry.sample.index), entry.turns))
        for entry in group.entries
    )
    return msgspec.structs.replace(group, entries=entries)


def _values(row: Row) -> dict[str, float]:
    """Scorers' values for this turn: they stand under turns' numbers."""
    turn = row.sample.turn
    found = {score.scorer: score.turn_values[turn] for score in row.entry.scores if len(score.turn_values) > turn}
    return {scorer: value for scorer, value in found.items() if value is not None}


def _record(sample: Sample) -> bytes:
    node = sample.node
    if node is not None:
        said = node.messages if tuple(msgspec.json.decode(_json.encode(node.messages))) != node.messages else ()
        node = msgspec.structs.replace(node, observation=TokenIds(), messages=said)
    bare = msgspec.structs.replace(sample, token_ids=TokenIds(), logprobs=Floats(), text=None, node=node)
    return codec.encode(bare)
