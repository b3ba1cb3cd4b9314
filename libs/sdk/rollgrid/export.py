"""Groups to files: JSON lines (lossless, one group a line) and Parquet (one row per sample, per path of a session)."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .results import Group, Sample
from .rewards import Standing, turn_rewards

if TYPE_CHECKING:
    import pyarrow as pa

    from .paths import Path


def to_jsonl(groups: Iterable[Group], path: str | os.PathLike[str], *, posted: Standing | None = None) -> int:
    """Write one JSON object per group (`Group.to_dict`); returns how many.

    With `posted`, those onto which rewards stand have `posted_rewards` too, as `posted_rewards_of` gives them.
    """
    count = 0
    with open(path, "wb") as file:
        for group in groups:
            record = group.to_dict()
            if posted is not None:
                found = [reward for sample in group.samples for reward in posted_rewards_of(group, sample, posted)]
                record |= {"posted_rewards": found} if found else {}
            file.write(msgspec.json.encode(record) + b"\n")
            count += 1
    return count


def from_jsonl(path: str | os.PathLike[str]) -> Iterator[Group]:
    """Read what `to_jsonl` wrote."""
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                yield Group.from_dict(json.loads(line))


def posted_rewards_of(group: Group, sample: Sample, posted: Standing) -> list[dict[str, Any]]:
    """What stands posted onto a sample; per-turn values lie on their sampled tokens [start, end)."""
    return [
        {
            "index": reward.index,
            "name": reward.name,
            "kind": reward.kind,
            "value": reward.value,
            "turns": [turn._asdict() for turn in turn_rewards(sample.entry, reward.turn_values)],
            "detail": reward.detail,
            "source": reward.source,
            "posted_at": reward.posted_at,
            "cursor": reward.cursor,
        }
        for reward in posted.of(group.id, sample.index)
    ]


def rows_of(group: Group, sample: Sample, posted: Standing | None = None) -> list[dict[str, Any]]:
    """One row; of a session one per root→leaf path, and one without tokens where nothing was sampled."""
    row = sample_row(group, sample, posted)
    if sample.session is None:
        return [row]
    return [row | _path_row(path) for path in sample.paths()] or [row]


def _path_row(path: Path) -> dict[str, Any]:
    """What differs from path to path.  `train_mask` is 1 in one path only for each sampled token."""
    return {
        "branch": path.branch,
        "turns": list(path.turns),
        "prompt_token_ids": path.prompt_ids,
        "token_ids": path.completion_ids,
        "logprobs": path.logprobs,
        "mask": path.mask,
        "train_mask": path.first,
        "token_rewards": path.rewards,
        "version_spans": _spans(path.versions.tolist()),
    }


def _spans(versions: Sequence[int]) -> list[dict[str, int]]:
    """Runs of one version; observed tokens are in none."""
    found, at = list[dict[str, int]](), 0
    for version, run in itertools.groupby(versions):
        end = at + sum(1 for _ in run)
        found += [{"version": version, "start": at, "end": end}] if version >= 0 else []
        at = end
    return found


def sample_row(group: Group, sample: Sample, posted: Standing | None = None) -> dict[str, Any]:
    """One flat row; `task`, `metadata`, `scores` and `sampling` as JSON text, so that schemas never clash."""
    record = group.closed
    return {
        "tenant": record.tenant,
        "run": record.run,
        "batch_id": record.batch_id,
        "group_id": record.group_id,
        "position": record.position,
        "cursor": group.cursor,
        "policy": record.policy,
        "index": sample.index,
        "status": sample.status.value,
        "finish_reason": None if sample.finish_reason is None else sample.finish_reason.value,
        "reward": sample.reward,
        "score_status": None if sample.score_status is None else sample.score_status.value,
        "prompt_token_ids": group.prompt_ids,
        "token_ids": sample.token_ids,
        "logprobs": sample.logprobs,
        "text": sample.text,
        "prompt_text": record.prompt_text,
        "version_spans": [{"version": s.version, "start": s.start, "end": s.end} for s in sample.spans],
        "weight_fingerprint": sample.record.weight_fingerprint,
        "seed": sample.record.seed,
        "error_code": None if sample.error is None else sample.error.code.value,
        "error_message": None if sample.error is None else sample.error.message,
        "scores": msgspec.json.encode(sample.scores).decode(),
        "task": msgspec.json.encode(record.task).decode(),
        "metadata": msgspec.json.encode(record.metadata).decode(),
        "sampling": msgspec.json.encode(record.sampling).decode(),
        "created_at": record.created_at,
        "closed_at": record.closed_at,
        "posted_rewards": [] if posted is None else posted_rewards_of(group, sample, posted),
        "session": sample.session,
        "branch": None,
        "turns": [],
        "mask": np.ones(len(sample), bool),
        "train_mask": np.ones(len(sample), bool),
        "token_rewards": [],
    }


def _schema() -> pa.Schema:
    import pyarrow as pa

    turn = pa.struct([("value", pa.float64()), ("start", pa.int64()), ("end", pa.int64())])
    reward = pa.struct(
        [
            ("index", pa.int64()), ("name", pa.string()), ("kind", pa.string()), ("value", pa.float64()),
            ("turns", pa.list_(turn)), ("detail", pa.string()), ("source", pa.string()),
            ("posted_at", pa.float64()), ("cursor", pa.int64()),
        ]
    )  # fmt: skip
    span = pa.struct([("version", pa.int64()), ("start", pa.int64()), ("end", pa.int64())])
    text, real, whole = pa.string(), pa.float64(), pa.int64()
    columns: Sequence[tuple[str, pa.DataType]] = (
        ("tenant", text), ("run", text), ("batch_id", text), ("group_id", text), ("position", whole),
        ("cursor", whole), ("policy", text), ("index", whole), ("status", text), ("finish_reason", text),
        ("reward", real), ("score_status", text), ("prompt_token_ids", pa.list_(pa.uint32())),
        ("token_ids", pa.list_(pa.uint32())), ("logprobs", pa.list_(pa.float32())), ("text", text),
        ("prompt_text", text), ("version_spans", pa.list_(span)), ("weight_fingerprint", text), ("seed", whole),
        ("error_code", text), ("error_message", text), ("scores", text), ("task", text), ("metadata", text),
        ("sampling", text), ("created_at", real), ("closed_at", real),
        ("posted_rewards", pa.list_(reward)), ("session", text), ("branch", text), ("turns", pa.list_(whole)),
        ("mask", pa.list_(pa.bool_())), ("train_mask", pa.list_(pa.bool_())), ("token_rewards", pa.list_(pa.float32())),
    )  # fmt: skip
    return pa.schema(list(columns))


def to_parquet(
    groups: Iterable[Group],
    path: str | os.PathLike[str],
    *,
    rows_per_group: int = 4096,
    posted: Standing | None = None,
) -> int:
    """Write one row per sample, or path of a session (`rows_of`), streaming; returns how many rows.  Needs pyarrow."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = _schema()
    rows: list[dict[str, Any]] = []
    count = 0
    with pq.ParquetWriter(os.fspath(path), schema, compression="zstd") as writer:
        for group in groups:
            for sample in group.samples:
                rows += rows_of(group, sample, posted)
            if len(rows) >= rows_per_group:
                writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                count += len(rows)
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    return count + len(rows)
