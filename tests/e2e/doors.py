"""Short ways through the doors for tests that look at what comes out."""

from __future__ import annotations

from typing import Any

import httpx2


def rollouts(http: httpx2.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Submit a batch and read its closed groups (JSON), ordered by position."""
    accepted = http.post("/v1/rollouts", json=body)
    assert accepted.status_code == 202, accepted.text
    batch = accepted.json()
    found: dict[str, dict[str, Any]] = {}
    cursor, done = batch["cursor"], False
    for _ in range(60):
        answer = http.get(f"/v1/rollouts/{batch['batch_id']}/results", params={"cursor": cursor, "wait_s": 10})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        found |= {item["group"]["group_id"]: item["group"] for item in page["groups"]}
        cursor, done = page["cursor"], page["done"]
        if done:
            break
    assert done
    assert set(found) == set(batch["group_ids"])
    return sorted(found.values(), key=lambda group: int(group.get("position", 0)))


def samples(group: dict[str, Any]) -> list[dict[str, Any]]:
    return [entry["sample"] for entry in group["entries"]]


def completion(http: httpx2.Client, **fields: Any) -> dict[str, Any]:
    """POST /v1/completions that must succeed, with ids and the sampled tokens' logprobs."""
    answer = http.post("/v1/completions", json={"logprobs": 0, "return_token_ids": True, **fields})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body
