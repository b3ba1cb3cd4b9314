"""The archive of a stack on this machine: which Parquet objects hold a range, and copies of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rollgrid_contracts.columns import MANIFEST_PREFIX, ArchiveManifest

from . import probes
from .home import Home, StackState
from .seaweed import s3_access


class ArchiveFile(NamedTuple):
    """An object of the archive and its local copy."""

    bucket: str
    key: str
    path: Path
    rows: int


def fetch_batch(
    home: Home, state: StackState, env: Mapping[str, str], folder: Path, batch_id: str, groups: int, timeout_s: float
) -> list[ArchiveFile]:
    """Copy the objects that hold closes of a batch, once manifests name all its `groups`; empty on timeout.

    Only what a manifest names counts.  Raises OSError for an object that differs from its manifest.
    """
    access = s3_access(home, env, state.ports)
    client = probes.s3_client(access)
    deadline = time.monotonic() + timeout_s
    while True:
        found = [(m, sum(close.batch_id == batch_id for close in m.closes)) for m in _manifests(client, access.bucket)]
        if sum(count for _, count in found) >= groups:
            break
        if time.monotonic() > deadline:
            return []
        time.sleep(0.3)
    folder.mkdir(parents=True, exist_ok=True)
    return [_copy(client, access.bucket, manifest, folder) for manifest, count in found if count]


def _manifests(client: Any, bucket: str) -> list[ArchiveManifest]:
    found = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=MANIFEST_PREFIX):
        for item in page.get("Contents", []):
            body = client.get_object(Bucket=bucket, Key=item["Key"])["Body"].read()
            found.append(msgspec.json.decode(body, type=ArchiveManifest))
    return found


def _copy(client: Any, bucket: str, manifest: ArchiveManifest, folder: Path) -> ArchiveFile:
    key = manifest.key or ""
    path = folder / key.rpartition("/")[2]
    body = client.get_object(Bucket=bucket, Key=key)["Body"].read()
    if hashlib.sha256(body).hexdigest() != manifest.sha256:
        raise OSError(f"{key} does not match its manifest")
    path.write_bytes(body)
    return ArchiveFile(bucket, key, path, manifest.rows)
