"""What goes in comes out as jobs in RG_JOBS, exactly once each; what is wrong never gets there."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from rollgrid_contracts import ids
from rollgrid_contracts.jobs import Priority, Purpose, Reply, SampleGroup, VersionRule

from .door import CONTEXT, POOL, Door

PROMPT = [5, 6, 7]


def rollout(**fields: Any) -> dict[str, Any]:
    return {
        "run": "doors",
        "model": "tiny",
        "n": 2,
        "sampling": {"max_tokens": 4},
        "tasks": [{"prompt_token_ids": PROMPT}],
        **fields,
    }


def submitted(ingest: Door, http: httpx2.Client, body: dict[str, Any], **headers: str) -> list[SampleGroup]:
    """The jobs of a batch that must be accepted, by position and shard."""
    answer = http.post("/v1/rollouts", json=body, headers=headers)
    assert answer.status_code == 202, answer.text
    batch = answer.json()["batch_id"]
    found = [job for job in ingest.jobs() if job.batch_id == batch]
    return sorted(found, key=lambda job: (job.position, job.shard))


def refusal(answer: httpx2.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code", "retryable"}
    assert answer.headers["x-request-id"] == error["request_id"]
    return error


def test_a_batch_becomes_jobs_with_everything_asked_for(ingest: Door, http: httpx2.Client) -> None:
    tasks = [
        {"prompt": "hello", "task": {"answer": "42"}, "metadata": {"row": 1}},
        {"messages": [{"role": "user", "content": "hi"}], "n": 3, "sampling": {"temperature": 0.5}, "scorers": []},
        {"prompt_token_ids": PROMPT, "deadline_s": 5},
    ]
    body = rollout(
        tasks=tasks,
        sampling={"max_tokens": 4, "seed": 11, "stop": "x"},
        scorers=["exact_match", {"type": "numeric", "name": "num", "weight": 0.5, "gate": True}],
        deadline_s=100,
        priority="bulk",
        weights={"min_version": 0},
        engagement_id="e-1",
        metadata={"set": "a"},
    )
    first, second, third = submitted(ingest, http, body)
    assert [job.n for job in (first, second, third)] == [2, 3, 2]
    assert [job.indexes for job in (first, second)] == [(0, 1), (0, 1, 2)]
    assert first.prompt_text == "hello"
    assert (first.task, first.metadata, third.metadata) == ({"answer": "42"}, {"set": "a", "row": 1}, {"set": "a"})
    assert second.messages == ({"role": "user", "content": "hi"},)
    assert second.sampling.temperature == 0.5
    assert second.sampling.stop == ("x",)
    assert [spec.name for spec in first.scorers] == ["exact_match", "num"]
    assert (first.scorers[1].weight, first.scorers[1].gate, second.scorers) == (0.5, True, ())
    assert first.pool == POOL
    assert first.priority is Priority.BULK
    assert first.weights.rule is VersionRule.MIN
    assert first.rights.purposes == tuple(Purpose)
    assert first.rights.grant_id == "own:local"
    assert first.engagement_id == "e-1"
    assert round(first.deadline - first.created_at) == 100
    assert round(third.deadline - third.created_at) == 5
    assert first.reply is Reply.NONE


def test_one_seed_for_a_batch_gives_no_two_groups_the_same_sample_seeds(ingest: Door, http: httpx2.Client) -> None:
    body = rollout(tasks=[{"prompt_token_ids": PROMPT}] * 6, n=8, sampling={"max_tokens": 4, "seed": 7})
    jobs = submitted(ingest, http, body)
    assert jobs[0].sampling.seed == 7
    seeds = [ids.sample_seed(job.sampling.seed or 0, index) for job in jobs for index in job.indexes]
    assert len(set(seeds)) == 48
    assert [job.sampling.seed for job in submitted(ingest, http, body)] == [job.sampling.seed for job in jobs]


def test_a_large_group_is_split_into_shards(ingest: Door, http: httpx2.Client) -> None:
    jobs = submitted(ingest, http, rollout(n=150))
    assert [(job.shard, job.shards, len(job.indexes)) for job in jobs] == [(0, 3, 64), (1, 3, 64), (2, 3, 22)]
    assert len({job.group_id for job in jobs}) == 1
    assert [index for job in jobs for index in job.indexes] == list(range(150))


def test_many_groups_are_stored_in_order(ingest: Door, http: httpx2.Client) -> None:
    body = rollout(tasks=[{"prompt_token_ids": [i % 500]} for i in range(1203)], n=1)
    answer = http.post("/v1/rollouts", json=body).json()
    jobs = [job for job in ingest.jobs() if job.batch_id == answer["batch_id"]]
    assert [job.group_id for job in jobs] == answer["group_ids"]


@pytest.mark.parametrize(
    ("weights", "rule", "value"),
    [
        ({"exact_version": 0}, VersionRule.EXACT, 0),
        ({"max_staleness": 3}, VersionRule.MAX_STALENESS, 3),
        ({"rule": "min_version", "value": 0}, VersionRule.MIN, 0),
        ({}, VersionRule.LATEST, 0),
    ],
)
def test_weight_constraints(
    ingest: Door, http: httpx2.Client, weights: dict[str, Any], rule: VersionRule, value: int
) -> None:
    (job,) = submitted(ingest, http, rollout(weights=weights))
    assert (job.weights.rule, job.weights.value) == (rule, value)


def test_an_alias_and_a_pinned_version_name_the_policy(ingest: Door, http: httpx2.Client) -> None:
    (job,) = submitted(ingest, http, rollout(model="alias-of-tiny@0"))
    assert (job.policy, job.model, job.weights.rule) == ("tiny", "alias-of-tiny@0", VersionRule.EXACT)
    (unnamed,) = submitted(ingest, http, rollout(model=None))
    assert unnamed.policy == "tiny"


REFUSED: dict[str, tuple[dict[str, Any], int, str, str | None]] = {
    "context": ({"tasks": [{"prompt_token_ids": [5] * 509}]}, 400, "context_length_exceeded", "tasks[0]"),
    "max-tokens-over-context": ({"sampling": {"max_tokens": CONTEXT}}, 400, "context_length_exceeded", "sampling.max_tokens"),
    "no-max-tokens": ({"sampling": {"seed": 1}}, 400, "invalid_request", "sampling.max_tokens"),
    "no-max-tokens-of-a-task": ({"sampling": None, "tasks": [{"prompt": "a", "sampling": {"seed": 1}}]}, 400, "invalid_request", "tasks[0].sampling.max_tokens"),
    "n": ({"n": 1025}, 400, "limit_exceeded", "n"),
    "n-of-a-task": ({"tasks": [{"prompt": "a", "n": 0}]}, 400, "limit_exceeded", "tasks[0].n"),
    "samples": ({"n": 1000, "tasks": [{"prompt": "a"}] * 66}, 400, "limit_exceeded", "n"),
    "groups": ({"tasks": [{"prompt": "a"}] * 4097}, 400, "limit_exceeded", "tasks"),
    "token-over": ({"tasks": [{"prompt_token_ids": [512]}]}, 400, "token_out_of_range", "tasks[0].prompt_token_ids"),
    "token-under": ({"tasks": [{"prompt_token_ids": [-1]}]}, 400, "token_out_of_range", "tasks[0].prompt_token_ids"),
    "empty-prompt": ({"tasks": [{"prompt": ""}]}, 400, "empty_prompt", "tasks[0]"),
    "empty-ids": ({"tasks": [{"prompt_token_ids": []}]}, 400, "empty_prompt", "tasks[0].prompt_token_ids"),
    "empty-messages": ({"tasks": [{"messages": []}]}, 400, "empty_prompt", "tasks[0].messages"),
    "no-prompt": ({"tasks": [{}]}, 400, "invalid_request", "tasks[0]"),
    "two-prompts": ({"tasks": [{"prompt": "a", "prompt_token_ids": [1]}]}, 400, "invalid_request", "tasks[0]"),
    "no-tasks": ({"tasks": []}, 400, "invalid_request", "tasks"),
    "model": ({"model": "nobody"}, 404, "model_not_found", "model"),
    "two-models": ({"policy": "other"}, 400, "invalid_request", "policy"),
    "version": ({"weights": {"exact_version": 9}}, 409, "version_unavailable", "weights"),
    "version-in-name": ({"model": "tiny@9"}, 409, "version_unavailable", "model"),
    "two-rules": ({"weights": {"exact_version": 0, "min_version": 0}}, 400, "invalid_request", "weights"),
    "negative-version": ({"weights": {"min_version": -1}}, 400, "limit_exceeded", "weights"),
    "scorer": ({"scorers": ["vibes"]}, 400, "invalid_request", "scorers[0].type"),
    "scorer-twice": ({"scorers": ["numeric", "numeric"]}, 400, "invalid_request", "scorers"),
    "scorer-kind": ({"scorers": [{"type": "numeric", "kind": "judge"}]}, 400, "unsupported", "scorers[0].kind"),
    "scorer-timeout": ({"scorers": [{"type": "numeric", "timeout_s": 1e9}]}, 400, "limit_exceeded", "scorers[0].timeout_s"),
    "deadline": ({"deadline_s": 0}, 400, "limit_exceeded", "deadline_s"),
    "priority": ({"priority": "now"}, 400, "invalid_request", "priority"),
    "rights": ({"rights": {"purposes": ["everything"]}}, 400, "invalid_request", "rights.purposes"),
    "rights-without-execute": ({"rights": {"purposes": ["train"]}}, 400, "invalid_request", "rights.purposes"),
    "images": ({"tasks": [{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}]}, 400, "unsupported", "tasks[0].messages[0].content"),
    "role": ({"tasks": [{"messages": [{"content": "x"}]}]}, 400, "invalid_request", "tasks[0].messages[0].role"),
    "no-content": ({"tasks": [{"messages": [{"role": "user"}]}]}, 400, "invalid_request", "tasks[0].messages[0].content"),
    "template-option": ({"tasks": [{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}}]}, 400, "invalid_request", "tasks[0]"),
    "big-integer": ({"metadata": {"a": 2**70}}, 400, "invalid_request", "metadata"),
    "formula": ({"reward_formula": "a+b", "scorers": ["numeric"]}, 400, "invalid_request", "reward_formula"),
    "formula-without-scorers": ({"reward_formula": "1*a"}, 400, "invalid_request", "reward_formula"),
    "gates-only": ({"scorers": [{"type": "numeric", "gate": True}]}, 400, "invalid_request", "scorers"),
    "webhook": ({"scorers": [{"type": "webhook", "params": {"url": "https://a.org/"}}]}, 400, "invalid_request", "scorers[0].type"),
    "unknown": ({"colour": "red"}, 400, "unknown_field", "colour"),
    "unknown-in-task": ({"tasks": [{"prompt": "a", "colour": "red"}]}, 400, "unknown_field", "tasks[0].colour"),
    **{f"run-{bad!r}": ({"run": bad}, 400, "invalid_request", "run") for bad in ("", "a.b", "*", ">", "a b", "ü", "-a", "x" * 64, "_rejected", "a\n")},
}  # fmt: skip


@pytest.mark.parametrize(("fields", "status", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_batch_is_refused_whole(
    http: httpx2.Client, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    answer = http.post("/v1/rollouts", json=rollout(**fields))
    assert answer.status_code == status, answer.text
    error = refusal(answer)
    assert (error["code"], error["param"]) == (code, param)
    assert error["retryable"] is False
    if code in ("limit_exceeded", "context_length_exceeded", "token_out_of_range", "version_unavailable"):
        assert error["limit"]


def test_refused_batches_leave_no_job(ingest: Door, http: httpx2.Client) -> None:
    before = len(ingest.jobs())
    for fields, status, *_ in REFUSED.values():
        assert http.post("/v1/rollouts", json=rollout(**fields)).status_code == status
    assert len(ingest.jobs()) == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("suffix", "x"),
        ("use_beam_search", True),
        ("truncate_prompt_tokens", 5),
        ("vllm_xargs", {"a": 1}),
    ],
)
def test_completions_refuse_by_name_what_they_do_not_offer(http: httpx2.Client, field: str, value: object) -> None:
    answer = http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", field: value})
    assert answer.status_code == 400
    error = refusal(answer)
    assert (error["code"], error["param"]) == ("unsupported", field)


def test_generate_requires_max_tokens(http: httpx2.Client) -> None:
    answer = http.post("/inference/v1/generate", json={"token_ids": PROMPT, "sampling_params": {}})
    assert refusal(answer)["param"] == "sampling_params.max_tokens"


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/v1/rollouts"])
def test_a_body_over_the_bound_is_refused_before_it_is_read(http: httpx2.Client, path: str) -> None:
    big = b'{"prompt":"' + b"a" * (10 * 2**20) + b'"}'

    def chunks() -> Any:
        for start in range(0, len(big), 65536):
            yield big[start : start + 65536]

    for content in (big, chunks()):
        answer = http.post(path, content=content)
        assert answer.status_code == 413
        error = refusal(answer)
        assert (error["code"], error["limit"]) == ("payload_too_large", f"max_body_bytes={8 * 2**20}")
    assert http.get("/v1/models").status_code == 200


def test_methods_and_paths_that_are_not_there(http: httpx2.Client) -> None:
    assert refusal(http.get("/nowhere"))["code"] == "not_found"
    assert refusal(http.get("/v1/completions"))["code"] == "invalid_request"
    assert http.get("/v1/completions").status_code == 405
    assert refusal(http.get("/v1/runs/a.b/trajectories"))["param"] == "run"
    assert refusal(http.get("/v1/runs/a/trajectories?cursor=-1"))["param"] == "cursor"
    assert refusal(http.get("/v1/runs/a/trajectories?limit=x"))["param"] == "limit"
    assert refusal(http.get("/v1/runs/a/trajectories?wait_s=nan"))["param"] == "wait_s"


def test_without_a_ledger_unknown_batches_are_not_said_to_be_missing(http: httpx2.Client) -> None:
    answer = http.get("/v1/rollouts/bnosuchbatch")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert refusal(answer)["code"] == "not_ready"


def test_models_and_policies(http: httpx2.Client) -> None:
    models = http.get("/v1/models").json()["data"]
    assert [(model["id"], model["root"], model["max_model_len"]) for model in models] == [
        ("tiny", "tiny", CONTEXT),
        ("alias-of-tiny", "tiny", CONTEXT),
    ]
    assert http.get("/v1/models/alias-of-tiny").json()["parent"] == "tiny"
    assert http.get("/v1/models/none").status_code == 404
    policy = http.get("/v1/policies/tiny").json()
    assert (policy["desired"], policy["newest"], policy["workers"], policy["pool"]) == (0, 0, [], POOL)
    assert [each["policy"] for each in http.get("/v1/policies").json()["data"]] == ["tiny"]
    assert http.get("/v1/policies/none").status_code == 404


def test_readiness_names_what_is_missing_and_the_document_covers_every_route(http: httpx2.Client) -> None:
    assert http.get("/readyz").json()["problems"] == {}
    assert http.get("/livez").json() == {"status": "alive"}
    document = http.get("/openapi.json").json()
    paths = set(document["paths"])
    assert paths >= {"/v1/models", "/v1/completions", "/inference/v1/generate", "/v1/rollouts", "/v1/fleet"}
    schemas = document["components"]["schemas"]
    text = json.dumps(document)
    for reference in {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}:
        assert reference in schemas
    assert schemas["GroupClosed"]["properties"]["prompt_token_ids"]["items"]["type"] == "integer"
    assert "422" not in text


def test_the_fleet_shows_queues(http: httpx2.Client) -> None:
    fleet = http.get("/v1/fleet").json()
    jobs = fleet["queues"]["RG_JOBS"]
    assert jobs["consumers"]["ledger-0"]["pending"] == jobs["messages"]
    assert fleet["workers"] == []


def test_metrics_count_by_route_and_not_by_path(http: httpx2.Client) -> None:
    http.get("/v1/rollouts/bone/results?run=a")
    http.get("/nowhere/at/all")
    text = http.get("/metrics").text
    assert 'rollgrid_ingest_requests_total{route="/v1/rollouts/{batch_id}/results",status="200"}' in text
    assert 'route="unmatched",status="404"' in text
    assert "bone" not in text
    assert "nowhere" not in text
    assert 'rollgrid_ingest_refused_total{code="not_found"}' in text
