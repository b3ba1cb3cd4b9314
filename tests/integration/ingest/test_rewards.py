"""Rewards posted after the fact, before a whole stack: durable, once each, one tenant's own (I1, I2, I3, I7)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.support.processes import Process
from tests.support.stack import Stack, scripted, stack
from tests.support.waiting import wait_until

from .test_admission import key_entry
from .test_doors import refusal
from .test_flow import accept, batch, read_all

ERROR = 498
"""A prompt id that makes the scripted engine fail."""


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    entries = [
        key_entry("alice", "alice", "submit", "read"),
        key_entry("eyes", "alice", "read"),
        key_entry("bob", "bob", "submit", "read"),
        key_entry("root", "ops", "admin"),
    ]
    keys.write_text(json.dumps(entries))
    env = {
        "ROLLGRID_INGEST_KEYS_FILE": str(keys),
        "ROLLGRID_SAMPLER_SCRIPTED_FAULTS": json.dumps({str(ERROR): "error"}),
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.3",
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_GROUPS": "8",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_S": "1",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "0.3",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_STEP": "1",
    }
    with stack(scripted(samplers=1, scorers=0, token_rate=200.0, eos_rate=0.0, slots=64, env=env)) as running:
        yield running


def caller(pipe: Stack, key: str) -> httpx2.Client:
    return httpx2.Client(base_url=pipe.url, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def alice(pipe: Stack) -> Iterator[httpx2.Client]:
    with caller(pipe, "alice") as client:
        yield client


def closed(http: httpx2.Client, run: str, tasks: int, n: int = 2, /, **fields: Any) -> list[dict[str, Any]]:
    """A batch that has ended: its groups under their cursors."""
    accepted = accept(http, {**batch(run, tasks, n), **fields})
    return read_all(http, f"/v1/rollouts/{accepted['batch_id']}/results", accepted["cursor"], 64)


def post(http: httpx2.Client, group: str, *rewards: dict[str, Any], key: str | None = None, **more: Any) -> Any:
    headers = {} if key is None else {"idempotency-key": key}
    return http.post(f"/v1/groups/{group}/rewards", json={"rewards": rewards, **more}, headers=headers)


def pages(http: httpx2.Client, run: str, limit: int = 3) -> list[dict[str, Any]]:
    """Every post of a run, page by page."""
    found: list[dict[str, Any]] = []
    cursor = 0
    while True:
        page = http.get(f"/v1/runs/{run}/rewards", params={"cursor": cursor, "limit": limit}).json()
        if not page["posts"]:
            return found
        assert len(page["posts"]) <= limit
        found += page["posts"]
        cursor = page["cursor"]


def test_a_later_reward_replaces_an_earlier_one_and_both_stay_recorded(alice: httpx2.Client) -> None:
    (item,) = closed(alice, "posted", 1)
    group = item["group"]["group_id"]
    assert alice.get(f"/v1/groups/{group}").json()["posted_rewards"] == []
    first = post(
        alice, group, {"index": 0, "value": 0}, {"index": 1, "name": "tests", "kind": "pass_rate", "value": 0.5}
    )
    assert first.status_code == 200, first.text
    again = post(
        alice, group, {"index": 0, "value": 1.5, "detail": "looked again"}, source="judge-2", metadata={"a": [1]}
    )
    one, two = first.json(), again.json()
    assert (one["group_id"], one["run"], one["duplicate"]) == (group, "posted", False)
    assert item["cursor"] < one["cursor"] < two["cursor"]

    record = alice.get(f"/v1/groups/{group}").json()
    assert record["group"] == item["group"], "no terminal entry has changed"
    standing = [(r["index"], r["name"], r["kind"], r["value"], r["cursor"]) for r in record["posted_rewards"]]
    assert standing == [(0, "reward", "scalar", 1.5, two["cursor"]), (1, "tests", "pass_rate", 0.5, one["cursor"])]
    assert record["posted_rewards"][0]["source"] == "judge-2"

    posts = pages(alice, "posted")
    assert [p["cursor"] for p in posts] == [one["cursor"], two["cursor"]]
    assert [p["post"]["closed_seq"] for p in posts] == [item["cursor"]] * 2
    assert posts[1]["post"]["metadata"] == {"a": [1]}
    assert posts[1]["post"]["rewards"] == [{"index": 0, "value": 1.5, "detail": "looked again"}]
    # who reads closes does not meet them
    closes = alice.get("/v1/runs/posted/trajectories", params={"cursor": 0, "limit": 64}).json()
    assert [found["cursor"] for found in closes["groups"]] == [item["cursor"]]


def test_i2_a_repeated_key_is_one_post_and_another_body_a_conflict(alice: httpx2.Client) -> None:
    (item,) = closed(alice, "keyed", 1)
    group = item["group"]["group_id"]
    first = post(alice, group, {"index": 0, "value": 1}, key="post-1").json()
    again = post(alice, group, {"index": 0, "value": 1}, key="post-1").json()
    assert (again["cursor"], first["duplicate"], again["duplicate"]) == (first["cursor"], False, True)
    other = post(alice, group, {"index": 0, "value": 2}, key="post-1")
    assert (other.status_code, refusal(other)["code"]) == (409, "idempotency_conflict")
    # without a key every post is one of its own: a value may be taken back and given again
    values = [post(alice, group, {"index": 0, "value": value}).json()["duplicate"] for value in (5, 6, 5)]
    assert values == [False] * 3
    assert [p["post"]["rewards"][0]["value"] for p in pages(alice, "keyed")] == [1, 5, 6, 5]


def test_many_groups_of_a_run_in_one_call(alice: httpx2.Client) -> None:
    items = closed(alice, "many", 12)
    groups = [
        {"group_id": item["group"]["group_id"], "rewards": [{"index": 1, "value": i}], "metadata": {"row": i}}
        | ({"cursor": item["cursor"]} if i % 2 else {})
        for i, item in enumerate(items)
    ]
    answer = alice.post("/v1/runs/many/rewards", json={"groups": groups}, headers={"idempotency-key": "many"}).json()
    assert [p["group_id"] for p in answer["posts"]] == [g["group_id"] for g in groups]
    assert answer["cursor"] == max(p["cursor"] for p in answer["posts"])
    again = alice.post("/v1/runs/many/rewards", json={"groups": groups}, headers={"idempotency-key": "many"}).json()
    assert [p["cursor"] for p in again["posts"]] == [p["cursor"] for p in answer["posts"]]
    assert all(p["duplicate"] for p in again["posts"])
    posts = {p["post"]["group_id"]: p["post"]["metadata"]["row"] for p in pages(alice, "many", 5)}
    assert posts == {g["group_id"]: g["metadata"]["row"] for g in groups}
    # all are checked before any is stored, and none is of another run
    bad = [groups[0], {"group_id": groups[1]["group_id"], "rewards": [{"index": 9, "value": 0}]}]
    refused = alice.post("/v1/runs/many/rewards", json={"groups": bad})
    assert refusal(refused)["param"] == "groups[1].rewards[0].index"
    elsewhere = alice.post("/v1/runs/other/rewards", json={"groups": groups[:1]})
    assert (elsewhere.status_code, refusal(elsewhere)["param"]) == (404, "groups[0].group_id")
    assert len(pages(alice, "many", 64)) == 12


def test_what_cannot_be_rewarded_is_refused_by_name(alice: httpx2.Client) -> None:
    prompts = [{"prompt_token_ids": [ERROR]}]
    (failed,) = closed(alice, "refused", 1, tasks=prompts)
    group = failed["group"]["group_id"]
    refused = post(alice, group, {"index": 0, "value": 0})
    assert (refused.status_code, refusal(refused)["param"]) == (400, "rewards[0].index")
    assert "without a token" in refusal(refused)["message"]
    unknown = post(alice, "gnobody", {"index": 0, "value": 0})
    assert (unknown.status_code, refusal(unknown)["code"]) == (404, "not_found")
    wrong = post(alice, group, {"index": 0, "value": 0}, cursor=failed["cursor"] + 10_000)
    assert wrong.status_code == 404
    for body in (b'{"rewards":[{"index":0,"value":1e999}]}', b'{"rewards":[{"index":0,"worth":1}]}', b"{}"):
        assert alice.post(f"/v1/groups/{group}/rewards", content=body).status_code == 400
    assert pages(alice, "refused") == []


def test_an_open_group_says_when_to_come_again(alice: httpx2.Client) -> None:
    accepted = accept(alice, batch("open", 1, sampling={"max_tokens": 400}))
    group = accepted["group_ids"][0]
    early = post(alice, group, {"index": 0, "value": 0})
    assert early.status_code == 409
    error = refusal(early)
    assert (error["code"], error["retryable"], int(early.headers["retry-after"])) == ("group_open", True, 1)
    assert alice.post(f"/v1/rollouts/{accepted['batch_id']}/cancel").status_code == 202


def test_i7_scopes_and_tenants(pipe: Stack, alice: httpx2.Client) -> None:
    (item,) = closed(alice, "private", 1)
    group = item["group"]["group_id"]
    with caller(pipe, "eyes") as eyes, caller(pipe, "bob") as bob:
        assert post(eyes, group, {"index": 0, "value": 0}).status_code == 403
        for more in ({}, {"cursor": item["cursor"]}):
            assert post(bob, group, {"index": 0, "value": 0}, **more).status_code == 404
        assert post(alice, group, {"index": 0, "value": 1}).status_code == 200
        assert len(pages(eyes, "private")) == 1
        assert pages(bob, "private") == []


def test_a_waiting_reader_is_woken(alice: httpx2.Client) -> None:
    (item,) = closed(alice, "awaited", 1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(alice.get, "/v1/runs/awaited/rewards", params={"wait_s": 30})
        cursor = post(alice, item["group"]["group_id"], {"index": 0, "value": 1}).json()["cursor"]
        assert [p["cursor"] for p in waiting.result(40).json()["posts"]] == [cursor]


def test_i3_what_was_purged_is_read_from_the_archive(pipe: Stack, alice: httpx2.Client) -> None:
    items = closed(alice, "old", 3)
    posted = [
        post(alice, items[i % 3]["group"]["group_id"], {"index": 0, "value": i}, key=f"old-{i}").json()["cursor"]
        for i in range(20)
    ]
    live = pages(alice, "old", 64)
    assert [p["cursor"] for p in live] == posted
    with caller(pipe, "root") as root:

        def purged() -> bool:  # of every run its last close and its last post stay
            return root.get("/v1/fleet").json()["queues"]["RG_TRAJECTORIES"]["messages"] <= 30

        wait_until(purged, 40, "the purge")
    assert pages(alice, "old", 6) == live
    group = items[1]["group"]["group_id"]
    standing = alice.get(f"/v1/groups/{group}").json()["posted_rewards"]
    assert [(r["value"], r["cursor"]) for r in standing] == [(19, posted[19])]
    # the key of a purged post still names it, and posting goes on
    again = post(alice, items[0]["group"]["group_id"], {"index": 0, "value": 0}, key="old-0").json()
    assert (again["cursor"], again["duplicate"]) == (posted[0], True)
    more = post(alice, group, {"index": 0, "value": 20}, cursor=items[1]["cursor"]).json()["cursor"]
    assert [p["cursor"] for p in pages(alice, "old", 7)] == [*posted, more]


# -- kills -----------------------------------------------------------------------------------------

STORM = 200


class Acknowledged(NamedTuple):
    group: str
    value: int
    cursor: int


def post_until_answered(http: httpx2.Client, item: dict[str, Any], value: int, give_up_s: float = 90) -> Acknowledged:
    """As a client does: the same key until somebody answers; every other time without the close's cursor."""
    group = item["group"]["group_id"]
    reward = {"index": value % 2, "name": f"v{value}", "value": value}
    more = {"cursor": item["cursor"]} if value % 2 else {}
    give_up = time.monotonic() + give_up_s
    while True:
        try:
            answer = post(http, group, reward, key=f"storm-{value}", **more)
        except httpx2.HTTPError:
            answer = None
        if answer is not None and answer.status_code == 200:
            return Acknowledged(group, value, answer.json()["cursor"])
        assert answer is None or answer.status_code in (429, 502, 503), answer.text
        assert time.monotonic() < give_up, f"post {value} was never answered"
        time.sleep(0.1)


@pytest.mark.slow
def test_i1_every_acknowledged_post_is_read_back_once_through_kills(pipe: Stack, alice: httpx2.Client) -> None:
    items = closed(alice, "storm", 8)
    victims: list[Process] = [pipe.nats, pipe["trajectory_logger"], pipe["ingest"], pipe.nats]
    with ThreadPoolExecutor(4) as pool:
        posts = [pool.submit(post_until_answered, alice, items[value % 8], value) for value in range(STORM)]
        for strike, victim in enumerate(victims, 1):
            answered = STORM * strike // 6
            wait_until(lambda: sum(map(Future.done, posts)) >= answered, 60, f"{answered} posts")  # noqa: B023
            victim.restart(60)
        acknowledged = [future.result(100) for future in posts]
    more = closed(alice, "storm", 4)  # a run goes on closing between its posts
    read = [
        (p["post"]["group_id"], int(p["post"]["rewards"][0]["value"]), p["cursor"]) for p in pages(alice, "storm", 50)
    ]
    assert sorted(read) == sorted(acknowledged)
    closes = read_closes(alice, "storm")
    assert closes[: len(items)] == items
    assert sorted(c["cursor"] for c in closes) == sorted(c["cursor"] for c in (*items, *more))


def read_closes(http: httpx2.Client, run: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while True:
        cursor = found[-1]["cursor"] if found else 0
        page = http.get(f"/v1/runs/{run}/trajectories", params={"cursor": cursor}).json()["groups"]
        if not page:
            return found
        found += page
