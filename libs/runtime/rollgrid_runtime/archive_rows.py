"""Closed groups to Arrow tables and back, without loss (extra `[archive]`: pyarrow).

The columns are those of `rollgrid_contracts.columns`.  Entries come back without their turns, which are rows of
their own (`archive_turns`).  Token arrays go from packed bytes to Arrow
buffers and back without becoming Python numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as _compute
import pyarrow.parquet as pq
from rollgrid_contracts import codec
from rollgrid_contracts.arrays import Floats, PackedArray, TokenIds
from rollgrid_contracts.columns import COLUMNS, GROUP_COLUMNS, SAMPLE_COLUMNS, Column, Kind
from rollgrid_contracts.jobs import VersionRule
from rollgrid_contracts.trajectories import Entry, GroupClosed

Numbered = tuple[int, GroupClosed]
"""A close and its RG_TRAJECTORIES sequence."""

ZSTD_LEVEL = 3
TYPES: dict[Kind, Any] = {
    Kind.TEXT: pa.string(),
    Kind.CATEGORY: pa.string(),
    Kind.INT: pa.int64(),
    Kind.FLAG: pa.bool_(),
    Kind.SEQUENCE: pa.uint64(),
    Kind.FLOAT: pa.float64(),
    Kind.TOKENS: pa.list_(pa.field("element", pa.uint32(), nullable=False)),
    Kind.LOGPROBS: pa.list_(pa.field("element", pa.float32(), nullable=False)),
    Kind.NUMBERS: pa.list_(pa.float64()),
    Kind.TEXTS: pa.list_(pa.string()),
    Kind.INTS: pa.list_(pa.int64()),
    Kind.JSON: pa.string(),
    Kind.BYTES: pa.binary(),
}
_PACKED = (Kind.TOKENS, Kind.LOGPROBS)
pc: Any = _compute  # its functions are made at import, which stubs describe in part only
_json = msgspec.json.Encoder(enc_hook=repr)

_OF_GROUP: dict[str, Callable[[GroupClosed], Any]] = {
    "tenant": lambda g: g.tenant,
    "run": lambda g: g.run,
    "batch_id": lambda g: g.batch_id,
    "group_id": lambda g: g.group_id,
    "position": lambda g: g.position,
    "n": lambda g: g.n,
    "policy": lambda g: g.policy,
    "model": lambda g: g.model,
    "close_reason": lambda g: g.reason.value,
    "priority": lambda g: g.priority.value,
    "created_at": lambda g: g.created_at,
    "closed_at": lambda g: g.closed_at,
    "deadline": lambda g: g.deadline,
    "prompt_token_ids": lambda g: g.prompt_token_ids,
    "prompt_text": lambda g: g.prompt_text,
    "messages": lambda g: None if g.messages is None else _json.encode(g.messages),
    "sampling": lambda g: None if g.sampling is None else _json.encode(g.sampling),
    "logprobs_mode": lambda g: g.logprobs_mode,
    "reward_formula": lambda g: g.reward_formula,
    "task": lambda g: _json.encode(g.task),
    "metadata": lambda g: _json.encode(g.metadata),
    "purposes": lambda g: [purpose.value for purpose in g.rights.purposes],
    "grant_id": lambda g: g.rights.grant_id,
    "engagement_id": lambda g: g.engagement_id,
    "weights_rule": lambda g: g.weights.rule.value,
    "weights_value": lambda g: None if g.weights.rule is VersionRule.LATEST else g.weights.value,
    "traceparent": lambda g: g.traceparent,
}
_OF_ENTRY: dict[str, Callable[[Entry], Any]] = {
    "index": lambda e: e.sample.index,
    "turns": lambda e: len(e.turns),
    "attempt": lambda e: e.sample.attempt,
    "status": lambda e: e.sample.status.value,
    "finish_reason": lambda e: None if e.sample.finish_reason is None else e.sample.finish_reason.value,
    "token_ids": lambda e: e.sample.token_ids,
    "logprobs": lambda e: e.sample.logprobs,
    "text": lambda e: e.sample.text,
    "span_versions": lambda e: [span.version for span in e.sample.version_spans],
    "span_ends": lambda e: [span.end for span in e.sample.version_spans],
    "oldest_version": lambda e: min(e.versions, default=None),
    "newest_version": lambda e: max(e.versions, default=None),
    "staleness": lambda e: e.staleness,
    "weight_fingerprint": lambda e: e.sample.weight_fingerprint,
    "fingerprint_confirmed": lambda e: e.sample.fingerprint_confirmed,
    "seed": lambda e: e.sample.seed,
    "reward": lambda e: e.reward,
    "score_status": lambda e: None if e.score_status is None else e.score_status.value,
    "score_names": lambda e: [score.scorer for score in e.scores],
    "score_values": lambda e: [score.value for score in e.scores],
    "score_statuses": lambda e: [score.status.value for score in e.scores],
    "turn_values": lambda e: (
        _json.encode(found)
        if (found := {score.scorer: score.turn_values for score in e.scores if score.turn_values})
        else None
    ),
    "engine": lambda e: e.engine,
    "worker": lambda e: e.sample.worker,
    "started_at": lambda e: e.sample.timings.started_at,
    "first_token_at": lambda e: e.sample.timings.first_token_at,
    "finished_at": lambda e: e.sample.timings.finished_at,
    "error_code": lambda e: None if e.sample.error is None else e.sample.error.code.value,
    "error_message": lambda e: None if e.sample.error is None else e.sample.error.message,
}


def schema() -> pa.Schema:
    return schema_of(COLUMNS)


def schema_of(columns: Iterable[Column]) -> pa.Schema:
    return pa.schema([pa.field(c.name, TYPES[c.kind], c.nullable, {"about": c.about}) for c in columns])


def to_table(groups: Sequence[Numbered]) -> pa.Table:
    """One row per entry, in the order given; turns are left to `archive_turns`."""
    widths = [len(group.entries) for _, group in groups]
    entries = [entry for _, group in groups for entry in group.entries]
    arrays: dict[str, Any] = {
        "sequence": pa.array(_repeated((seq for seq, _ in groups), widths), pa.uint64()),
    }
    for column in GROUP_COLUMNS[1:]:
        value = _OF_GROUP[column.name]
        arrays[column.name] = column_array(column, _repeated((value(group) for _, group in groups), widths))
    for column in SAMPLE_COLUMNS:
        arrays[column.name] = column_array(column, list(map(_OF_ENTRY[column.name], entries)))
    first_rows: list[bytes | None] = []
    for (_, group), width in zip(groups, widths, strict=True):
        first_rows += [_group_record(group), *itertools.repeat(None, width - 1)]
    arrays["group_record"] = pa.array(first_rows, pa.binary())
    arrays["entry_record"] = pa.array([_entry_record(entry) for entry in entries], pa.binary())
    return pa.Table.from_arrays([arrays[column.name] for column in COLUMNS], schema=schema())


def from_table(table: pa.Table) -> list[Numbered]:
    """The groups of whole rows, as they were closed."""
    whole: Any = table.combine_chunks()
    sequences = whole["sequence"].to_pylist()
    heads = whole["group_record"].to_pylist()
    records = whole["entry_record"].to_pylist()
    prompts, texts = packed_column(whole, "prompt_token_ids", TokenIds), whole["prompt_text"].to_pylist()
    tokens, logprobs = packed_column(whole, "token_ids", TokenIds), packed_column(whole, "logprobs", Floats)
    words = whole["text"].to_pylist()
    groups: list[Numbered] = []
    row = 0
    while row < len(sequences):
        head = codec.decode(heads[row], GroupClosed)
        start, row = row, row + 1
        while row < len(sequences) and heads[row] is None:
            row += 1
        entries = tuple(
            _whole_entry(records[i], token_ids=tokens[i], logprobs=logprobs[i], text=words[i])
            for i in range(start, row)
        )
        group = msgspec.structs.replace(
            head, entries=entries, prompt_token_ids=prompts[start], prompt_text=texts[start]
        )
        groups.append((sequences[start], group))
    return groups


def to_parquet(groups: Sequence[Numbered]) -> bytes:
    """A Parquet file of `groups`."""
    return parquet_of(to_table(groups), COLUMNS)


def parquet_of(table: pa.Table, columns: Iterable[Column]) -> bytes:
    """A Parquet file (zstd) of a table with these columns, one row group."""
    sink = pa.BufferOutputStream()
    dictionary: Any = [column.name for column in columns if column.kind is Kind.CATEGORY]
    pq.write_table(
        table,
        sink,
        compression="zstd",
        compression_level=ZSTD_LEVEL,
        use_dictionary=dictionary,
        write_statistics=["sequence", "tenant", "run"],
        row_group_size=1 << 20,
    )
    return bytes(sink.getvalue().to_pybytes())


def from_parquet(
    data: bytes, tenant: str | None = None, run: str | None = None, after: int = 0, limit: int | None = None
) -> list[Numbered]:
    """Groups of a Parquet file behind sequence `after`, of one tenant (and run) if given, at most `limit`."""
    table: Any = pq.read_table(pa.BufferReader(data))
    keep: Any = pc.greater(table["sequence"], pa.scalar(after, pa.uint64()))
    if tenant is not None:
        keep = pc.and_(keep, pc.equal(table["tenant"], tenant))
    if run is not None:
        keep = pc.and_(keep, pc.equal(table["run"], run))
    table = table.filter(keep)
    if limit is not None:
        starts = pc.indices_nonzero(pc.is_valid(table["group_record"]))
        if len(starts) > limit:
            table = table.slice(0, starts[limit].as_py())
    return from_table(table)


def _repeated(values: Iterable[Any], widths: Sequence[int]) -> list[Any]:
    return [value for value, width in zip(values, widths, strict=True) for _ in range(width)]


def column_array(column: Column, values: list[Any]) -> Any:
    if column.kind in _PACKED:
        return _list_array(column.kind, values)
    return pa.array(values, TYPES[column.kind])


def _list_array(kind: Kind, values: Sequence[PackedArray[Any]]) -> Any:
    whole = b"".join(value.packed for value in values)
    offsets = list(itertools.accumulate((len(value) for value in values), initial=0))
    inner = pa.Array.from_buffers(TYPES[kind].value_type, offsets[-1], [None, pa.py_buffer(whole)])
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, type=TYPES[kind])


def packed_column(table: pa.Table, name: str, kind: type[Any]) -> list[Any]:
    if not table.num_rows:
        return []
    column: Any = table[name].chunk(0)
    offsets = column.offsets.to_pylist()
    raw = column.values.buffers()[1]
    whole = memoryview(raw)[column.values.offset * 4 :] if raw is not None else memoryview(b"")
    return [kind(bytes(whole[start * 4 : end * 4])) for start, end in itertools.pairwise(offsets)]


def _group_record(group: GroupClosed) -> bytes:
    bare = msgspec.structs.replace(group, entries=(), prompt_token_ids=TokenIds(), prompt_text=None)
    return codec.encode(bare)


def _entry_record(entry: Entry) -> bytes:
    bare = msgspec.structs.replace(entry.sample, token_ids=TokenIds(), logprobs=Floats(), text=None)
    return codec.encode(msgspec.structs.replace(entry, sample=bare, turns=()))


def _whole_entry(record: bytes, **sample: Any) -> Entry:
    entry = codec.decode(record, Entry)
    return msgspec.structs.replace(entry, sample=msgspec.structs.replace(entry.sample, **sample))
