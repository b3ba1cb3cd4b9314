"""Reads the archive as a stranger would: manifests, digests, and the Parquet columns themselves."""

from __future__ import annotations

import hashlib
import io
import json
from collections import defaultdict
from typing import Any

import pyarrow.parquet as pq
from rollgrid_contracts.columns import MANIFEST_PREFIX
from rollgrid_runtime.blobs import Blobs

from .checker import ArchivedGroup, ArchivedRange, ArchivedSample

COLUMNS = ["sequence", "group_id", "index", "status", "token_ids", "logprobs", "reward"]


async def read_archive(blobs: Blobs) -> list[ArchivedRange]:
    """Every manifest with what its object really holds."""
    return [await _range(blobs, key) for key in await blobs.keys(MANIFEST_PREFIX)]


async def _range(blobs: Blobs, key: str) -> ArchivedRange:
    manifest: dict[str, Any] = json.loads(await blobs.get(key) or b"{}")
    first, last, object_key = int(manifest["first"]), int(manifest["last"]), manifest.get("key")
    if object_key is None:
        return ArchivedRange(key, first, last, ())
    data = await blobs.get(object_key)
    if data is None:
        return ArchivedRange(key, first, last, (), f"{object_key} is gone")
    groups = _groups(data)
    return ArchivedRange(key, first, last, groups, _difference(manifest, data, groups))


def _difference(manifest: dict[str, Any], data: bytes, groups: tuple[ArchivedGroup, ...]) -> str | None:
    if hashlib.sha256(data).hexdigest() != manifest["sha256"]:
        return "the object's digest is not the manifest's"
    if len(data) != manifest["size"]:
        return f"the object has {len(data)} bytes, the manifest says {manifest['size']}"
    if len(groups) != manifest["groups"]:
        return f"the object has {len(groups)} groups, the manifest says {manifest['groups']}"
    if [(c["sequence"], c["group_id"]) for c in manifest["closes"]] != [(g.sequence, g.group_id) for g in groups]:
        return "the manifest lists other closes than the object holds"
    return None


def _groups(data: bytes) -> tuple[ArchivedGroup, ...]:
    rows = pq.read_table(io.BytesIO(data), columns=COLUMNS).to_pylist()
    samples: dict[tuple[int, str], list[ArchivedSample]] = defaultdict(list)
    for row in rows:
        samples[(row["sequence"], row["group_id"])].append(
            ArchivedSample(row["index"], row["status"], tuple(row["token_ids"]), tuple(row["logprobs"]), row["reward"])
        )
    return tuple(ArchivedGroup(sequence, group, tuple(rows)) for (sequence, group), rows in samples.items())
