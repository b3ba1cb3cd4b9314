"""What rollgrid's records hold of a call, to be compared with its answer."""

from __future__ import annotations

import time
from typing import Any

import httpx2

from .endpoints import Endpoint


def samples_of(endpoint: Endpoint, run: str, count: int, timeout_s: float = 60.0) -> list[dict[str, Any]]:
    """The samples of a run's closed groups in order, once there are `count`."""
    deadline = time.monotonic() + timeout_s
    found: list[dict[str, Any]] = []
    with httpx2.Client(base_url=endpoint.url, headers={"authorization": f"Bearer {endpoint.key}"}, timeout=60) as http:
        cursor = 0
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} samples of {run} are recorded"
            answer = http.get(f"/v1/runs/{run}/trajectories", params={"cursor": cursor, "wait_s": 5})
            assert answer.status_code == 200, answer.text
            page = answer.json()
            found += [entry["sample"] for item in page["groups"] for entry in item["group"]["entries"]]
            cursor = page["cursor"]
    assert len(found) == count
    return found
