"""Idempotency, quotas, full queues, keys: what admission promises (I2, I7, I8, A14, A56)."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from rollgrid_contracts import subjects
from rollgrid_contracts.fleet import GroupStatus, LedgerAnswer, LedgerQuery
from rollgrid_contracts.jobs import SampleGroup
from rollgrid_contracts.topology import JOBS, Header

from tests.support.processes import free_port
from tests.support.servers import SeaweedServer
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import wait_until

from .door import Door, door, policy_state
from .test_doors import PROMPT, refusal, rollout


def groups_of(ingest: Door, batch_id: str) -> list[str]:
    return [job.group_id for job in ingest.jobs() if job.batch_id == batch_id]


# -- idempotency (I2) -------------------------------------------------------------------------------


def test_another_body_under_the_same_key_is_a_conflict(ingest: Door, http: httpx2.Client) -> None:
    key = {"idempotency-key": "key-conflict"}
    first = http.post("/v1/rollouts", json=rollout(), headers=key)
    assert first.status_code == 202
    other = http.post("/v1/rollouts", json=rollout(n=3), headers=key)
    assert other.status_code == 409
    assert refusal(other)["code"] == "idempotency_conflict"
    assert len(groups_of(ingest, first.json()["batch_id"])) == 1


@pytest.mark.parametrize("key", ["", "x" * 256, "tab\there"])
def test_unusable_keys_are_refused(http: httpx2.Client, key: str) -> None:
    answer = http.post("/v1/rollouts", json=rollout(), headers={"idempotency-key": key})
    assert refusal(answer)["param"] == "Idempotency-Key"


async def _answering(ingest: Door, known: set[str], work: Any) -> Any:
    """Run `work` in a thread while a stand-in for the ledger's answers says that it has read everything."""
    async with ingest.connected() as bus:

        async def on_query(query: LedgerQuery, reply: str) -> None:
            latest = (await bus.stream_info(JOBS.name)).state.last_seq
            groups = tuple(GroupStatus(group_id=group, known=group in known) for group in query.group_ids)
            await bus.respond(reply, LedgerAnswer(epoch=1, folded_to=latest, groups=groups))

        subscription = await bus.subscribe(subjects.LEDGER_QUERY, LedgerQuery, on_query)
        await bus.client.flush()
        try:
            return await asyncio.to_thread(work)
        finally:
            await subscription.unsubscribe()


def test_a_repeated_key_gives_the_same_ids_and_publishes_only_what_is_missing(
    ingest: Door, http: httpx2.Client
) -> None:
    body = rollout(tasks=[{"prompt_token_ids": PROMPT}] * 7, run="again")

    def post() -> httpx2.Response:
        return http.post("/v1/rollouts", json=body, headers={"idempotency-key": "key-again"})

    first = post().json()
    stored = groups_of(ingest, first["batch_id"])
    assert stored == first["group_ids"]
    again = asyncio.run(_answering(ingest, set(first["group_ids"]), post)).json()
    assert (again["batch_id"], again["group_ids"], again["cursor"]) == (
        first["batch_id"],
        first["group_ids"],
        first["cursor"],
    )
    assert groups_of(ingest, first["batch_id"]) == stored
    lost = first["group_ids"][5:]
    assert asyncio.run(_answering(ingest, set(first["group_ids"][:5]), post)).status_code == 202
    assert groups_of(ingest, first["batch_id"])[7:] in (lost, [])  # the stream drops copies of the last two minutes


def test_a_repeated_key_waits_for_a_ledger(http: httpx2.Client) -> None:
    key = {"idempotency-key": "key-without-ledger"}
    assert http.post("/v1/rollouts", json=rollout(), headers=key).status_code == 202
    again = http.post("/v1/rollouts", json=rollout(), headers=key)
    assert again.status_code == 503
    assert refusal(again)["code"] == "not_ready"


def test_the_same_key_of_two_runs_is_one_key(http: httpx2.Client) -> None:
    key = {"idempotency-key": "key-runs"}
    assert http.post("/v1/rollouts", json=rollout(), headers=key).status_code == 202
    assert http.post("/v1/rollouts", json=rollout(run="other"), headers=key).status_code == 409


# -- overload (I8) ----------------------------------------------------------------------------------


def test_a_full_queue_is_429_and_nothing_is_lost(s3_server: SeaweedServer) -> None:
    with door(s3_server, {"ROLLGRID_NATS_JOBS_MAX_BYTES": "20000"}) as full, full.client() as http:
        accepted: list[str] = []
        answer = http.post("/v1/rollouts", json=rollout())
        while answer.status_code == 202 and len(accepted) < 200:
            accepted.append(answer.json()["batch_id"])
            answer = http.post("/v1/rollouts", json=rollout())
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        error = refusal(answer)
        assert (error["code"], error["retryable"], error["type"]) == ("queue_full", True, "rate_limit_error")
        assert [job.batch_id for job in full.jobs()] == accepted
        # a batch that does not fit as a whole stores nothing
        many = http.post("/v1/rollouts", json=rollout(tasks=[{"prompt_token_ids": PROMPT}] * 100))
        assert many.status_code == 429
        assert len(full.jobs()) == len(accepted)


def test_a_tenants_samples_in_flight_are_bounded_over_restarts_and_freed_by_closes(s3_server: SeaweedServer) -> None:
    with door(s3_server, {"ROLLGRID_INGEST_MAX_INFLIGHT_SAMPLES": "10"}) as bounded, bounded.client() as http:
        first = http.post("/v1/rollouts", json=rollout(n=6)).json()
        over = http.post("/v1/rollouts", json=rollout(n=5))
        assert over.status_code == 429
        assert refusal(over)["limit"] == "max_inflight_samples=10"
        assert http.post("/v1/rollouts", json=rollout(n=4)).status_code == 202
        never = http.post("/v1/rollouts", json=rollout(n=11))
        assert (never.status_code, refusal(never)["code"]) == (400, "limit_exceeded")
        bounded.process.restart(40)
        assert http.post("/v1/rollouts", json=rollout(n=1)).status_code == 429

        async def close() -> None:
            """What the ledger does at a close, as far as counting looks at it."""
            async with bounded.connected() as bus:
                subject = subjects.trajectories("local", "doors")
                headers = {Header.GROUP.value: first["group_ids"][0]}
                await bus.publish(subject, b"\x80", headers=headers)

        asyncio.run(close())
        wait_until(lambda: http.post("/v1/rollouts", json=rollout(n=6)).status_code == 202, 30, "room after a close")
        assert http.post("/v1/rollouts", json=rollout(n=1)).status_code == 429


def test_without_nats_the_door_says_503_and_comes_back(s3_server: SeaweedServer) -> None:
    env = {"ROLLGRID_INGEST_PUBLISH_TIMEOUT_S": "1"}
    with door(s3_server, env) as lonely, lonely.client() as http:
        assert http.post("/v1/rollouts", json=rollout()).status_code == 202
        before = len(lonely.jobs())
        lonely.nats.kill()
        answer = http.post("/v1/rollouts", json=rollout())
        assert answer.status_code == 503
        assert refusal(answer)["code"] == "bus_error"
        wait_until(lambda: http.get("/readyz").status_code == 503, 10, "not ready")
        assert http.get("/livez").status_code == 200
        lonely.nats.start().wait_ready(10)
        wait_until(lambda: http.get("/readyz").status_code == 200, 20, "ready again")
        assert http.post("/v1/rollouts", json=rollout()).status_code == 202
        # what was refused may have been stored when the connection came back: then it is cancelled
        assert len(lonely.jobs()) in (before + 1, before + 2)
        if len(lonely.jobs()) == before + 2:
            (refused,) = [job.batch_id for job in lonely.jobs()][1:-1]
            wait_until(lambda: refused in lonely.cancelled(), 20, "the refused batch is cancelled")


def test_a_drain_refuses_new_work_and_ends_cleanly(s3_server: SeaweedServer) -> None:
    with door(s3_server) as leaving, leaving.client() as http:
        assert http.get("/v1/models").status_code == 200
        assert leaving.process.stop() == 0


HEALTH_PORT = free_port()


# -- keys and tenants (I7, A56) ---------------------------------------------------------------------


def key_entry(key: str, tenant: str, *scopes: str) -> dict[str, Any]:
    return {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant, "scopes": list(scopes)}


@pytest.fixture(scope="module")
def keyed(s3_server: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    path: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    path.write_text(
        json.dumps(
            [
                key_entry("alice", "alice", "submit", "read"),
                key_entry("bob", "bob", "submit", "read"),
                key_entry("root", "ops", "submit", "read", "admin"),
                key_entry("eyes", "alice", "read"),
            ]
        )
    )
    folder = tiny_model(TinyModel())
    states = (policy_state(folder), policy_state(folder, "secret", tenant="alice"))
    env = {"ROLLGRID_INGEST_KEYS_FILE": str(path), "ROLLGRID_INGEST_HEALTH_PORT": str(HEALTH_PORT)}
    with door(s3_server, env, states) as running:
        yield running


def as_(keyed: Door, key: str) -> httpx2.Client:
    return keyed.client(headers={"authorization": f"Bearer {key}"})


def test_nobody_is_anonymous(keyed: Door) -> None:
    with keyed.client() as http:
        for path in ("/v1/models", "/v1/fleet", "/v1/runs/x/trajectories", "/metrics", "/nowhere"):
            answer = http.get(path)
            assert answer.status_code == 401, path
            assert refusal(answer)["code"] == "unauthenticated"
        assert http.post("/v1/rollouts", json=rollout()).status_code == 401
        assert http.get("/readyz").status_code == 200


def test_an_operator_scrapes_a_port_of_its_own_without_a_key(keyed: Door) -> None:
    with as_(keyed, "eyes") as http:
        assert http.get("/metrics").status_code == 403
    with as_(keyed, "root") as http:
        assert "rollgrid_ingest_requests_total" in http.get("/metrics").text
    own = f"http://127.0.0.1:{HEALTH_PORT}"
    assert 'rollgrid_ingest_requests_total{route="/metrics",status="403"}' in httpx2.get(f"{own}/metrics").text
    assert httpx2.get(f"{own}/readyz").status_code == 200
    assert httpx2.get(f"{own}/v1/models").status_code == 404, "nothing of the door is there"


def test_scopes(keyed: Door) -> None:
    with as_(keyed, "eyes") as http:
        assert http.get("/v1/models").status_code == 200
        assert http.post("/v1/rollouts", json=rollout()).status_code == 403
    with as_(keyed, "alice") as http:
        assert http.get("/v1/fleet").status_code == 403
        for path in ("uploads", "uploads/u/shards", "uploads/u/commit", "rollback"):
            assert http.post(f"/v1/policies/tiny/{path}", json={}).status_code == 403, path
        assert http.put("/v1/policies/tiny/uploads/u/files/config.json", content=b"{}").status_code == 403
    with as_(keyed, "root") as http:
        assert http.get("/v1/fleet").status_code == 200


def test_the_tenant_is_that_of_the_key_and_others_do_not_exist(keyed: Door) -> None:
    with as_(keyed, "alice") as alice, as_(keyed, "bob") as bob:
        accepted = alice.post("/v1/rollouts", json=rollout(model="secret")).json()
        (job,) = [job for job in keyed.jobs() if job.batch_id == accepted["batch_id"]]
        assert isinstance(job, SampleGroup)
        assert (job.tenant, job.rights.grant_id) == ("alice", "own:alice")
        assert [model["id"] for model in bob.get("/v1/models").json()["data"]] == ["tiny", "alias-of-tiny"]
        assert bob.post("/v1/rollouts", json=rollout(model="secret")).status_code == 404
        assert bob.get("/v1/policies/secret").status_code == 404
        assert bob.post("/v1/policies/secret/uploads", json={"upload": "mine"}).status_code == 404
        assert bob.put("/v1/policies/secret/uploads/mine/files/config.json", content=b"{}").status_code == 404
        # alice's batch is known to this process, and still not to bob
        assert alice.get(f"/v1/rollouts/{accepted['batch_id']}/results?run=doors").status_code == 200
        assert bob.get(f"/v1/rollouts/{accepted['batch_id']}").status_code in (404, 503)
        assert bob.post(f"/v1/rollouts/{accepted['batch_id']}/cancel").status_code in (404, 503)


def test_the_same_key_of_two_tenants_is_two_keys(keyed: Door) -> None:
    key = {"idempotency-key": "shared-key"}
    with as_(keyed, "alice") as alice, as_(keyed, "bob") as bob:
        first = alice.post("/v1/rollouts", json=rollout(), headers=key)
        second = bob.post("/v1/rollouts", json=rollout(n=5), headers=key)
        assert (first.status_code, second.status_code) == (202, 202)
        assert first.json()["batch_id"] != second.json()["batch_id"]


def test_beyond_loopback_ingest_refuses_to_start_without_keys(s3_server: SeaweedServer, ingest: Door) -> None:
    from tests.support.processes import ProcessDied
    from tests.support.services import run_service

    env = {**ingest.nats.env(), **s3_server.env(ingest.bucket), "ROLLGRID_INGEST_HOST": "0.0.0.0"}
    with pytest.raises(ProcessDied, match="refusing to serve"), run_service("ingest", env, ready_s=20):
        pass
