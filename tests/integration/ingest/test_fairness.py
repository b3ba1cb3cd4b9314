"""I8, A14, A56: one tenant's flood gets 429s, and every request of another is admitted.  No timings here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.servers import SeaweedServer
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import wait_until

from .door import CONTEXT, Door, door, policy_state
from .test_admission import as_, key_entry
from .test_doors import PROMPT, refusal, rollout

REQUESTS = 16


@pytest.fixture(scope="module")
def shared(s3_server: SeaweedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """An ingest of two tenants, without samplers: an interactive call holds its place until its deadline."""
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps([key_entry(name, name, "submit", "read") for name in ("flood", "calm")]))
    env = {
        "ROLLGRID_INGEST_KEYS_FILE": str(keys),
        "ROLLGRID_INGEST_MAX_INFLIGHT_REQUESTS": str(REQUESTS),
        "ROLLGRID_INGEST_MAX_READERS": str(REQUESTS),
        "ROLLGRID_NATS_JOBS_MAX_BYTES": "200000",
    }
    with door(s3_server, env, (policy_state(tiny_model(TinyModel())),)) as running:
        yield running


def generate(deadline_s: float) -> dict[str, Any]:
    sampling = {"max_tokens": 4}
    return {"model": "tiny", "token_ids": PROMPT, "sampling_params": sampling, "deadline_s": deadline_s}


def test_held_requests(shared: Door) -> None:
    with as_(shared, "flood") as flood, as_(shared, "calm") as calm, ThreadPoolExecutor(48) as pool:
        before = len(shared.jobs())
        held = [pool.submit(flood.post, "/inference/v1/generate", json=generate(5)) for _ in range(40)]
        wait_until(lambda: sum(one.done() for one in held) >= 40 - REQUESTS // 2, 20, "the flood's refusals")
        refused = [one.result() for one in held if one.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert {refusal(answer)["limit"] for answer in refused} == {
            f"max_inflight_requests={REQUESTS}, tenant_share=0.5"
        }
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        # the flood holds its half: what the other asks for is taken, batches and calls that wait
        for _ in range(10):
            assert calm.post("/v1/rollouts", json=rollout()).status_code == 202
        waiting = [pool.submit(calm.post, "/inference/v1/generate", json=generate(1)) for _ in range(4)]
        assert [refusal(one.result())["code"] for one in waiting] == ["expired"] * 4
        assert {one.result().status_code for one in held} == {429, 504}
        assert len([job for job in shared.jobs()[before:] if job.tenant == "calm"]) == 14


def test_waiting_readers(shared: Door) -> None:
    path = "/v1/runs/none/trajectories"
    with as_(shared, "flood") as flood, as_(shared, "calm") as calm, ThreadPoolExecutor(48) as pool:
        polls = [pool.submit(flood.get, path, params={"wait_s": 4}) for _ in range(40)]
        wait_until(lambda: sum(one.done() for one in polls) >= 40 - REQUESTS // 2, 20, "the flood's refusals")
        assert {one.result().status_code for one in polls if one.done()} == {429}
        for route in (path, "/v1/runs/none/rewards"):
            assert calm.get(route, params={"wait_s": 0.1}).status_code == 200


def test_the_queue_of_jobs(shared: Door) -> None:
    """RG_JOBS of one flood does not refuse another's jobs."""
    with as_(shared, "flood") as flood, as_(shared, "calm") as calm:
        refused: httpx2.Response | None = None

        def full() -> bool:
            nonlocal refused
            answer = flood.post("/v1/rollouts", json=rollout())
            if answer.status_code != 202:
                refused = answer
            return answer.status_code != 202

        wait_until(full, 30, "the flood's share of the stream", every_s=0)
        assert refused is not None
        assert (refused.status_code, refusal(refused)["code"]) == (429, "queue_full")
        assert "tenant_share=0.5" in refusal(refused)["limit"]
        for _ in range(20):
            assert calm.post("/v1/rollouts", json=rollout()).status_code == 202
        assert flood.post("/v1/rollouts", json=rollout()).status_code == 429


def test_a_hopelessly_long_prompt_is_refused_before_it_is_tokenized(shared: Door) -> None:
    text, ids = "word " * 1_200_000, [5] * (CONTEXT + 1)
    with as_(shared, "calm") as calm:
        for path, body, field in (
            ("/v1/completions", {"model": "tiny", "prompt": text}, "prompt"),
            ("/v1/completions", {"model": "tiny", "prompt": [5, 6] * CONTEXT}, "prompt"),
            ("/v1/rollouts", rollout(tasks=[{"prompt": text}]), "tasks[0]"),
            ("/v1/rollouts", rollout(tasks=[{"messages": [{"role": "user", "content": text}]}]), "tasks[0]"),
            ("/v1/rollouts", rollout(tasks=[{"prompt_token_ids": ids}]), "tasks[0].prompt_token_ids"),
        ):
            answer = calm.post(path, json=body)
            error = refusal(answer)
            assert (answer.status_code, error["code"]) == (400, "context_length_exceeded"), error
            assert (error["param"], error["limit"]) == (field, f"max_model_len={CONTEXT}")
