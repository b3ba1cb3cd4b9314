"""The log of every service that worked on a group names it, in lines that are JSON."""

from __future__ import annotations

import json
import secrets
from typing import Any

from rollgrid import Client

from tests.integration.telemetry.test_traces import submit
from tests.support.stack import Stack
from tests.support.waiting import wait_until

STEPS = {
    "ingest": ("jobs_stored",),
    "sampler": ("job_settled",),
    "scorer": ("event_handled",),
    "trajectory_logger": ("group_closed", "group_archived"),
}


def lines_of(pipe: Stack, service: str) -> list[dict[str, Any]]:
    """Every line of the service's processes; each must be a JSON object."""
    found: list[dict[str, Any]] = []
    for process in pipe.named(service):
        found += [json.loads(line) for line in process.log.read_text().splitlines()]
    return found


def about(pipe: Stack, service: str, group: str) -> dict[str, dict[str, Any]]:
    return {
        line["event"]: line
        for line in lines_of(pipe, service)
        if line.get("group") == group or group in line.get("groups", ())
    }


def test_the_logs_of_one_job_carry_its_ids_through_all_services(pipe: Stack, client: Client) -> None:
    trace = secrets.token_hex(16)
    batch = submit(pipe, trace=trace, run="logged")
    group = batch["group_ids"][0]
    list(client.batch(batch["batch_id"]).groups(timeout=60))
    wait_until(lambda: "group_archived" in about(pipe, "trajectory_logger", group), 30, "archived", every_s=0.2)
    for service, events in STEPS.items():
        said = about(pipe, service, group)
        for event in events:
            assert said[event]["tenant"] == "local", (service, event)
            assert said[event]["run"] == "logged"
            assert said[event]["trace_id"] == trace
            assert said[event]["service"] == service
    assert about(pipe, "ingest", group)["jobs_stored"]["request_id"]
    assert lines_of(pipe, "checkpoint_sync")


def test_no_line_holds_a_secret_of_the_stack(pipe: Stack) -> None:
    environment = pipe.environment()
    hidden = [value for name, value in environment.items() if name.endswith(("PASSWORD", "SECRET_KEY"))]
    assert hidden
    for process in pipe.services.values():
        text = process.log.read_text()
        assert not [value for value in hidden if value in text], process.name
