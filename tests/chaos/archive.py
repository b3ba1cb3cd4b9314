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

from .checker import ArchivedGroup, ArchivedRange, ArchivedSample, ArchivedTurn, StoredPost

COLUMNS = ["sequence", "group_id", "index", "status", "token_ids", "logprobs", "reward"]
TURN_COLUMNS = ["sequence", "index", "turn", "parent", "observation_token_ids", "token_ids", "logprobs"]
Turns = dict[tuple[int, int], list[ArchivedTurn]]


async def read_archive(blobs: Blobs) -> list[ArchivedRange]:
    """Every manifest with what its object really holds."""
    return [await _range(blobs, key) for key in await blobs.keys(MANIFEST_PREFIX)]


async def _range(blobs: Blobs, key: str) -> ArchivedRange:
    manifest: dict[str, Any] = json.loads(await blobs.get(key) or b"{}")
    first, last, object_key = int(manifest["first"]), int(manifest["last"]), manifest.get("key")
    posts, problem = await _posts(blobs, manifest.get("rewards"))
    if object_key is None:
        return ArchivedRange(key, first, last, (), problem, posts)
    data = await blobs.get(object_key)
    if data is None:
        return ArchivedRange(key, first, last, (), f"{object_key} is gone", posts)
    turns, trouble = await _turns(blobs, manifest.get("turns"))
    groups, problem = _groups(data, turns), problem or trouble
    return ArchivedRange(key, first, last, groups, _difference(manifest, data, groups) or problem, posts)


async def _turns(blobs: Blobs, turns: dict[str, Any] | None) -> tuple[Turns, str | None]:
    """Rows of the turns of a range by sequence and index, and how they differ from what the manifest says."""
    found: Turns = defaultdict(list)
    if turns is None:
        return found, None
    data = await blobs.get(turns["key"])
    if data is None:
        return found, f"{turns['key']} is gone"
    if hashlib.sha256(data).hexdigest() != turns["sha256"] or len(data) != turns["size"]:
        return found, "the digest of the turns is not the manifest's"
    rows = pq.read_table(io.BytesIO(data), columns=TURN_COLUMNS).to_pylist()
    for row in rows:
        ids = (tuple(row[name]) for name in ("observation_token_ids", "token_ids", "logprobs"))
        found[row["sequence"], row["index"]].append(ArchivedTurn(row["turn"], row["parent"], *ids))
    return found, None if len(rows) == turns["rows"] else "the manifest counts other turns"


async def _posts(blobs: Blobs, rewards: dict[str, Any] | None) -> tuple[tuple[StoredPost, ...], str | None]:
    """Posts of a range as its object holds them, and how that differs from what the manifest says."""
    if rewards is None:
        return (), None
    data = await blobs.get(rewards["key"])
    if data is None:
        return (), f"{rewards['key']} is gone"
    if hashlib.sha256(data).hexdigest() != rewards["sha256"] or len(data) != rewards["size"]:
        return (), "the digest of the rewards is not the manifest's"
    rows = pq.read_table(io.BytesIO(data), columns=["sequence", "group_id"]).to_pylist()
    posts = tuple(dict.fromkeys(StoredPost(row["sequence"], row["group_id"]) for row in rows))
    listed = tuple(StoredPost(post["sequence"], post["group_id"]) for post in rewards["posts"])
    return posts, None if posts == listed and len(rows) == rewards["rows"] else "the manifest lists other posts"


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


def _groups(data: bytes, turns: Turns) -> tuple[ArchivedGroup, ...]:
    rows = pq.read_table(io.BytesIO(data), columns=COLUMNS).to_pylist()
    samples: dict[tuple[int, str], list[ArchivedSample]] = defaultdict(list)
    for row in rows:
        samples[(row["sequence"], row["group_id"])].append(
            ArchivedSample(
                row["index"],
                row["status"],
                tuple(row["token_ids"]),
                tuple(row["logprobs"]),
                row["reward"],
                tuple(turns.get((row["sequence"], row["index"]), ())),
            )
        )
    return tuple(ArchivedGroup(sequence, group, tuple(rows)) for (sequence, group), rows in samples.items())
