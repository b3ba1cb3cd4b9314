"""Publishing a version: nothing before the commit, once and immutable after it, racing publishers and ranks apart."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import pytest
from rollgrid_contracts.checkpoints import (
    AdapterInfo,
    AdoptedVersion,
    CheckpointKind,
    CheckpointManifest,
    OnDeadline,
    PolicyState,
    RolloutRequest,
)
from rollgrid_contracts.topology import POLICIES
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.kv import Table
from rollgrid_runtime.reading import read_after

from tests.support.waiting import wait_until

from .door import Door
from .test_doors import refusal

BASE = "/v1/policies/tiny"
UPLOADS = f"{BASE}/uploads"
ROOT = "checkpoints/shared/tiny/"
MODEL = "model.safetensors"


def begin(http: httpx2.Client, **terms: Any) -> str:
    answer = http.post(UPLOADS, json=terms)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["upload"])


def put(http: httpx2.Client, upload: str, name: str, content: bytes) -> httpx2.Response:
    return http.put(f"{UPLOADS}/{upload}/files/{name}", content=content)


def entry(name: str, content: bytes) -> dict[str, Any]:
    return {"name": name, "size": len(content), "sha256": hashlib.sha256(content).hexdigest()}


def finish(http: httpx2.Client, upload: str, files: dict[str, bytes], rank: int = 0) -> httpx2.Response:
    for name, content in files.items():
        assert put(http, upload, name, content).status_code == 200
    body = {"rank": rank, "files": [entry(name, content) for name, content in files.items()]}
    return http.post(f"{UPLOADS}/{upload}/shards", json=body)


def commit(http: httpx2.Client, upload: str, **body: Any) -> httpx2.Response:
    return http.post(f"{UPLOADS}/{upload}/commit", json=body)


def objects(ingest: Door, prefix: str) -> dict[str, bytes]:
    async def read() -> dict[str, bytes]:
        blobs = Blobs(ingest.weed.settings(ingest.bucket))
        found = {key: await blobs.get(key) or b"" for key in await blobs.keys(prefix)}
        blobs.close()
        return found

    return asyncio.run(read())


def manifest(ingest: Door, version: int) -> CheckpointManifest:
    return msgspec.json.decode(objects(ingest, f"{ROOT}{version}/manifest.json").popitem()[1], type=CheckpointManifest)


def announcements(ingest: Door) -> int:
    async def count() -> int:
        async with ingest.connected() as bus:
            return len((await read_after(bus, "RG_CHECKPOINTS", "rg.0.checkpoints.>", 0, 500)).messages)

    return asyncio.run(count())


def test_a_version_exists_from_its_commit_on_and_once(ingest: Door, http: httpx2.Client) -> None:
    weights, config = b"w" * 3_000_000, b'{"a": 1}'
    upload = begin(http, step=12, next_within_s=60)
    assert put(http, upload, MODEL, weights).json() == entry(MODEL, weights)
    assert finish(http, upload, {MODEL: weights, "config.json": config}).json()["missing"] == []
    before, told = objects(ingest, ROOT), announcements(ingest)
    assert not [key for key in before if key.endswith("manifest.json") and upload in key]
    answer = commit(http, upload, rollout={"canary": 1, "canary_s": 5, "on_deadline": "roll_back"})
    assert answer.status_code == 200, answer.text
    version = answer.json()["version"]
    assert answer.json() == {
        "policy": "tiny", "version": version, "kind": "full", "created": True,
        "manifest_key": f"{ROOT}{version}/manifest.json",
    }  # fmt: skip
    made = manifest(ingest, version)
    assert (made.version, made.step, made.next_within_s, made.kind) == (version, 12, 60.0, CheckpointKind.FULL)
    assert made.rollout == RolloutRequest(canary=1, canary_s=5.0, on_deadline=OnDeadline.ROLL_BACK)
    stored = objects(ingest, made.prefix)
    assert stored == {made.prefix + MODEL: weights, made.prefix + "config.json": config}
    assert {file.name: file.sha256 for file in made.files} == {
        name: hashlib.sha256(content).hexdigest() for name, content in ((MODEL, weights), ("config.json", config))
    }
    assert announcements(ingest) == told + 1
    assert not objects(ingest, f"{ROOT}uploads/{upload}/files/")
    again = commit(http, upload)  # a retry, whatever it says of the rollout
    assert (again.status_code, again.json()["created"], again.json()["version"]) == (200, False, version)
    assert manifest(ingest, version) == made
    assert announcements(ingest) == told + 2


def test_A43_racing_for_a_number_one_publisher_wins(ingest: Door, http: httpx2.Client) -> None:
    uploads = [begin(http, version=500) for _ in range(4)]
    for number, upload in enumerate(uploads):
        finish(http, upload, {MODEL: b"w%d" % number})
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda upload: commit(http, upload), uploads))
    won = [number for number, answer in enumerate(answers) if answer.status_code == 200]
    assert len(won) == 1
    for answer in answers:
        if answer.status_code != 200:
            told = refusal(answer)
            assert (answer.status_code, told["code"], told["retryable"]) == (409, "version_unavailable", False)
    made = manifest(ingest, 500)
    assert objects(ingest, f"{ROOT}500/{uploads[won[0]]}/") == {made.prefix + MODEL: b"w%d" % won[0]}
    assert refusal(commit(http, uploads[1 - min(won[0], 1)]))["code"] == "version_unavailable"


def test_racing_publishers_without_a_number_get_one_each_and_keep_their_bytes(
    ingest: Door, http: httpx2.Client
) -> None:
    uploads = [begin(http) for _ in range(5)]
    for number, upload in enumerate(uploads):
        finish(http, upload, {MODEL: b"w%d" % number})
    with ThreadPoolExecutor(10) as pool:  # each twice: a client's timeout and its retry
        answers = list(pool.map(lambda upload: commit(http, upload), uploads * 2))
    assert {answer.status_code for answer in answers} <= {200, 503}
    versions = {upload: commit(http, upload).json()["version"] for upload in uploads}
    assert len(set(versions.values())) == 5
    for number, (_, version) in enumerate(versions.items()):
        made = manifest(ingest, version)
        assert objects(ingest, made.prefix) == {made.prefix + MODEL: b"w%d" % number}


def test_a_commit_names_the_rank_that_is_missing_and_can_be_tried_again(ingest: Door, http: httpx2.Client) -> None:
    terms = {"upload": "step-7", "world": 4, "step": 7}
    assert {begin(http, **terms) for _ in range(4)} == {"step-7"}
    for rank in (0, 1, 2):
        answer = finish(http, "step-7", {f"model-{rank}.safetensors": b"w%d" % rank}, rank)
        assert answer.json()["missing"] == list(range(rank + 1, 4))
    early = commit(http, "step-7")
    told = refusal(early)
    assert (early.status_code, told["code"], told["retryable"], told["limit"]) == (
        409,
        "upload_incomplete",
        True,
        "missing=3",
    )
    assert not [key for key in objects(ingest, ROOT) if "/step-7/" in key and "/uploads/" not in key]
    assert finish(http, "step-7", {"model-3.safetensors": b"w3"}, 3).json()["missing"] == []
    version = commit(http, "step-7").json()["version"]
    assert sorted(file.name for file in manifest(ingest, version).files) == [
        f"model-{rank}.safetensors" for rank in range(4)
    ]
    # the same step again is the same version; a rank with other weights must take another name
    assert begin(http, **terms) == "step-7"
    assert finish(http, "step-7", {"model-1.safetensors": b"w1"}, 1).status_code == 200
    other = finish(http, "step-7", {"model-1.safetensors": b"other"}, 1)
    assert (other.status_code, refusal(other)["code"]) == (409, "idempotency_conflict")
    assert commit(http, "step-7").json() | {"created": True} == {
        "policy": "tiny", "version": version, "kind": "full", "manifest_key": f"{ROOT}{version}/manifest.json", "created": True,
    }  # fmt: skip
    for changed in ({"world": 2}, {"step": 8}, {"kind": "lora"}, {"version": 900}):
        answer = http.post(UPLOADS, json={**terms, **changed})
        assert (answer.status_code, refusal(answer)["param"]) == (409, next(iter(changed)))


def test_A40_only_weights_configuration_and_tokenizers_are_taken(http: httpx2.Client) -> None:
    upload = begin(http)
    for name in ("optimizer.pt", "model.bin", "x.pkl", "code.py", "rng_state.pth", ".safetensors", "a%2Fb.safetensors", "-x.safetensors"):  # fmt: skip
        answer = put(http, upload, name, b"x")
        assert answer.status_code in (400, 404), name
        if answer.status_code == 400:
            assert refusal(answer)["code"] == "unsupported"


def test_a_flipped_byte_never_becomes_part_of_a_version(http: httpx2.Client) -> None:
    upload = begin(http)
    put(http, upload, MODEL, b"flipped")
    answer = http.post(f"{UPLOADS}/{upload}/shards", json={"files": [entry(MODEL, b"flipPed")]})
    assert (answer.status_code, refusal(answer)["param"]) == (400, "files[0]")
    assert finish(http, upload, {MODEL: b"flipPed"}).status_code == 200
    assert commit(http, upload).status_code == 200


def test_an_upload_cut_in_the_middle_leaves_nothing_and_can_be_sent_again(ingest: Door, http: httpx2.Client) -> None:
    upload = begin(http)
    host, _, port = ingest.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT {UPLOADS}/{upload}/files/{MODEL} HTTP/1.1\r\nhost: x\r\ncontent-length: 3000000\r\n\r\n"
        raw.sendall(head.encode() + b"w" * 1_500_000)
    assert refusal(commit(http, upload))["code"] == "upload_incomplete"
    weights = b"w" * 3_000_000
    assert finish(http, upload, {MODEL: weights}).status_code == 200
    version = commit(http, upload).json()["version"]
    assert objects(ingest, manifest(ingest, version).prefix).popitem()[1] == weights


def test_an_adapter_carries_what_its_configuration_says(ingest: Door, http: httpx2.Client) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    upload = begin(http, kind="lora")
    files = {"adapter_model.safetensors": b"x", "adapter_config.json": json.dumps(config).encode()}
    assert publish(http, upload, files).json()["kind"] == "lora"
    made = manifest(ingest, commit(http, upload).json()["version"])
    assert made.adapter == AdapterInfo(rank=4, alpha=8.0, targets=("q_proj",))
    assert (made.kind, made.base_version) == (CheckpointKind.LORA, 0)
    for change, field in (({"modules_to_save": ["lm_head"]}, "modules_to_save"), ({"r": 4096}, "r")):
        upload = begin(http, kind="lora")
        answer = publish(http, upload, files | {"adapter_config.json": json.dumps(config | change).encode()})
        assert (answer.status_code, refusal(answer)["param"]) == (400, field)
    for kind, there in (("full", files), ("lora", {"adapter_model.safetensors": b"x"})):
        answer = publish(http, begin(http, kind=kind), there)
        assert (answer.status_code, refusal(answer)["param"]) == (400, "adapter_config.json")
    missing = http.post(UPLOADS, json={"kind": "lora", "base_version": 77})
    assert (missing.status_code, refusal(missing)["param"], refusal(missing)["retryable"]) == (
        409,
        "base_version",
        False,
    )


def publish(http: httpx2.Client, upload: str, files: dict[str, bytes]) -> httpx2.Response:
    assert finish(http, upload, files).status_code == 200
    return commit(http, upload)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"kind": "deltas"}, "kind"),
    ({"kind": "delta"}, "base_version"),
    ({"kind": "pickle"}, "kind"),
    ({"upload": "a/b"}, "upload"),
    ({"world": 0}, "world"),
    ({"version": 0}, "version"),
    ({"version": 2**31}, "version"),
    ({"version": 2**31 - 1}, "version"),
    ({"step": -1}, "step"),
    ({"step": 2**63}, "step"),
    ({"base_version": 1}, "base_version"),
    ({"next_within_s": 0}, "next_within_s"),
    ({"nonsense": 1}, "nonsense"),
]


@pytest.mark.parametrize(("terms", "field"), WRONG)
def test_wrong_terms_name_their_field(http: httpx2.Client, terms: dict[str, Any], field: str) -> None:
    answer = http.post(UPLOADS, json=terms)
    assert (answer.status_code, refusal(answer)["param"]) == (400, field)


def test_wrong_shards_commits_and_names_of_uploads(http: httpx2.Client) -> None:
    upload = begin(http)
    assert refusal(put(http, upload, MODEL, b""))["param"] == "body"
    for unknown in ("nobody", "a.b"):
        assert put(http, unknown, MODEL, b"x").status_code == 404
        assert commit(http, unknown).status_code == 404
    shard = {"files": [entry(MODEL, b"x")], "rank": 1}
    assert refusal(http.post(f"{UPLOADS}/{upload}/shards", json=shard))["param"] == "rank"
    twice = {"files": [entry(MODEL, b"x")] * 2}
    assert refusal(http.post(f"{UPLOADS}/{upload}/shards", json=twice))["param"] == "files"
    finish(http, upload, {"config.json": b"{}"})
    assert refusal(commit(http, upload))["param"] == "files"
    for rollout, field in (({"canary": -1}, "rollout.canary"), ({"on_deadline": "pray"}, "rollout.on_deadline")):
        assert refusal(commit(http, upload, rollout=rollout))["param"] == field


def test_two_ranks_with_different_files_of_one_name(http: httpx2.Client) -> None:
    upload = begin(http, world=2)
    for rank in (0, 1):
        finish(http, upload, {MODEL: b"w%d" % rank}, rank)
    assert refusal(commit(http, upload))["param"] == "files"


def test_an_upload_is_streamed_in_chunks_of_unknown_length(http: httpx2.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(40):
            yield b"z" * 100_000

    answer = http.put(f"{UPLOADS}/{begin(http)}/files/{MODEL}", content=chunks())
    assert answer.json()["size"] == 4_000_000


def test_A44_versions_are_listed_and_gone_back_to(ingest: Door, http: httpx2.Client) -> None:
    """What checkpoint-sync writes is written here by hand: which versions were adopted."""
    adopted = (
        AdoptedVersion(version=601, prefix=f"{ROOT}601/a/", step=1, bytes=10, committed_at=1.5, adopted_at=2.5),
        AdoptedVersion(version=602, kind=CheckpointKind.LORA, prefix=f"{ROOT}602/b/", base_version=601),
    )

    async def write(**changes: Any) -> PolicyState:
        async with ingest.connected() as bus:
            table = Table(bus, POLICIES, PolicyState)
            found = await table.get("shared.tiny")
            assert found is not None
            wanted = msgspec.structs.replace(found.value, **changes)
            await table.update("shared.tiny", wanted, found.revision)
            return found.value

    before = asyncio.run(write(versions=adopted, history=(0, 601, 602), desired=602, newest=602, desired_prefix="x"))
    try:
        wait_until(lambda: http.get(BASE).json()["desired"] == 602, 10, "the catalog follows")
        listed = http.get(f"{BASE}/versions").json()
        assert [(v["version"], v["kind"], v["status"]) for v in listed["data"]] == [
            (0, "full", "superseded"), (601, "full", "superseded"), (602, "lora", "desired"),
        ]  # fmt: skip
        assert (listed["desired"], listed["newest"], listed["rollout"]) == (602, 602, None)
        assert listed["data"][1] | {"policy": "tiny"} == {
            "policy": "tiny", "version": 601, "status": "superseded", "kind": "full", "base_version": 0, "step": 1,
            "bytes": 10, "committed_at": 1.5, "adopted_at": 2.5,
        }  # fmt: skip
        based = http.post(UPLOADS, json={"kind": "lora"})
        assert based.json()["base_version"] == 601
        stale = http.post(UPLOADS, json={"version": 602})
        assert (stale.status_code, refusal(stale)["code"]) == (409, "version_unavailable")
        answer = http.post(f"{BASE}/rollback", json={"version": 601})
        assert (answer.status_code, answer.json()["desired"], answer.json()["newest"]) == (200, 601, 602)
        wait_until(
            lambda: http.get(f"{BASE}/versions/602").json()["status"] == "rolled_back", 10, "the catalog follows"
        )
        assert http.get(f"{BASE}/versions/601").json()["status"] == "desired"
        never = http.post(f"{BASE}/rollback", json={"version": 603})
        assert (never.status_code, refusal(never)["code"]) == (409, "version_unavailable")
        assert http.post(f"{BASE}/rollback", json={}).status_code == 400
    finally:
        asyncio.run(write(versions=(), history=(0,), desired=0, newest=0, desired_prefix=None))
        wait_until(lambda: http.get(BASE).json()["desired"] == before.desired, 10, "the catalog follows")
