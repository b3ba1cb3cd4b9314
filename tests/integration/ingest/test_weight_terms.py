"""A43, A44: which versions may serve is said at the door; what never can is refused there, and a run keeps its pace."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import msgspec
import pytest
from rollgrid_contracts import ids, subjects
from rollgrid_contracts.checkpoints import (
    MANIFEST_NAME,
    REFUSED_NAME,
    AdoptedVersion,
    CheckpointKind,
    Pin,
    PolicyState,
    pin_key,
    version_root,
)
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.fleet import RunPace, WorkerState
from rollgrid_contracts.jobs import OnRefresh, Rights, VersionRule, WeightConstraint
from rollgrid_contracts.topology import PINS, POLICIES, RUNS, WORKERS, Header
from rollgrid_ingest.pins import Pins
from rollgrid_ingest.submission import Submission
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.kv import Table

from tests.support.servers import SeaweedServer
from tests.support.tiny_models import TinyModel, tiny_model

from .door import Door, door, policy_state
from .test_doors import refusal, rollout, submitted

OLD = (
    AdoptedVersion(version=2, prefix="v2", going=True),
    *(AdoptedVersion(version=version, prefix=f"v{version}") for version in (3, 4, 5)),
)
LORA = tuple(AdoptedVersion(version=version, kind=CheckpointKind.LORA) for version in (1, 2))


@pytest.fixture(scope="module")
def ingest(s3_server: SeaweedServer) -> Iterator[Door]:
    """`old` has collected versions 1 and 2, `lora` and `other-lora` share a pool, `paced` and others only run ahead."""
    folder = tiny_model(TinyModel())
    pool = ids.pool_id("loras", "float32", "cpu", "local")
    states = [
        policy_state(folder, "old", history=(0, 1, 2, 3, 4, 5), desired=5, newest=5, versions=OLD),
        policy_state(folder, "lora", history=(0, 1, 2), desired=2, newest=2, versions=LORA, pool=pool),
        policy_state(folder, "other-lora", history=(0, 1, 2), desired=2, newest=2, versions=LORA, pool=pool),
        *(policy_state(folder, name) for name in ("paced", "woken", "lossy")),
    ]
    with door(s3_server, states=tuple(states)) as running:
        yield running


def change(ingest: Door, name: str, **changes: Any) -> None:
    async def put() -> None:
        async with ingest.connected() as bus:
            table = Table(bus, POLICIES, PolicyState)
            found = await table.get(f"shared.{name}")
            assert found is not None
            await table.put(f"shared.{name}", msgspec.structs.replace(found.value, **changes))

    asyncio.run(put())


def pins(ingest: Door) -> dict[str, Pin]:
    async def read() -> dict[str, Pin]:
        async with ingest.connected() as bus:
            return {key: entry.value for key, entry in (await Table(bus, PINS, Pin).items()).items()}

    return asyncio.run(read())


def pace_of(ingest: Door, run: str) -> RunPace:
    async def read() -> RunPace:
        async with ingest.connected() as bus:
            found = await Table(bus, RUNS, RunPace).get(f"local.{run}")
            assert found is not None
            return found.value

    return asyncio.run(read())


def store(ingest: Door, name: str, version: int, file: str, content: bytes) -> None:
    async def put() -> None:
        blobs = Blobs(ingest.weed.settings(ingest.bucket))
        await blobs.put(version_root("shared", name, version) + file, content)
        blobs.close()

    asyncio.run(put())


def test_the_jobs_carry_what_was_asked_for(ingest: Door, http: httpx2.Client) -> None:
    body = rollout(model="old", n=100, weights={"min_version": 4}, pin=True, on_refresh="keep")
    (job,) = submitted(ingest, http, body)
    assert (job.weights, job.pinned, job.on_refresh) == (
        WeightConstraint(rule=VersionRule.MIN, value=4),
        True,
        OnRefresh.KEEP,
    )
    assert len(job.indexes) == 100  # a pinned group is one job: two workers may never agree on a version
    plain = submitted(ingest, http, rollout(model="old", n=100))
    assert [(job.pinned, job.on_refresh, len(job.indexes)) for job in plain] == [(False, None, 64), (False, None, 36)]
    wrong = refusal(http.post("/v1/rollouts", json=rollout(model="old", on_refresh="stop")))
    assert (wrong["code"], wrong["param"], wrong["limit"]) == ("invalid_request", "on_refresh", "wait, abort, keep")


def test_an_openai_client_may_ask_for_it_too(ingest: Door) -> None:
    message = {"role": "user", "content": "hi"}
    chat = {"model": "old@4", "messages": [message], "max_tokens": 2, "pin": True, "on_refresh": "abort"}
    with ingest.client() as http, pytest.raises(httpx2.ReadTimeout):  # nobody is there to answer
        http.post("/v1/chat/completions", json=chat, timeout=2, headers={"x-rollgrid-run": "chats"})
    (job,) = [job for job in ingest.jobs() if job.run == "chats"]
    assert (job.weights.value, job.pinned, job.on_refresh) == (4, True, OnRefresh.ABORT)
    bad = refusal(httpx2.post(f"{ingest.url}/v1/completions", json={"model": "old", "prompt": "a", "on_refresh": "x"}))
    assert bad["param"] == "on_refresh"


def test_an_exact_version_is_pinned_before_its_jobs_are_there(ingest: Door, http: httpx2.Client) -> None:
    body = rollout(model="old", weights={"exact_version": 3}, deadline_s=500, tasks=[{"prompt_token_ids": [1]}] * 3)
    jobs = submitted(ingest, http, body)
    pin = pins(ingest)[pin_key("shared", "old", 3, jobs[0].batch_id)]
    assert (pin.batch_id, pin.tenant) == (jobs[0].batch_id, "local")
    assert jobs[0].deadline < pin.until < jobs[0].deadline + 1000
    (free,) = submitted(ingest, http, rollout(model="old", weights={"min_version": 3}))
    assert not [key for key in pins(ingest) if free.batch_id in key]


async def test_a_version_that_goes_while_it_is_being_pinned_is_gone(ingest: Door) -> None:
    """The state a door has read may be older than its pin: it reads it again behind the pin."""
    folder = tiny_model(TinyModel())
    listed = (AdoptedVersion(version=1), AdoptedVersion(version=2))
    before = policy_state(folder, "racing", history=(0, 1, 2), desired=2, newest=2, versions=listed)
    after = msgspec.structs.replace(before, versions=(msgspec.structs.replace(listed[0], going=True), listed[1]))
    asked = Submission(
        tenant="local", run="r", policy=before, model="racing", groups=(), digest="", key="k",
        weights=WeightConstraint(rule=VersionRule.EXACT, value=1), rights=Rights(),
    )  # fmt: skip
    async with ingest.connected() as bus:
        policies, held = Table(bus, POLICIES, PolicyState), Table(bus, PINS, Pin)
        await policies.put("shared.racing", before)
        await Pins(bus).hold(asked, "b-kept", time.time())
        await policies.put("shared.racing", after)
        with pytest.raises(RollgridError) as gone:
            await Pins(bus).hold(asked, "b-late", time.time())
        assert gone.value.code is ErrorCode.VERSION_GONE
        keys = set(await held.items())
        await policies.delete("shared.racing")
    assert pin_key("shared", "racing", 1, "b-kept") in keys
    assert pin_key("shared", "racing", 1, "b-late") not in keys


def test_a_version_that_can_never_serve_is_refused_at_once(ingest: Door, http: httpx2.Client) -> None:
    store(ingest, "old", 6, MANIFEST_NAME, b"{}")
    why = ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="a tensor is not finite")
    store(ingest, "old", 7, MANIFEST_NAME, b"{}")
    store(ingest, "old", 7, REFUSED_NAME, msgspec.json.encode(why))
    expected: list[tuple[dict[str, int], tuple[int, str, bool] | None]] = [
        ({"exact_version": 1}, (410, "version_gone", False)),
        ({"exact_version": 2}, (410, "version_gone", False)),  # its files are going
        ({"exact_version": 3}, None),
        ({"exact_version": 0}, None),
        ({"exact_version": 6}, None),  # published, and being verified: waited for
        ({"min_version": 6}, None),
        ({"exact_version": 7}, (409, "version_unavailable", False)),
        ({"exact_version": 9}, (409, "version_unavailable", False)),
        ({"min_version": 9}, (409, "version_unavailable", False)),
        ({"min_version": 1}, None),
    ]
    for weights, wanted in expected:
        answer = http.post("/v1/rollouts", json=rollout(model="old", weights=weights))
        if wanted is None:
            assert answer.status_code == 202, (weights, answer.text)
            continue
        told = refusal(answer)
        assert (answer.status_code, told["code"], told["retryable"]) == wanted, weights
        assert told["param"] == "weights"
    assert "not finite" in refusal(http.post("/v1/rollouts", json=rollout(model="old@7")))["message"]
    assert refusal(http.post("/v1/rollouts", json=rollout(model="old@1")))["param"] == "model"


def test_a_staleness_that_workers_cannot_hold_adapters_for_is_refused(ingest: Door, http: httpx2.Client) -> None:
    worker = WorkerState(
        worker="w",
        incarnation="w/1",
        pool=ids.pool_id("loras", "float32", "cpu", "local"),
        engine="scripted",
        device="cpu",
        slots=1,
        max_loras=8,
    )

    async def register() -> None:
        async with ingest.connected() as bus:
            await Table(bus, WORKERS, WorkerState).put("w", worker)

    asyncio.run(register())
    fits = http.post("/v1/rollouts", json=rollout(model="lora", weights={"max_staleness": 2}))
    assert fits.status_code == 202, fits.text
    over = http.post("/v1/rollouts", json=rollout(model="lora", weights={"max_staleness": 3}))
    told = refusal(over)
    assert (over.status_code, told["code"], told["param"], told["limit"]) == (
        400,
        "limit_exceeded",
        "weights.max_staleness",
        "max_loras=8",
    )


# -- pace -------------------------------------------------------------------------------------------------------


def paced(name: str, groups: int, **fields: Any) -> dict[str, Any]:
    tasks = [{"prompt_token_ids": [1]}] * groups
    return rollout(model=name, run=name, tasks=tasks, n=1, pace={"batch": 4, "max_staleness": 0}, **fields)


def test_a_run_is_held_to_its_pace_and_what_it_may_not_sample_is_told_so(ingest: Door, http: httpx2.Client) -> None:
    unnamed = refusal(http.post("/v1/rollouts", json=paced("paced", 4)))
    assert (unnamed["code"], unnamed["param"]) == ("invalid_request", "Idempotency-Key")
    never = refusal(http.post("/v1/rollouts", json=paced("paced", 5), headers={"idempotency-key": "large"}))
    assert (never["code"], never["param"], never["limit"]) == (
        "limit_exceeded",
        "tasks",
        "(max_staleness+1)*batch=4",
    )
    first = submitted(ingest, http, paced("paced", 4), **{"idempotency-key": "step-0"})
    assert {job.weights for job in first} == {WeightConstraint()}
    ahead = http.post("/v1/rollouts", json=paced("paced", 4, deadline_s=1), headers={"idempotency-key": "step-1"})
    told = refusal(ahead)
    assert (ahead.status_code, told["code"], told["retryable"], told["param"]) == (429, "paced", True, "pace")
    assert ahead.headers["retry-after"] == "1"
    change(ingest, "paced", history=(0, 3), desired=3, newest=3)
    next_step = submitted(ingest, http, paced("paced", 4), **{"idempotency-key": "step-1b"})
    # workers lag behind what is desired: the jobs themselves say what they need
    assert {job.weights for job in next_step} == {WeightConstraint(rule=VersionRule.MIN, value=3)}
    pace = pace_of(ingest, "paced")
    assert (pace.admitted, pace.versions, pace.version) == (8, 1, 3)
    other = paced("paced", 1) | {"model": "old"}
    assert refusal(http.post("/v1/rollouts", json=other, headers={"idempotency-key": "x"}))["param"] == "pace"


def waiting(ingest: Door, body: dict[str, Any], key: str) -> tuple[threading.Thread, list[httpx2.Response]]:
    """A call that is being held back."""
    answers: list[httpx2.Response] = []

    def call() -> None:
        with ingest.client() as http:
            answers.append(http.post("/v1/rollouts", json=body, headers={"idempotency-key": key}))

    thread = threading.Thread(target=call)
    thread.start()
    give_up = time.monotonic() + 15
    while "rollgrid_ingest_pace_waiting 1.0" not in ingest.process.metrics():
        assert time.monotonic() < give_up, answers
        assert thread.is_alive(), answers
        time.sleep(0.05)
    return thread, answers


def test_a_held_back_call_goes_on_with_the_next_version(ingest: Door, http: httpx2.Client) -> None:
    submitted(ingest, http, paced("woken", 4), **{"idempotency-key": "woken-0"})
    thread, answers = waiting(ingest, paced("woken", 4), "woken-1")
    change(ingest, "woken", history=(0, 1), desired=1, newest=1)
    thread.join(20)
    assert [answer.status_code for answer in answers] == [202]


def test_a_group_without_a_success_gives_its_place_back(ingest: Door, http: httpx2.Client) -> None:
    submitted(ingest, http, paced("lossy", 4), **{"idempotency-key": "lossy-0"})
    thread, answers = waiting(ingest, paced("lossy", 1), "lossy-1")

    async def close(counts: str, job_seqs: str, group: str) -> None:
        async with ingest.connected() as bus:
            headers = {
                Header.GROUP.value: group,
                Header.COUNTS.value: counts,
                Header.JOB_SEQUENCES.value: job_seqs,
            }
            await bus.publish(subjects.trajectories("local", "lossy"), b"x", headers=headers)

    # neither a group with one success nor a submission that was refused took a place for nothing
    asyncio.run(close("succeeded=1,failed=3,cancelled=0,expired=0", "7", "g1"))
    asyncio.run(close("succeeded=0,failed=1,cancelled=0,expired=0", "", "g2"))
    assert pace_of(ingest, "lossy").admitted == 4
    assert thread.is_alive()
    asyncio.run(close("succeeded=0,failed=0,cancelled=0,expired=4", "8", "g3"))
    thread.join(20)
    assert [answer.status_code for answer in answers] == [202]
    pace = pace_of(ingest, "lossy")
    assert (pace.admitted, [item.groups for item in pace.recent]) == (4, [4, 1])
