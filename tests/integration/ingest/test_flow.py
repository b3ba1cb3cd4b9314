"""Ingest with everything behind it, on the scripted engine: calls, batches, readers, cancels, kills."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from rollgrid_contracts import codec
from rollgrid_contracts.trajectories import GroupClosed

from tests.support.stack import Stack, scripted, stack
from tests.support.waiting import wait_until

from .test_doors import refusal

PROMPT = [5, 6, 7]
EMPTY, ERROR = 499, 498
"""Prompt ids that make the scripted engine answer nothing, or fail."""


@pytest.fixture(scope="module")
def pipe() -> Iterator[Stack]:
    env = {
        "ROLLGRID_SAMPLER_SCRIPTED_FAULTS": json.dumps({str(EMPTY): "empty", str(ERROR): "error"}),
        "ROLLGRID_INGEST_REPLY_POLL_S": "0.5",
        "ROLLGRID_INGEST_KEEP_ALIVE_S": "0.3",
    }
    with stack(scripted(samplers=1, token_rate=200.0, eos_rate=0.0, slots=64, env=env)) as running:
        yield running


@pytest.fixture
def http(pipe: Stack) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=pipe.url, timeout=60) as client:
        yield client


def batch(run: str, tasks: int, n: int = 2, **fields: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 4}
    return {"run": run, "n": n, "sampling": sampling, "tasks": [{"prompt_token_ids": PROMPT}] * tasks, **fields}


def accept(http: httpx2.Client, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = http.post("/v1/rollouts", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    accepted: dict[str, Any] = answer.json()
    return accepted


def read_all(http: httpx2.Client, path: str, cursor: int, limit: int = 3) -> list[dict[str, Any]]:
    """Page by page to the end of a batch."""
    items: list[dict[str, Any]] = []
    for _ in range(200):
        answer = http.get(path, params={"cursor": cursor, "limit": limit, "wait_s": 20})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        items += page["groups"]
        cursor = page["cursor"]
        if page["done"]:
            return items
    raise AssertionError("the batch did not end")


class Event:
    def __init__(self, lines: list[str]) -> None:
        fields = dict(line.split(": ", 1) for line in lines if not line.startswith(":"))
        self.kind, self.id, self.data = fields.get("event"), fields.get("id"), fields.get("data", "")


def events(http: httpx2.Client, path: str, limit: int = 10_000, last: int | None = None) -> list[Event]:
    """Events of a stream, to its end or to the `limit`-th."""
    found: list[Event] = []
    lines: list[str] = []
    headers = {"accept": "text/event-stream", **({} if last is None else {"last-event-id": str(last)})}
    with http.stream("GET", path, headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        for line in answer.iter_lines():
            if line:
                lines.append(line)
                continue
            event = Event(lines)
            lines = []
            if event.kind is not None:
                found.append(event)
            if event.kind == "end" or len(found) >= limit:
                return found
    raise AssertionError("the stream ended early")


# -- interactive calls ------------------------------------------------------------------------------


def test_completions_in_prompt_major_order_equal_their_record(http: httpx2.Client) -> None:
    body = {
        "model": "tiny",
        "prompt": [PROMPT, [8, 9]],
        "n": 3,
        "max_tokens": 6,
        "logprobs": 0,
        "return_token_ids": True,
    }
    answer = http.post("/v1/completions", json=body, headers={"x-rollgrid-run": "openai"}).json()
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT] * 3 + [[8, 9]] * 3
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 6
    for choice in choices:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 6
        group, index = choice["sample_id"].rsplit(".", 1)

        def closed(group: str = group) -> bool:
            return http.get(f"/v1/groups/{group}").status_code == 200

        wait_until(closed, 10, "the group's close")
        entries = http.get(f"/v1/groups/{group}").json()["group"]["entries"]
        sample = entries[int(index)]["sample"]
        assert sample["token_ids"] == choice["token_ids"]
        assert sample["logprobs"] == choice["logprobs"]["token_logprobs"]
    assert answer["usage"] == {"prompt_tokens": 5, "completion_tokens": 36, "total_tokens": 41}


def test_generate_and_seeds(http: httpx2.Client) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 5, "seed": 77, "logprobs": 1, "n": 4}}
    first, second = (http.post("/inference/v1/generate", json=body).json()["choices"] for _ in range(2))
    assert [choice["token_ids"] for choice in first] == [choice["token_ids"] for choice in second]
    assert len({choice["seed"] for choice in first}) == 4
    entry = first[0]["logprobs"]["content"][0]
    assert entry["token"] == f"token_id:{entry['token_id']}"
    assert first[0]["weight_versions"] == [{"version": 0, "start": 0, "end": 5}]


def test_the_openai_client_works_unmodified(pipe: Stack) -> None:
    client = openai.OpenAI(base_url=f"{pipe.url}/v1", api_key="unused", max_retries=0)
    assert client.models.list().data[0].id == "tiny"
    answer = client.completions.create(model="tiny", prompt="hello", max_tokens=3, n=2, temperature=0.5, stop=["zzz"])
    assert len(answer.choices) == 2
    assert answer.usage is not None
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="tiny", prompt="hello", suffix="x")
    assert refused.value.param == "suffix"


def test_max_tokens_defaults_to_what_the_context_leaves(http: httpx2.Client) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 508, "return_token_ids": True}).json()
    assert answer["choices"][0]["max_tokens"] == 4
    assert len(answer["choices"][0]["token_ids"]) == 4


@pytest.mark.parametrize(("token", "code"), [(EMPTY, "empty_completion"), (ERROR, "engine_error")])
def test_a_failed_sample_is_an_error_with_its_code(http: httpx2.Client, token: int, code: str) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": [PROMPT, [token]], "max_tokens": 4})
    assert answer.status_code == 502, answer.text
    assert refusal(answer)["code"] == code
    assert answer.headers["retry-after"]


def test_a_deadline_ends_an_interactive_call(http: httpx2.Client) -> None:
    started = time.monotonic()
    answer = http.post(
        "/v1/completions", json={"model": "tiny", "prompt": PROMPT, "max_tokens": 500, "deadline_s": 0.5}
    )
    assert answer.status_code == 504, answer.text
    assert refusal(answer)["code"] == "expired"
    assert time.monotonic() - started < 30


def test_a_client_that_leaves_cancels_its_work(http: httpx2.Client, pipe: Stack) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 500}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{pipe.url}/v1/completions", json=body, headers={"x-rollgrid-run": "left"}, timeout=0.7)
    page = http.get("/v1/runs/left/trajectories", params={"wait_s": 20}).json()
    assert [item["group"]["reason"] for item in page["groups"]] == ["cancelled"]


def test_a_client_with_a_key_may_leave_and_come_back(http: httpx2.Client, pipe: Stack) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "n": 2, "return_token_ids": True}
    headers = {"x-rollgrid-run": "back", "idempotency-key": "come-back"}
    with pytest.raises(httpx2.ReadTimeout):
        httpx2.post(f"{pipe.url}/v1/completions", json=body, headers=headers, timeout=0.7)
    answer = http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    again = http.post("/v1/completions", json=body, headers=headers).json()
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in answer.json()["choices"]]
    page = http.get("/v1/runs/back/trajectories", params={"wait_s": 20}).json()
    assert len(page["groups"]) == 1


# -- batches ----------------------------------------------------------------------------------------


def test_pages_events_and_msgpack_tell_the_same(http: httpx2.Client) -> None:
    accepted = accept(http, batch("pages", 7, scorers=["exact_match"], metadata={"m": 1}))
    path = f"/v1/rollouts/{accepted['batch_id']}/results"
    items = read_all(http, path, accepted["cursor"])
    assert sorted(item["group"]["group_id"] for item in items) == sorted(accepted["group_ids"])
    cursors = [item["cursor"] for item in items]
    assert cursors == sorted(set(cursors))
    assert all(len(item["group"]["entries"]) == 2 for item in items)
    assert items[0]["group"]["metadata"] == {"m": 1}
    streamed = events(http, path)
    assert [event.kind for event in streamed] == ["group"] * 7 + ["end"]
    assert [int(event.id or 0) for event in streamed[:-1]] == cursors
    assert [json.loads(event.data) for event in streamed[:-1]] == [item["group"] for item in items]
    resumed = events(http, path, last=cursors[4])
    assert [event.id for event in resumed] == [str(cursors[5]), str(cursors[6]), str(cursors[6])]
    answer = http.get(path, params={"limit": 100}, headers={"accept": "application/msgpack"})
    assert answer.headers["content-type"] == "application/msgpack"
    packed = msgspec.msgpack.decode(answer.content)
    assert (packed["cursor"], packed["done"]) == (cursors[-1], True)
    groups = [codec.from_builtins(item["group"], GroupClosed) for item in packed["groups"]]
    assert [json.loads(codec.encode(group, codec.JSON)) for group in groups] == [item["group"] for item in items]
    alias = http.get(f"/v1/rollouts/{accepted['batch_id']}/groups", params={"limit": 100}).json()
    assert alias["groups"] == items


def test_progress_counts_to_the_end(http: httpx2.Client) -> None:
    accepted = accept(http, batch("progress", 5, n=3))
    path = f"/v1/rollouts/{accepted['batch_id']}"
    first = http.get(path).json()
    assert (first["groups"], first["samples"], first["run"]) == (5, 15, "progress")
    read_all(http, f"{path}/results", accepted["cursor"])
    last = http.get(path).json()
    assert (last["done"], last["status"], last["closed"], last["counts"]) == (True, "done", 5, {"succeeded": 15})
    assert http.get("/v1/rollouts/bnosuchbatch").status_code == 404


def test_a_batch_among_others_of_its_run_is_read_alone(http: httpx2.Client) -> None:
    with ThreadPoolExecutor(4) as threads:
        accepted = list(threads.map(lambda _: accept(http, batch("mixed", 6)), range(4)))
        read = list(
            threads.map(lambda a: read_all(http, f"/v1/rollouts/{a['batch_id']}/results", a["cursor"], 2), accepted)
        )
    for one, items in zip(accepted, read, strict=True):
        assert sorted(item["group"]["group_id"] for item in items) == sorted(one["group_ids"])
    # without a cursor, and after this process has forgotten nothing: from the batch's own start
    batch_id = accepted[0]["batch_id"]
    whole = http.get(f"/v1/rollouts/{batch_id}/results", params={"run": "mixed", "limit": 100}).json()
    assert len(whole["groups"]) == 6


def test_a_run_is_followed_live(http: httpx2.Client, pipe: Stack) -> None:
    seen: list[Event] = []

    def follow() -> None:
        with httpx2.Client(base_url=pipe.url, timeout=60) as own:
            seen.extend(events(own, "/v1/runs/live/trajectories", limit=3))

    reader = threading.Thread(target=follow)
    reader.start()
    accept(http, batch("live", 1))
    accept(http, batch("live", 2))
    reader.join(30)
    assert [event.kind for event in seen] == ["group"] * 3


def test_a_long_poll_waits_for_the_first_and_ends_at_its_time(http: httpx2.Client) -> None:
    empty = http.get("/v1/runs/nothing/trajectories", params={"wait_s": 0.2, "cursor": 0}).json()
    assert (empty["groups"], empty["cursor"], empty["done"]) == ([], 0, False)
    with ThreadPoolExecutor(1) as threads:
        polled = threads.submit(http.get, "/v1/runs/polled/trajectories", params={"wait_s": 30})
        accept(http, batch("polled", 1))
        assert len(polled.result(30).json()["groups"]) == 1


def test_a_cancelled_batch_ends_with_every_sample_accounted_for(http: httpx2.Client) -> None:
    accepted = accept(http, batch("cancel", 40, n=4, sampling={"max_tokens": 400}))
    path = f"/v1/rollouts/{accepted['batch_id']}"
    assert http.post(f"{path}/cancel").status_code == 202
    items = read_all(http, f"{path}/results", accepted["cursor"], 50)
    assert sorted(item["group"]["group_id"] for item in items) == sorted(accepted["group_ids"])
    statuses = [entry["sample"]["status"] for item in items for entry in item["group"]["entries"]]
    assert len(statuses) == 160
    assert statuses.count("cancelled") > 100
    assert http.delete(path).status_code == 202
    assert http.get(path).json()["counts"]["cancelled"] == statuses.count("cancelled")
    wait_until(lambda: http.get("/v1/fleet").json()["queues"]["RG_JOBS"]["messages"] == 0, 20, "an empty queue")


def test_a_repeated_batch_is_answered_with_its_first_deadline(http: httpx2.Client) -> None:
    first, again = (accept(http, batch("twice", 1, deadline_s=500), **{"idempotency-key": "twice"}) for _ in range(2))
    assert again == first


def test_an_open_group_says_so(http: httpx2.Client) -> None:
    accepted = accept(http, batch("open", 1, sampling={"max_tokens": 300}))
    (group,) = accepted["group_ids"]
    wait_until(lambda: http.get(f"/v1/groups/{group}").status_code != 404, 10, "the ledger knows the group")
    answer = http.get(f"/v1/groups/{group}")
    if answer.status_code == 202:
        assert answer.json()["status"] == "open"
    wait_until(lambda: http.get(f"/v1/groups/{group}").status_code == 200, 20, "the close")
    assert http.get("/v1/groups/gnosuchgroup").status_code == 404


# -- kills ------------------------------------------------------------------------------------------


def test_a_killed_ingest_loses_nothing_and_the_reply_is_the_record(pipe: Stack) -> None:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 300, "n": 2, "return_token_ids": True}
    headers = {"x-rollgrid-run": "killed", "idempotency-key": "killed-ingest"}

    def call() -> httpx2.Response:
        return httpx2.post(f"{pipe.url}/v1/completions", json=body, headers=headers, timeout=60)

    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(call)
        with httpx2.Client(base_url=pipe.url, timeout=10) as http:
            jobs = lambda: http.get("/v1/fleet").json()["queues"]["RG_JOBS"]["messages"]  # noqa: E731
            wait_until(lambda: jobs() > 0, 10, "the job is stored")
        pipe["ingest"].restart(60)
        with pytest.raises(httpx2.HTTPError):
            lost.result(30)
    answer = call()
    assert answer.status_code == 200, answer.text
    with httpx2.Client(base_url=pipe.url, timeout=60) as http:
        page = http.get("/v1/runs/killed/trajectories", params={"wait_s": 20}).json()
    (item,) = page["groups"]
    recorded = [entry["sample"]["token_ids"] for entry in item["group"]["entries"]]
    assert [choice["token_ids"] for choice in answer.json()["choices"]] == recorded


def test_a_killed_ledger_delays_and_changes_nothing(pipe: Stack, http: httpx2.Client) -> None:
    accepted = accept(http, batch("ledger", 10, n=4, sampling={"max_tokens": 100}))
    pipe["trajectory_logger"].kill()
    other = accept(http, batch("ledger", 3))
    pipe["trajectory_logger"].start().wait_ready(60)
    for one in (accepted, other):
        items = read_all(http, f"/v1/rollouts/{one['batch_id']}/results", one["cursor"], 20)
        assert sorted(item["group"]["group_id"] for item in items) == sorted(one["group_ids"])


def test_what_was_purged_is_read_from_the_archive_under_the_same_cursors() -> None:
    env = {
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_AGE_S": "0.3",
        "ROLLGRID_TRAJECTORY_LOGGER_ARCHIVE_GROUPS": "4",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_S": "0.5",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_EVERY_S": "0.3",
        "ROLLGRID_TRAJECTORY_LOGGER_RETAIN_STEP": "1",
    }
    with stack(scripted(samplers=1, scorers=0, env=env)) as pipe, httpx2.Client(base_url=pipe.url, timeout=60) as http:
        keeper = accept(http, batch("keeper", 1))  # its last close stays, and with it the stream's first sequence
        read_all(http, f"/v1/rollouts/{keeper['batch_id']}/results", 0)
        first = accept(http, batch("old", 9))
        live = read_all(http, f"/v1/rollouts/{first['batch_id']}/results", 0)
        wait_until(lambda: http.get("/v1/fleet").json()["queues"]["RG_TRAJECTORIES"]["messages"] <= 2, 40, "the purge")
        second = accept(http, batch("old", 4))
        read_all(http, f"/v1/rollouts/{second['batch_id']}/results", second["cursor"])
        archived = read_all(http, f"/v1/rollouts/{first['batch_id']}/results", 0)
        assert archived == live
        run: list[dict[str, Any]] = []
        cursor = 0
        while len(run) < 13:
            page = http.get("/v1/runs/old/trajectories", params={"cursor": cursor, "limit": 5}).json()
            assert page["groups"], "the run ended early"
            run += page["groups"]
            cursor = page["cursor"]
        assert [item["group"]["batch_id"] for item in run] == [first["batch_id"]] * 9 + [second["batch_id"]] * 4
        group = http.get(f"/v1/groups/{live[0]['group']['group_id']}").json()
        assert group == {**live[0], "posted_rewards": []}


def test_a43_an_adapter_that_no_worker_could_load_is_refused_before_its_upload(http: httpx2.Client) -> None:
    (policy,) = http.get("/v1/policies").json()["data"]
    uploads = f"/v1/policies/{policy['policy']}/uploads"
    refused = http.post(uploads, json={"kind": "lora"})
    assert (refused.status_code, refusal(refused)["code"], refusal(refused)["param"]) == (400, "unsupported", "kind")
    assert http.post(uploads, json={"kind": "full"}).status_code == 200
