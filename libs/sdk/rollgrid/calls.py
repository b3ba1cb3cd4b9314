"""Every route this SDK uses, as data: the one place that knows paths and how answers are read."""

from __future__ import annotations

import pathlib
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from rollgrid_contracts import codec, ids

from .answers import (
    Accepted,
    BatchProgress,
    Committed,
    Fleet,
    GroupAnswer,
    ModelList,
    Page,
    Policy,
    PolicyList,
    Posted,
    PostPage,
    RunPosted,
    ScoreAnswer,
    Upload,
    Uploaded,
    Version,
    VersionList,
)
from .errors import GroupOpen, ServerError, Unsendable
from .results import Group
from .transport import Call

T = TypeVar("T")

PAGE_LIMIT = 64
"""Groups per page: a group of 8 samples x 1,000 tokens is 64 kB."""

POSTS_LIMIT = 512


def answered(kind: type[T]) -> Callable[[bytes, str], T]:
    def parse(body: bytes, content_type: str) -> T:
        if content_type not in (codec.MSGPACK, codec.JSON):
            raise _unreadable(f"content type {content_type}")
        try:
            return codec.decode(body, kind, content_type)
        except msgspec.DecodeError as error:
            raise _unreadable(str(error)) from error

    return parse


def _unreadable(why: str) -> ServerError:
    return ServerError(
        f"an answer this SDK cannot read ({why}): is that a rollgrid of this version?", code="internal", status=200
    )


def _ignore(_body: bytes, _content_type: str) -> None:
    return None


def segment(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def models() -> Call[ModelList]:
    return Call("GET", "/v1/models", answered(ModelList))


def submit(body: bytes, idempotency_key: str | None) -> Call[Accepted]:
    """The key makes a retry safe: the same key and body are the same batch.  Raises Unsendable."""
    headers = keyed(idempotency_key)
    return Call("POST", "/v1/rollouts", answered(Accepted), body=body, headers=headers, read_timeout_s=60.0)


def keyed(idempotency_key: str | None) -> dict[str, str]:
    key = ids.new_key() if idempotency_key is None else idempotency_key
    if not (key and key.isascii() and key.isprintable()):
        raise Unsendable("an idempotency key is printable ASCII")
    return {"content-type": codec.JSON, "idempotency-key": key}


def batch_status(batch_id: str) -> Call[BatchProgress]:
    return Call("GET", f"/v1/rollouts/{segment(batch_id)}", answered(BatchProgress))


def cancel(batch_id: str) -> Call[None]:
    return Call("POST", f"/v1/rollouts/{segment(batch_id)}/cancel", _ignore)


def batch_page(batch_id: str, run: str, cursor: int, wait_s: float, read_timeout_s: float) -> Call[Page]:
    """Naming the run lets an ingest that has just started answer without asking the ledger."""
    path = f"/v1/rollouts/{segment(batch_id)}/groups"
    return _page(path, cursor, wait_s, read_timeout_s, {"run": run} if run else {})


def run_page(run: str, cursor: int, wait_s: float, read_timeout_s: float) -> Call[Page]:
    path = f"/v1/runs/{segment(run)}/trajectories"
    return _page(path, cursor, wait_s, read_timeout_s)


def _page(
    path: str, cursor: int, wait_s: float, read_timeout_s: float, more: dict[str, str] | None = None
) -> Call[Page]:
    params: dict[str, str | int | float] = {"cursor": cursor, "limit": PAGE_LIMIT, "wait_s": round(wait_s, 3)}
    params |= more or {}
    return Call("GET", path, answered(Page), params=params, read_timeout_s=read_timeout_s)


def group(group_id: str) -> Call[Group]:
    read = answered(GroupAnswer)

    def parse(body: bytes, content_type: str) -> Group:
        answer = read(body, content_type)
        if answer.group is None:
            raise GroupOpen(group_id, answer.n, answer.done)
        return Group(answer.group, answer.cursor, answer.posted_rewards)

    return Call("GET", f"/v1/groups/{segment(group_id)}", parse)


def post_rewards(group_id: str, body: bytes, idempotency_key: str | None) -> Call[Posted]:
    headers = keyed(idempotency_key)
    return Call("POST", f"/v1/groups/{segment(group_id)}/rewards", answered(Posted), body=body, headers=headers)


def post_run_rewards(run: str, body: bytes, idempotency_key: str | None) -> Call[RunPosted]:
    headers = keyed(idempotency_key)
    path = f"/v1/runs/{segment(run)}/rewards"
    return Call("POST", path, answered(RunPosted), body=body, headers=headers, read_timeout_s=60.0)


def rewards_page(run: str, cursor: int, wait_s: float, read_timeout_s: float) -> Call[PostPage]:
    params: dict[str, str | int | float] = {"cursor": cursor, "limit": POSTS_LIMIT, "wait_s": round(wait_s, 3)}
    path = f"/v1/runs/{segment(run)}/rewards"
    return Call("GET", path, answered(PostPage), params=params, read_timeout_s=read_timeout_s)


def score_tokens(body: bytes, timeout_s: float) -> Call[ScoreAnswer]:
    headers = {"content-type": codec.JSON}
    return Call("POST", "/v1/score_tokens", answered(ScoreAnswer), body=body, headers=headers, read_timeout_s=timeout_s)


def policies() -> Call[tuple[Policy, ...]]:
    read = answered(PolicyList)
    return Call("GET", "/v1/policies", lambda body, content_type: read(body, content_type).data)


def policy(name: str) -> Call[Policy]:
    return Call("GET", f"/v1/policies/{segment(name)}", answered(Policy))


def version(policy: str, number: int) -> Call[Version]:
    return Call("GET", f"/v1/policies/{segment(policy)}/versions/{number}", answered(Version))


def fleet() -> Call[Fleet]:
    return Call("GET", "/v1/fleet", answered(Fleet))


def versions(policy: str) -> Call[VersionList]:
    return Call("GET", f"/v1/policies/{segment(policy)}/versions", answered(VersionList))


def roll_back(policy: str, version: int) -> Call[Policy]:
    return _post(f"/v1/policies/{segment(policy)}/rollback", {"version": version}, Policy, 30.0)


def begin_upload(policy: str, terms: Mapping[str, Any]) -> Call[Upload]:
    """`terms` name the upload, so that a retry is the same one."""
    return _post(f"/v1/policies/{segment(policy)}/uploads", terms, Upload, 60.0)


def put_file(
    policy: str, upload: str, name: str, body: bytes | pathlib.Path, sent: Callable[[int], None] | None = None
) -> Call[Uploaded]:
    """`sent` is told how many bytes of the attempt under way have gone out."""
    size = len(body) if isinstance(body, bytes) else body.stat().st_size
    headers = {"content-type": "application/octet-stream", "content-length": str(size)}
    path = f"{_upload(policy, upload)}/files/{segment(name)}"
    return Call("PUT", path, answered(Uploaded), body=body, headers=headers, read_timeout_s=300.0, sent=sent)


def finish_shard(policy: str, upload: str, shard: Mapping[str, Any]) -> Call[None]:
    return _post(f"{_upload(policy, upload)}/shards", shard, None, 60.0)


def commit_upload(policy: str, upload: str, body: Mapping[str, Any]) -> Call[Committed]:
    return _post(f"{_upload(policy, upload)}/commit", body, Committed, 300.0)


def _upload(policy: str, upload: str) -> str:
    return f"/v1/policies/{segment(policy)}/uploads/{segment(upload)}"


def _post(path: str, body: Mapping[str, Any], answer: Any, read_timeout_s: float) -> Call[Any]:
    read = answered(answer) if answer is not None else _ignore
    headers = {"content-type": codec.JSON}
    return Call("POST", path, read, body=msgspec.json.encode(body), headers=headers, read_timeout_s=read_timeout_s)
