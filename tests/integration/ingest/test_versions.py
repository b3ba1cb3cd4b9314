"""Publishing a version: nothing before the commit, once and immutable after it, racing publishers apart."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator

import httpx2
import msgspec
import pytest
from rollgrid_contracts.checkpoints import CheckpointManifest
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.reading import read_after

from .door import Door
from .test_doors import refusal

BASE = "/v1/policies/tiny/versions"


def put(http: httpx2.Client, version: int, name: str, content: bytes) -> httpx2.Response:
    return http.put(f"{BASE}/{version}/files/{name}", content=content)


def objects(ingest: Door, prefix: str) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        blobs = Blobs(ingest.weed.settings(ingest.bucket))
        found = {key: await blobs.get(key) or b"" for key in await blobs.keys(prefix)}
        blobs.close()
        return found

    return asyncio.run(read())


def announcements(ingest: Door) -> int:
    async def count() -> int:
        async with ingest.connected() as bus:
            return len((await read_after(bus, "RG_CHECKPOINTS", "rg.0.checkpoints.>", 0, 100)).messages)

    return asyncio.run(count())


def test_a_version_exists_from_its_commit_on_and_once(ingest: Door, http: httpx2.Client) -> None:
    weights, config = b"w" * 3_000_000, b'{"a": 1}'
    uploaded = put(http, 1, "model.safetensors", weights)
    assert uploaded.json() == {
        "name": "model.safetensors",
        "size": len(weights),
        "sha256": hashlib.sha256(weights).hexdigest(),
    }
    assert put(http, 1, "config.json", config).status_code == 200
    root = "checkpoints/shared/tiny/1/"
    assert f"{root}manifest.json" not in objects(ingest, root)
    before = announcements(ingest)
    answer = http.post(f"{BASE}/1/commit", json={"step": 12})
    assert answer.status_code == 200, answer.text
    assert answer.json()["created"] is True
    stored = objects(ingest, root)
    manifest = msgspec.json.decode(stored.pop(f"{root}manifest.json"), type=CheckpointManifest)
    assert (manifest.version, manifest.step, manifest.tenant, manifest.policy) == (1, 12, "shared", "tiny")
    assert stored == {manifest.prefix + "model.safetensors": weights, manifest.prefix + "config.json": config}
    assert {file.name: file.sha256 for file in manifest.files} == {
        "model.safetensors": hashlib.sha256(weights).hexdigest(),
        "config.json": hashlib.sha256(config).hexdigest(),
    }
    assert announcements(ingest) == before + 1
    # a retry of the commit, with and without the list, is the same version
    listed = [{"name": file.name, "sha256": file.sha256, "size": file.size} for file in manifest.files]
    for body in ({}, {"files": listed}):
        again = http.post(f"{BASE}/1/commit", json=body)
        assert (again.status_code, again.json()["created"]) == (200, False)
    # other content is refused and changes nothing
    put(http, 1, "model.safetensors", b"other")
    other = http.post(f"{BASE}/1/commit")
    assert other.status_code == 409
    assert refusal(other)["code"] == "version_unavailable"
    assert objects(ingest, manifest.prefix)[manifest.prefix + "model.safetensors"] == weights


def test_racing_publishers_cannot_mix_their_files(ingest: Door, http: httpx2.Client) -> None:
    mine, theirs = b"mine", b"theirs"
    for content in (mine, theirs):
        assert put(http, 5, "model.safetensors", content).status_code == 200
    unclear = http.post(f"{BASE}/5/commit")
    assert (unclear.status_code, refusal(unclear)["param"]) == (400, "files")
    files = [{"name": "model.safetensors", "sha256": hashlib.sha256(mine).hexdigest()}]
    assert http.post(f"{BASE}/5/commit", json={"files": files}).status_code == 200
    late = [{"name": "model.safetensors", "sha256": hashlib.sha256(theirs).hexdigest()}]
    assert http.post(f"{BASE}/5/commit", json={"files": late}).status_code == 409
    root = "checkpoints/shared/tiny/5/"
    stored = objects(ingest, root)
    manifest = msgspec.json.decode(stored[f"{root}manifest.json"], type=CheckpointManifest)
    assert stored[manifest.prefix + "model.safetensors"] == mine


@pytest.mark.parametrize(
    "name", ["optimizer.pt", "model.bin", "x.pkl", "code.py", ".safetensors", "..safetensors", "a%2Fb.safetensors", "-x.safetensors"]
)  # fmt: skip
def test_only_weights_configuration_and_tokenizers_are_taken(http: httpx2.Client, name: str) -> None:
    assert put(http, 7, name, b"x").status_code in (400, 404)


def test_wrong_versions_and_commits(http: httpx2.Client) -> None:
    for version in ("0", "-1", str(2**31)):
        assert http.put(f"{BASE}/{version}/files/config.json", content=b"x").status_code in (400, 404)
    assert http.put(f"{BASE}/one/files/config.json", content=b"x").status_code == 404
    empty = put(http, 8, "model.safetensors", b"")
    assert refusal(empty)["param"] == "body"
    put(http, 8, "config.json", b"{}")
    assert refusal(http.post(f"{BASE}/8/commit"))["param"] == "files"
    assert refusal(http.post(f"{BASE}/8/commit", json={"kind": "delta"}))["code"] == "unsupported"
    missing = {"files": [{"name": "model.safetensors", "sha256": "0" * 64}]}
    assert refusal(http.post(f"{BASE}/8/commit", json=missing))["param"] == "files[0]"


def test_an_upload_is_streamed_in_chunks_of_unknown_length(http: httpx2.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"z" * 100_000

    answer = http.put(f"{BASE}/9/files/model.safetensors", content=chunks())
    assert answer.json()["size"] == 4_000_000
